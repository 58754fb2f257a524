"""Double-buffered weights (PipeDream-2BW, section 3): a step's microbatches use weights one version old, so nothing waits.

W(t+1) = W(t) - lr * f(gradient at W(t-1)): step t, counted from 0, runs on version max(t - 1, 0), its update makes version
t + 1 of version t. Two versions are alive: a new one takes the place of the one whose last B is done (W needs no weights,
or, where a step runs whole backwards, is done as well).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zbfx.errors import RankError
from zbfx.runtime.verdict import LossScale
from zbfx.runtime.weights import Weight, Weights

Correction = Callable[[Tensor, Tensor, Tensor], Tensor]  # gradient, newest weights, weights it was taken at -> gradient


def taylor(grad: Tensor, newest: Tensor, taken_at: Tensor) -> Tensor:
    """The gradient brought to the newest weights by a first-order step, with the squared gradient for the Hessian's diagonal
    (DC-ASGD, arXiv 1609.08326), scaled by the gradient's root mean square so that it does not depend on the loss's scale.
    """
    scale = grad.square().mean().sqrt().clamp_min(1e-30)
    return grad + grad.square() / scale * (newest - taken_at)


CORRECTIONS: dict[str, Correction] = {"taylor": taylor}
PREDICT = "predict"  # the other kind: versions run ahead of the weights by the last step's change, about the delay


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """A weight that other ranks have too. parts: what gathers its gradient, one per stage (of `stages`) of this rank; ranks:
    all that have it, the highest first, which is the order in which their sums are added."""

    weight: Weight
    stages: tuple[int, ...]
    parts: tuple[Tensor, ...]
    ranks: tuple[int, ...]


class Versions(Weights):
    """The weights of one rank under 2BW. Three verbs more: collect() when a step's gradients are complete on this rank;
    tied(other) and tie(other, *gradients), which exchange those of shared weights."""

    def __init__(self, *args: Any, rank: int = 0, correction: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rank, self.shared = rank, tuple[Shared, ...]()
        self._correction, self._predicts = CORRECTIONS.get(correction or ""), correction == PREDICT
        self._kept: dict[int, dict[int, Tensor]] = {}  # version -> parameter -> its values
        self._gradients: list[Tensor | None] = []  # of the step that is complete, one per weight
        self._sums: dict[int, dict[int, Tensor]] = {}  # of shared weights: place among `shared` -> rank -> its sum
        self._is_complete = True
        self._collected: set[int] = set()  # stages whose gradients of the step are put aside
        self._taken: dict[int, list[Tensor | None]] = {}  # of shared weights, per stage collected
        self.stages = frozenset(k for w in self.weights for k in w.stages)
        self._scales: deque[float] = deque()
        self._recent_scales = (1.0, 1.0)  # of the step that has begun last, and of the one before
        self.restart()

    def restart(self) -> None:
        """A stream begins, or has ended: one version is left, the newest."""
        self.step, self.newest = -1, 0
        self._gradients, self._sums, self._is_complete = [], {}, True
        self._collected, self._taken = set(), {}
        self._scales.clear()
        if self._predicts:
            super()._copy_masters()
        self._kept = {0: {id(w.parameter): w.parameter.data for w in self.weights}}

    def forget(self, known: int, scale: LossScale) -> None:
        super().forget(known, scale)
        self.restart()

    @property
    def alive(self) -> tuple[int, ...]:
        """The versions that are held."""
        return tuple(sorted(self._kept))

    def used(self, back: int = 0) -> int:
        """The version that the microbatches of the step `back` steps ago use."""
        return max(self.step - back - 1, 0)

    def values(self, given: Sequence[Tensor], version: int) -> tuple[Tensor, ...]:
        """A stage's parameters as they were in a version; what is not trained has one version."""
        if version not in self._kept:
            raise RankError(f"version {version} of the weights is needed, alive are {self.alive}: too few microbatches a step")
        table = self._kept[version]
        return tuple(table.get(id(tensor), tensor.detach()) for tensor in given)

    def consistent(self) -> dict[int, Tensor]:
        """Between steps: id of each parameter -> its values in the newest version that every rank has."""
        return self._kept[min(max(self.step, 0), self.newest)]

    # ------------------------------------------------------------ the verbs

    def begin(self) -> None:
        super().begin()
        self.step += 1
        self._scales.append(self.scale.value)
        self._recent_scales = (self.scale.value, self._recent_scales[0])

    def collect(self, stage: int | None = None) -> None:
        """Put a stage's complete gradients aside: the next step's are on their way. What several stages of this rank give
        gradients to is complete with the last of them."""
        if not self._collected:
            self._gradients = [None] * len(self.weights)
            self._sums = {}
        if stage is None:
            raise RankError("two versions of the weights: `collect` needs the stage whose gradients are complete")
        self._collected.add(stage)
        done = self._collected
        shared = {id(s.weight) for s in self.shared}
        for i, w in enumerate(self.weights):
            if stage in w.stages and done.issuperset(w.stages) and id(w) not in shared:
                self._gradients[i], w.target.grad = w.target.grad, None
        for i, s in enumerate(self.shared):
            self._taken.setdefault(i, []).extend(_taken(part) for part, k in zip(s.parts, s.stages, strict=True) if k == stage)
        if done.issuperset(self.stages):
            self._sums = {i: {self.rank: _sum(parts[::-1])} for i, parts in self._taken.items()}
            self._settings = self._upcoming.popleft()
            self._collected, self._taken, self._is_complete = set(), {}, False

    def tied(self, other: int) -> tuple[Tensor, ...]:
        """This rank's sums of the weights that it shares with another."""
        return tuple(self._sums[i][self.rank] for i, s in enumerate(self.shared) if other in s.ranks)

    def tie(self, other: int, *gradients: Tensor) -> None:
        """Another rank's sums of the weights that it shares with this one."""
        mine = [i for i, s in enumerate(self.shared) if other in s.ranks]
        for i, gradient in zip(mine, gradients, strict=True):
            self._sums[i][other] = gradient.clone()

    def measure(self, *table: Tensor) -> tuple[Tensor, ...]:
        with self._put_back():
            return super().measure(*table)

    def update(self) -> None:
        """Make the next version in the place of the oldest."""
        self._complete()
        factor = self.verdicts[self.updates].factor if self.rules.checked else 1.0
        self.updates += 1
        if self._correction is not None:
            self._gradients = [
                g if g is None else self._corrected(w, g) for w, g in zip(self.weights, self._gradients, strict=True)
            ]
        self._move_on()
        with self._put_back():
            self._apply(factor)
        self._gradients = []

    def scaled(self, weight: Tensor, back: int = 0) -> Tensor:
        scale = self._recent_scales[back]
        return weight if scale == 1.0 else weight * scale

    # ------------------------------------------------------------ behind them

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """The complete gradients in `.grad`, for as long as they are worked on."""
        self._complete()
        waiting = [w.target.grad for w in self.weights]
        self._swap(self._gradients)
        try:
            yield
        finally:
            self._swap(waiting)

    def _swap(self, gradients: Sequence[Tensor | None]) -> None:
        for w, grad in zip(self.weights, gradients, strict=True):
            w.target.grad = grad

    def _complete(self) -> None:
        """Once per step: sums of shared weights, hooks, scale."""
        if self._is_complete:
            return
        self._is_complete = True
        places = {id(w): i for i, w in enumerate(self.weights)}
        for i, shared in enumerate(self.shared):
            first, *rest = [self._sums[i][r] for r in shared.ranks]
            for grad in rest:
                first = first + grad
            self._gradients[places[id(shared.weight)]] = first
        self._sums = {}
        with self._put_back():
            if self._finish is not None:
                self._finish()
            super()._bring_to_scale(self._scales.popleft())

    def _ready(self) -> None:
        """`collect` and `_complete` have done it."""

    def _copy_masters(self) -> None:
        """Where versions run ahead, the parameters hold the weights before the step: now those after it, and the same way on."""
        if not self._predicts:
            super()._copy_masters()
            return
        with torch.no_grad():
            for w in self.weights:
                w.parameter.mul_(-1.0).add_(w.target, alpha=2.0)

    def _corrected(self, w: Weight, grad: Tensor) -> Tensor:
        at = self._kept[max(self.newest - 1, 0)][id(w.parameter)]
        return grad if self._correction is None else self._correction(grad, w.parameter.data, at)

    def _move_on(self) -> None:
        """The parameters move to the storage of the oldest version, with the newest's values (where versions run ahead, with the
        weights' own)."""
        newest = self._kept[self.newest]
        oldest = self._kept.pop(self.newest - 1, None)
        moved = {}
        with torch.no_grad():
            for w in self.weights:
                now = newest[id(w.parameter)]
                place = torch.empty_like(now) if oldest is None else oldest[id(w.parameter)]
                place.copy_(w.target if self._predicts else now)
                w.parameter.data = place
                moved[id(w.parameter)] = place
        self.newest += 1
        self._kept[self.newest] = moved


def _taken(part: Tensor) -> Tensor | None:
    grad, part.grad = part.grad, None
    return grad


def _sum(grads: Sequence[Tensor | None]) -> Tensor:
    """The gradients that a rank's stages have gathered, last stage first, added up."""
    first, *rest = [g for g in grads if g is not None]
    for grad in rest:
        first = first + grad
    return first.contiguous()
