"""A rank's weights in time: what turns a step's gradients into the next weights. Programs reach it through four verbs of Rank.

    measure(*table) -> (table,)   the gradients are complete: add what this rank knows to what came from the ranks before
    learn(table) -> bool          all ranks' state is known. True: the forwards since the last step used wrong weights
    update()                      step the optimizer: on the full state where it is known, else on what is known so far
    params(stage, back)           the weights that a microbatch uses, `back` steps before the present one

synchronous: learn, then update. post-validation (Zero Bubble, section 4): update first; learn takes a wrong step back, bit
for bit, and steps again. A rank that sees already that the gradients must be clipped, but not yet by how much, waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zbfx.errors import RankError
from zbfx.runtime.share import Settings, Share, Snapshot, settings_of
from zbfx.runtime.verdict import LossScale, Verdict, blank_table, judge, measured_row

CAUTIOUS_STEPS = 10  # post-validation waits for the full state while a step so recent was clipped or skipped


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A trained parameter. target: what the optimizer steps (the parameter, or its float32 master); home: the stage that its
    norm counts for, -1 where another rank counts it; stages: those of this rank that give it gradients."""

    parameter: Tensor
    target: Tensor
    home: int
    stages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """What all ranks agree on. chain[i]: the stages of the i-th rank, in the order in which the state is passed on."""

    num_stages: int
    chain: tuple[tuple[int, ...], ...]
    max_norm: float | None = None
    checked: bool = False  # steps are clipped, or skipped where a gradient is not finite

    def known(self, place: int) -> list[int]:
        """The stages whose state the rank at this place of the chain knows before it hears from the end."""
        return [s for stages in self.chain[: place + 1] for s in stages]


