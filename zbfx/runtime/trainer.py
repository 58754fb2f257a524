"""A rank whose programs also update its weights: more verbs than Rank has, and three flags.

report(*loss), result()             the step's loss: made where the last stage is, noted elsewhere; what is sent of it
measure(*table), learn(table),      see `weights`; state() is the table to send
update(), state()
ahead, wrong, cautious              what an `if` of the program asks
"""

from __future__ import annotations

import re
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

_STATE = re.compile(r"\d+[SV]\d+")
Inputs = Mapping[tuple[int, int], Sequence[Any]]


class Trainer(Rank):
    """One rank, from the first step to the last. divisor: what the sum of the microbatches' losses is divided by."""

    def __init__(self, *args: Any, updater: Weights, divisor: int, params: Mapping[int, Sequence[Tensor]], **kwargs: Any) -> None:
        super().__init__(*args, params=params, **kwargs)
        self.updater, self.divisor = updater, divisor
        self.known = 0  # steps whose loss is known
        self._losses: dict[int, Tensor] = {}  # step -> its loss: of the last two known
        self.ahead = self.wrong = False
        self._own = params
        self.step = -1
        self._before: Inputs = {}  # a stream still runs microbatches of the step before

    def next_step(self, inputs: Inputs, recorder: Recorder) -> None:
        """A step begins, with its inputs."""
        self._before, self._inputs = self._inputs, {key: tuple(values) for key, values in inputs.items()}
        self.recorder = recorder
        self.ahead, self.wrong = self.updater.ahead, False
        self.updater.begin()
        self.step += 1

    def place(self, name: str) -> torch.device:
        """The state of gradients travels between hosts: it decides what they launch."""
        return torch.device("cpu") if _STATE.fullmatch(name) else super().place(name)

    def reported_loss(self, back: int) -> Tensor:
        """The loss of the step `back` steps before the last that has begun; NaN before the first."""
        if self.step < back:
            return torch.tensor(float("nan"), device=self.device)
        return self._losses[self.step - back].clone()

    def restart(self) -> None:
        """The next step is the first."""
        self._losses, self.known, self.step = {}, 0, -1

    def end_stream(self) -> None:
        """All steps are complete; the next one begins a stream."""
        self.restart()
        self._versions().restart()

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

    def loss(self, mb: int, *results: Tensor, back: int = 0) -> Tensor | None:
        """As Rank's, with the tangent brought to the loss's scale, as it was in the microbatch's own step."""
        weight = super().loss(mb, *results)
        with self.recorder.paused():
            return None if weight is None else self.updater.scaled(weight, back)

    def report(self, *loss: Tensor) -> None:
        """The step's loss: received, or, where the last stage is, the sum of its microbatches' in order."""
        with self.recorder.paused(), torch.no_grad():
            if loss:
                self._note(loss[0].clone())
                return
            self._note(sum_of_losses(self.losses, self.divisor))

    def result(self) -> Tensors:
        """The loss, to send."""
        if not self.known:
            raise RankError("no loss is known yet: `result` needs a `report` before it")
        return (self._losses[self.known - 1],)

    def _note(self, loss: Tensor) -> None:
        self._losses[self.known] = loss
        self._losses.pop(self.known - 2, None)
        self.known += 1

    def collect(self, stage: int | None = None) -> None:
        """A step's gradients are complete: all of them, or, while the next step's are on their way, a stage's."""
        with self.recorder.paused(), torch.no_grad():
            self.updater.collect(stage)

    def tied(self, other: int) -> Tensors:
        """This rank's gradients of the weights it shares with another, to send."""
        return self._versions().tied(other)

    def tie(self, other: int, *gradients: Tensor) -> None:
        """Another rank's gradients of the weights it shares with this one."""
        with self.recorder.paused(), torch.no_grad():
            self._versions().tie(other, *gradients)

    def _versions(self) -> Versions:
        if not isinstance(self.updater, Versions):
            raise RankError("the program keeps two versions of the weights, the pipeline one: compile with weights='2bw'")
        return self.updater

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


def sum_of_losses(losses: Sequence[Tensor], divisor: int) -> Tensor:
    """A step's loss: the microbatches' losses, each divided, added up in order."""
    total = losses[0] / divisor
    for loss in losses[1:]:
        total = total + loss / divisor
    return total
