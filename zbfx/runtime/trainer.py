"""A rank whose programs also update its weights: six verbs more than Rank has, and three flags.

report(*loss), result()             the step's loss: made where the last stage is, noted elsewhere; what is sent of it
measure(*table), learn(table),      see `weights`; state() is the table to send
update(), state()
ahead, wrong, cautious              what an `if` of the program asks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zbfx.errors import RankError
from zbfx.runtime.channel import Tensors
from zbfx.runtime.rank import Rank, look_up
from zbfx.runtime.record import Recorder
from zbfx.runtime.versions import Versions
from zbfx.runtime.weights import Weights

Inputs = Mapping[tuple[int, int], Sequence[Any]]


class Trainer(Rank):
    """One rank, from the first step to the last. divisor: what the sum of the microbatches' losses is divided by."""

    def __init__(self, *args: Any, updater: Weights, divisor: int, params: Mapping[int, Sequence[Tensor]], **kwargs: Any) -> None:
        super().__init__(*args, params=params, **kwargs)
        self.updater, self.divisor = updater, divisor
        self.loss_of_step: Tensor | None = None
        self.ahead = self.wrong = False
        self._own = params
        self._before: Inputs = {}  # a stream still runs microbatches of the step before

    def next_step(self, inputs: Inputs, recorder: Recorder) -> None:
        """A step begins, with its inputs."""
        self._before, self._inputs = self._inputs, {key: tuple(values) for key, values in inputs.items()}
        self.recorder = recorder
        self.ahead, self.wrong = self.updater.ahead, False
        self.updater.begin()

    # ------------------------------------------------------------ the verbs

    def params(self, stage: int, back: int = 0) -> Tensors:
        """The stage's parameters, buffers and constants: of the version that the step `back` steps ago uses."""
        if not isinstance(self.updater, Versions):
            return super().params(stage)
        return self.updater.values(look_up(self._own, stage, f"parameters of stage {stage}"), self.updater.used(back))

    def inputs(self, stage: int, mb: int, back: int = 0) -> Tensors:
        """The stage's own input leaves for a microbatch of the step, or of the one before."""
        if not back:
            return super().inputs(stage, mb)
        return tuple(look_up(self._before, (stage, mb), f"inputs of stage {stage} for microbatch {mb} of the step before"))

    def loss(self, mb: int, *results: Tensor) -> Tensor | None:
        """As Rank's, with the tangent brought to the loss's scale."""
        weight = super().loss(mb, *results)
        with self.recorder.paused():
            return None if weight is None else self.updater.scaled(weight)

    def report(self, *loss: Tensor) -> None:
        """The step's loss: received, or, where the last stage is, the sum of its microbatches' in order."""
        with self.recorder.paused(), torch.no_grad():
            if loss:
                self.loss_of_step = loss[0].clone()
                return
            total = self.losses[0] / self.divisor
            for each in self.losses[1:]:
                total = total + each / self.divisor
            self.loss_of_step = total

    def result(self) -> Tensors:
        """The loss, to send."""
        if self.loss_of_step is None:
            raise RankError("no loss is known yet: `result` needs a `report` before it")
        return (self.loss_of_step,)

    def measure(self, *table: Tensor) -> None:
        """The gradients are complete: add them to what is known of all."""
        with self.recorder.paused(), torch.no_grad():
            self.updater.measure(*table)

    def state(self) -> Tensors:
        """What is known of all gradients, to send."""
        return self.updater.state()

    def learn(self, table: Tensor) -> None:
        """The state of all gradients; `wrong` says whether forwards must run again."""
        with self.recorder.paused(), torch.no_grad():
            self.wrong = self.updater.learn(table)

    def update(self) -> None:
        """Step the optimizer."""
        with self.recorder.paused():
            self.updater.update()

    @property
    def cautious(self) -> bool:
        """Whether this step waits for the state of all gradients before the weights change."""
        return self.updater.cautious