class Weights:
    """The weights of one rank, for as long as it trains. `finish`, if given, completes the gradients: ties, hooks."""

    def __init__(
        self,
        weights: Sequence[Weight],
        optimizer: Optimizer,
        rules: Rules,
        place: int,
        *,
        scale: LossScale | None = None,
        buffers: Sequence[Tensor] = (),
        finish: Callable[[], None] | None = None,
        snapshot: Callable[[Share, Sequence[Tensor]], Any] = Snapshot,
    ) -> None:
        self.weights, self.optimizer, self.rules, self.place = tuple(weights), optimizer, rules, place
        self.scale = scale or LossScale(None)
        self.share = Share(optimizer, [w.target for w in weights])
        self.ahead = False  # the last step was taken before all was known: `learn` comes in the next
        self.updates = 0
        self.verdicts: list[Verdict] = []  # of every step whose full state is known
        self.rollbacks = self.repeats = 0  # steps taken back; steps whose first forwards were run again
        self._finish, self._buffers, self._take_snapshot = finish, tuple(buffers), snapshot
        self._kept_buffers: list[Tensor] = []
        self._upcoming: deque[Settings] = deque()  # of the steps begun whose gradients are not complete yet
        self._settings: Settings = ()
        self._table: Tensor | None = None
        self._guessed: float | None = None  # what the last step's gradients were multiplied by, before all was known
        self._snapshot: Any = None

    # ------------------------------------------------------------ the verbs

    def begin(self) -> None:
        """A step begins. Buffers are noted where its first forwards may have to be run again."""
        self._upcoming.append(settings_of(self.optimizer))
        self._kept_buffers = [b.clone() for b in self._buffers] if self.ahead else []

    def collect(self, stage: int | None = None) -> None:
        """The gradients are complete, before `measure` if that has to wait: exchange the shared ones, bring all to scale."""
        self._ready()

    def measure(self, *table: Tensor) -> tuple[Tensor, ...]:
        """The gradients are complete: bring them to scale; the table of what is known with this rank's stages filled in."""
        self._ready()
        if not self.rules.checked:
            return ()
        known = table[0].clone() if table else blank_table(self.rules.num_stages)
        for stage in self.rules.chain[self.place]:
            grads = [w.target.grad for w in self.weights if w.home == stage and w.target.grad is not None]
            known[stage] = measured_row(grads)
        self._table = known
        return (known,)

    @property
    def cautious(self) -> bool:
        """Whether one of the last steps was clipped or skipped: then the next waits for the full state before it is taken."""
        return not all(v.is_plain for v in self.verdicts[-CAUTIOUS_STEPS:])

    def learn(self, table: Tensor) -> bool:
        """The full state of the last step. If the step was taken on less, mend it. True where the forwards that followed it,
        on whichever rank, must be run again: their weights were wrong."""
        self._table, rows = table, table.tolist()
        final = judge(rows, range(self.rules.num_stages), self.rules.max_norm)
        self.verdicts.append(final)
        self.scale.learn(final.factor is None)
        if not self.ahead:
            return False
        self.ahead = False
        self._mend(final)
        wrong = any(self._guess(rows, place) != final.factor for place in range(len(self.rules.chain)))
        if wrong:
            self.repeats += 1
            for buffer, value in zip(self._buffers, self._kept_buffers, strict=True):
                buffer.copy_(value)
        return wrong

    def update(self) -> None:
        """Step: on the full state if `learn` has had it, else on what this rank knows, to be validated."""
        if not self.rules.checked:
            self._apply(1.0)
            self._clear()
        elif len(self.verdicts) > self.updates:
            self._apply(self.verdicts[self.updates].factor)
            self._clear()
        else:
            self._go_ahead()
        self.updates += 1

    def state(self) -> tuple[Tensor, ...]:
        """The table that this rank has measured or learned last."""
        if self._table is None:
            raise RankError("no state is measured yet: `state` needs a `measure` before it")
        return (self._table,)

    def scaled(self, weight: Tensor, back: int = 0) -> Tensor:
        """The tangent of a loss, brought to the loss's scale, `back` steps ago."""
        return weight if self.scale.value == 1.0 else weight * self.scale.value

    def forget(self, known: int, scale: LossScale) -> None:
        """A step has failed: nothing of it is left, nor of steps after the first `known` that are validated."""
        del self.verdicts[known:]
        if self.rules.checked:
            self.updates = known
        self.scale.value, self.scale.good_steps = scale.value, scale.good_steps
        self.ahead, self._snapshot, self._table = False, None, None
        self._upcoming.clear()
        self._clear()

    # ------------------------------------------------------------ behind them

    def _guess(self, rows: Sequence[Sequence[float]], place: int) -> float | None:
        """What a rank of the chain multiplies by before it knows all: NaN, which equals nothing, where it waits."""
        known = judge(rows, self.rules.known(place), self.rules.max_norm)
        at_end = place == len(self.rules.chain) - 1
        return known.factor if at_end or known.factor in (None, 1.0) else math.nan

    def _go_ahead(self) -> None:
        """Step on what is known. The chain's end knows all; elsewhere what may be taken back is noted first."""
        self.ahead = True
        self._guessed = guess = self._guess(self.state()[0].tolist(), self.place)
        if self.place == len(self.rules.chain) - 1:
            self._apply(guess)
        elif guess == 1.0:
            self._snapshot = self._take_snapshot(self.share, [w.target for w in self.weights])
            self._apply(1.0)
            self._snapshot.stepped()

    def _mend(self, final: Verdict) -> None:
        """Take the last step back, and again, if it was taken on the wrong factor."""
        if self._guessed != final.factor:
            if self._snapshot is not None:
                self._snapshot.restore()
                self._copy_masters()
                self.rollbacks += 1
            self._apply(final.factor)
        self._snapshot = None
        self._clear()

    def _ready(self) -> None:
        """Once per step: what completes the gradients, and their scale."""
        if not self._upcoming:
            return
        if self._finish is not None:
            self._finish()
        self._settings = self._upcoming.popleft()
        self._bring_to_scale(self.scale.value)

    def _bring_to_scale(self, value: float) -> None:
        if value != 1.0:
            for w in self.weights:
                if w.target.grad is not None:
                    w.target.grad.mul_(1.0 / value)

    def _apply(self, factor: float | None) -> None:
        if factor is None:
            return
        if factor != 1.0:
            for w in self.weights:
                if w.target.grad is not None:
                    w.target.grad.mul_(factor)
        self.share.step(self._settings)
        self._copy_masters()

    def _copy_masters(self) -> None:
        with torch.no_grad():
            for w in self.weights:
                if w.target is not w.parameter:
                    w.parameter.copy_(w.target)

    def _clear(self) -> None:
        for w in self.weights:
            w.target.grad = None
