"""What all ranks together say about a step's gradients: their joint norm, whether any is infinite or NaN, the loss's scale.

The state that ranks pass on is a table, f64[stages, 2]: per stage the squared norm of its gradients, and 1 where one of them
is not finite. It is summed up in the order of stages, so that the result does not depend on which rank holds which stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zbfx.errors import InputError

GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000  # of a dynamic loss scale: torch.amp.GradScaler's defaults
FIRST_SCALE, LARGEST_SCALE = 2.0**16, 2.0**127  # beyond it, float32 has infinity


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gradients' joint norm, and what they are multiplied by before the optimizer steps; None: the step is skipped."""

    norm: float
    factor: float | None

    @property
    def is_plain(self) -> bool:
        """Neither clipped nor skipped."""
        return self.factor == 1.0


def blank_table(num_stages: int) -> Tensor:
    """f64[stages, 2] of zeros, on the host: nothing known yet."""
    return torch.zeros(num_stages, 2, dtype=torch.float64)


def measured_row(grads: Iterable[Tensor]) -> Tensor:
    """f64[2]: the squared norm of all the gradients, in their order, and 1 if that of any is not finite (and is left out): as one
    of its elements is not, or as it is beyond float32."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)).double() for g in grads]
    if not norms:
        return torch.zeros(2, dtype=torch.float64)
    squares = torch.stack(norms).square()
    finite = torch.isfinite(squares)
    total = torch.where(finite, squares, torch.zeros_like(squares)).sum()
    return torch.stack([total, 1.0 - finite.all().double()]).cpu()


def judge(rows: Sequence[Sequence[float]], stages: Iterable[int], max_norm: float | None) -> Verdict:
    """The verdict on what is known of `stages`: clipped as torch.nn.utils.clip_grad_norm_ does, skipped as GradScaler does."""
    total, faults = 0.0, 0.0
    for stage in sorted(stages):
        total, faults = total + rows[stage][0], faults + rows[stage][1]
    norm = math.sqrt(total)
    if faults or not math.isfinite(norm):
        return Verdict(math.inf, None)
    factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    return Verdict(norm, factor)


class LossScale:
    """What the loss is multiplied by so that half-precision gradients do not vanish. Every rank keeps the same one.

    dynamic: halved by a step that is skipped, doubled after 2,000 steps in a row that are not, as torch.amp.GradScaler does.
    """

    def __init__(self, value: float | str | None, interval: int = INTERVAL) -> None:
        self.dynamic, self.interval = value == "dynamic", interval
        try:
            self.value = FIRST_SCALE if self.dynamic else 1.0 if value is None else float(value)
        except ValueError:
            self.value = math.nan
        self.good_steps = 0
        if not (math.isfinite(self.value) and self.value > 0):
            raise InputError(f'loss_scale={value!r}: give a positive number, "dynamic", or None')

    def learn(self, skipped: bool) -> None:
        """A step's verdict is known."""
        if not self.dynamic:
            return
        self.good_steps = 0 if skipped else self.good_steps + 1
        if skipped:
            self.value *= BACKOFF
        elif self.good_steps == self.interval:
            self.value, self.good_steps = min(self.value * GROWTH, LARGEST_SCALE), 0
