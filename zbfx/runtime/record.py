"""What a rank did and when: the recorder that a rank carries."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zbfx.runtime.memory import Memory

_Moment = Any  # perf_counter seconds on CPU, a torch.cuda.Event on CUDA


@dataclass(frozen=True, slots=True)
class Span:
    """An action as it ran, in seconds of a rank's own step: `start` follows the waits for what it receives, `end` is the
    beginning of the next action (or of the step's end). stalled: seconds that it waited for receives, before `start`;
    blocked: seconds within the span that it waited for sends to leave (host waits: 0 on CUDA, where the host waits for nothing).
    """

    action: str
    start: float
    end: float
    stalled: float
    blocked: float


@dataclass(slots=True)
class _Mark:
    """An action's moments as they were noted."""

    action: str
    begun: _Moment
    started: _Moment
    blocked: float = 0.0


class Recorder:
    """Records nothing unless asked: `times` for spans, `memory` for bytes. One per rank; each step starts it afresh."""

    def __init__(self, device: torch.device | str = "cpu", *, times: bool = False, memory: Memory | None = None) -> None:
        self.device, self.times, self.memory = torch.device(device), times, memory
        self.origin = 0.0  # perf_counter at the step's start: what the spans of ranks on one machine can be aligned by
        self._marks: list[_Mark] = []
        self._first: _Moment = 0.0
        self._last: _Moment = 0.0

    @contextmanager
    def recording(self, static: Sequence[Tensor]) -> Iterator[None]:
        """Around a step. `static` is what existed before it."""
        with ExitStack() as stack:
            if self.memory is not None:
                self.memory.reset(static)
                stack.callback(self.memory.release)
                stack.enter_context(self.memory)
            if self.times:
                self._marks, self.origin, self._first = [], time.perf_counter(), self._now()
            yield
            if self.times:
                self._last = self._now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around the channel's own work, whose tensors are counted elsewhere or are the other rank's."""
        if self.memory is None:
            yield
            return
        with self.memory.paused():
            yield

    @contextmanager
    def waiting(self, verb: str) -> Iterator[None]:
        """Around a wait: `recv` or `sent`."""
        began = time.perf_counter()
        with self.paused():
            yield
        if not self.times or not self._marks:
            return
        mark = self._marks[-1]
        if verb == "recv":
            mark.started = self._now()
        elif self.device.type == "cpu":
            mark.blocked += time.perf_counter() - began

    def begin(self, action: str) -> None:
        if self.memory is not None:
            self.memory.begin(action)
        if self.times:
            now = self._now()
            self._marks.append(_Mark(action, now, now))

    def count(self, buffers: Sequence[Tensor]) -> None:
        """Receive buffers that a post has just allocated."""
        if self.memory is not None:
            self.memory.count(buffers)

    def keep(self, grad: Tensor) -> None:
        """A gradient that outlives the step from now on."""
        if self.memory is not None:
            self.memory.keep(grad)

    def spans(self) -> tuple[Span, ...]:
        """The last step's actions, in order, in seconds since its start. On CUDA this waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        ends = [*(mark.begun for mark in self._marks[1:]), self._last]
        since = [self._seconds(self._first, mark.begun) for mark in self._marks]
        return tuple(
            Span(
                mark.action,
                begun + self._seconds(mark.begun, mark.started),
                begun + self._seconds(mark.begun, end),
                self._seconds(mark.begun, mark.started),
                mark.blocked,
            )
            for mark, begun, end in zip(self._marks, since, ends, strict=True)
        )

    def _now(self) -> _Moment:
        """This moment: on CUDA, when the current stream gets here."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @staticmethod
    def _seconds(begin: _Moment, end: _Moment) -> float:
        return begin.elapsed_time(end) / 1000 if isinstance(begin, torch.cuda.Event) else end - begin
