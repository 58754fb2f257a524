"""Double-buffered weights (PipeDream-2BW, section 3): a step's microbatches use weights one version old, so nothing waits.

W(t+1) = W(t) - lr * f(gradient at W(t-1)): step t, counted from 0, runs on version max(t - 1, 0), its update makes version
t + 1 of version t. Two versions are alive: a new one takes the place of the one whose last B is done (W needs no weights,
or, where a step runs whole backwards, is done as well).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zbfx.errors import RankError
from zbfx.runtime.weights import Weights

Correction = Callable[[Tensor, Tensor, Tensor], Tensor]  # gradient, newest weights, weights it was taken at -> gradient


def taylor(grad: Tensor, newest: Tensor, taken_at: Tensor) -> Tensor:
    """The gradient brought to the newest weights by a first-order step, with the squared gradient for the Hessian's diagonal
    (DC-ASGD, arXiv 1609.08326), scaled by the gradient's root mean square so that it does not depend on the loss's scale.
    """
    scale = grad.square().mean().sqrt().clamp_min(1e-30)
    return grad + grad.square() / scale * (newest - taken_at)


CORRECTIONS: dict[str, Correction] = {"taylor": taylor}


class Versions(Weights):
    """The weights of one rank under 2BW. `step` counts the calls since the stream began."""

    def __init__(self, *args: Any, correction: Correction | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._correction = correction
        self._kept: dict[int, dict[int, Tensor]] = {}  # version -> parameter -> its values
        self._gradients: list[Tensor | None] = []
        self._scales: deque[float] = deque()
        self.restart()

    def restart(self) -> None:
        """A stream begins (or ended: one version is left, the newest)."""
        newest = {id(w.parameter): w.parameter.data for w in self.weights}
        self.step, self.newest = -1, 0
        self._kept = {0: newest}

    @property
    def alive(self) -> tuple[int, ...]:
        """The versions that are held."""
        return tuple(sorted(self._kept))

    def begin(self) -> None:
        super().begin()
        self.step += 1
        self._scales.append(self.scale.value)
        self._scale_of_step = self.scale.value

    def used(self, back: int = 0) -> int:
        """The version that the microbatches of the step `back` steps ago use."""
        return max(self.step - back - 1, 0)

    def values(self, given: Sequence[Tensor], version: int) -> tuple[Tensor, ...]:
        """A stage's parameters as they were in a version; what is not trained has one version."""
        if version not in self._kept:
            raise RankError(f"version {version} of the weights is needed, alive are {self.alive}: too few microbatches a step")
        table = self._kept[version]
        return tuple(table.get(id(tensor), tensor.detach()) for tensor in given)

    def measure(self, *table: Tensor) -> tuple[Tensor, ...]:
        result = super().measure(*table)
        self._gradients = [w.target.grad for w in self.weights]
        for w in self.weights:
            w.target.grad = None
        return result

    def update(self) -> None:
        """Make the next version in the place of the oldest."""
        factor = self.verdicts[self.updates].factor if self.rules.checked else 1.0
        self.updates += 1
        waiting = [w.target.grad for w in self.weights]  # of the step that has begun meanwhile
        for w, grad in zip(self.weights, self._gradients, strict=True):
            w.target.grad = grad if grad is None or self._correction is None else self._corrected(w, grad)
        self._move_on()
        self._apply(factor)
        self._gradients = []
        for w, grad in zip(self.weights, waiting, strict=True):
            w.target.grad = grad

    def consistent(self) -> dict[int, Tensor]:
        """Between calls: id of each parameter -> its values in the newest version that every rank has."""
        return self._kept[min(max(self.step, 0), self.newest)]

    def scaled(self, weight: Tensor) -> Tensor:
        return weight if self._scale_of_step == 1.0 else weight * self._scale_of_step

    # ------------------------------------------------------------ behind them

    def _corrected(self, w: Any, grad: Tensor) -> Tensor:
        at = self._kept[max(self.newest - 1, 0)][id(w.parameter)]
        return self._correction(grad, w.parameter.data, at) if self._correction is not None else grad

    def _move_on(self) -> None:
        """The parameters move to the storage of the oldest version, with the newest's values."""
        newest = self._kept[self.newest]
        oldest = self._kept.pop(self.newest - 1, None)
        moved = {}
        with torch.no_grad():
            for w in self.weights:
                now = newest[id(w.parameter)]
                place = torch.empty_like(now) if oldest is None else oldest[id(w.parameter)]
                place.copy_(now)
                w.parameter.data = place
                moved[id(w.parameter)] = place
        self.newest += 1
        self._kept[self.newest] = moved

    def _bring_to_scale(self) -> None:
        value = self._scales.popleft()
        if value != 1.0:
            for w in self.weights:
                if w.target.grad is not None:
                    w.target.grad.mul_(1.0 / value)
