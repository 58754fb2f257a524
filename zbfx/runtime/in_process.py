"""The channel between ranks that are threads of one process, on CPU or sharing CUDA devices."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

import torch

from zbfx.runtime.channel import Channel, Tensors
from zbfx.runtime.failures import Alarm, Failure

_Key = tuple[int, int, str, int]  # from rank, to rank, name, and how many of that name have gone before


@dataclass(slots=True, eq=False)
class _Box:
    """One message. Whoever comes second, sender or receiver, fills the buffers, so neither waits for the other to act."""

    tensors: Tensors | None = None  # held until `sent`
    buffers: Tensors | None = None  # held until `recv`
    ready: list[torch.cuda.Event] = field(default_factory=list)  # tensors computed; earlier uses of the buffers' memory over
    filled: bool = False
    copied: torch.cuda.Event | None = None


class Exchange:
    """What the ranks of one process share: boxes, alarm and, on CUDA, a copy stream for each directed pair of ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.alarm = Alarm()
        self.alarm.listen(self._wake)
        self._changed = threading.Condition()
        self._boxes: dict[_Key, _Box] = {}
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}

    def channels(self) -> tuple[InProcess, ...]:
        """One channel per rank."""
        return tuple(InProcess(index, self) for index in range(self.size))

    def bring_tensors(self, key: _Key, tensors: Tensors) -> None:
        """The sender's side of message `key`."""
        with self._changed:
            box = self._boxes.setdefault(key, _Box())
            box.tensors = tensors
            box.ready += _events(tensors)
            complete = box.buffers is not None
        if complete:
            self._fill(key, box)

    def bring_buffers(self, key: _Key, buffers: Tensors) -> None:
        """The receiver's side of message `key`."""
        with self._changed:
            box = self._boxes.setdefault(key, _Box())
            box.buffers = buffers
            box.ready += _events(buffers)
            complete = box.tensors is not None
        if complete:
            self._fill(key, box)

    def take_buffers(self, key: _Key) -> Tensors:
        """The filled buffers of message `key`, which the box gives up."""
        box = self._filled(key)
        buffers, box.buffers = box.buffers or (), None
        self._forget_if_empty(key, box)
        _follow(buffers, box.copied)
        return buffers

    def drop_tensors(self, key: _Key) -> None:
        """Let go of the sender's tensors of message `key`, once they are copied."""
        box = self._filled(key)
        _follow(box.tensors or (), box.copied)
        box.tensors = None
        self._forget_if_empty(key, box)

    def forget_all(self) -> None:
        """Drop every message under way. No rank may be running."""
        self._boxes.clear()

    def _fill(self, key: _Key, box: _Box) -> None:
        """Copy, then tell. The copy's own references are gone by then, so the tensors die where their rank drops them."""
        _copy(box, self._stream(key, box))
        with self._changed:
            box.filled = True
            self._changed.notify_all()

    def _filled(self, key: _Key) -> _Box:
        """The box of `key`, to which this rank has brought its side, once filled (on CUDA: once the copy is on its way)."""
        with self._changed:
            box = self._boxes[key]
            self._changed.wait_for(lambda: box.filled or self.alarm.failure is not None)
        self.alarm.check()
        return box

    def _forget_if_empty(self, key: _Key, box: _Box) -> None:
        with self._changed:
            if box.tensors is None and box.buffers is None:
                self._boxes.pop(key, None)

    def _stream(self, key: _Key, box: _Box) -> torch.cuda.Stream | None:
        """The copy stream of this directed pair, on the sender's device; None on CPU."""
        first = next(iter(box.tensors or ()), None)
        if first is None or not first.is_cuda:
            return None
        with self._changed:
            if key[:2] not in self._streams:
                self._streams[key[:2]] = torch.cuda.Stream(first.device)
            return self._streams[key[:2]]

    def _wake(self, _: Failure) -> None:
        with self._changed:
            self._changed.notify_all()


def _events(tensors: Tensors) -> list[torch.cuda.Event]:
    """On CUDA, the moment at which the current stream has done what it was told so far."""
    first = next(iter(tensors), None)
    return [] if first is None or not first.is_cuda else [torch.cuda.current_stream(first.device).record_event()]


def _follow(tensors: Tensors, event: torch.cuda.Event | None) -> None:
    """The tensors' current stream goes on after `event`, so that it may read, free or reuse them."""
    if event is not None and tensors:
        torch.cuda.current_stream(tensors[0].device).wait_event(event)


def _copy(box: _Box, stream: torch.cuda.Stream | None) -> None:
    """Fill the buffers; on CUDA, start doing so on `stream` as soon as both sides are ready."""
    pairs = zip(box.buffers or (), box.tensors or (), strict=True)
    if stream is None:
        for buffer, tensor in pairs:
            buffer.copy_(tensor)
        return
    with torch.cuda.stream(stream):
        for event in box.ready:
            stream.wait_event(event)
        for buffer, tensor in pairs:
            buffer.copy_(tensor)
        box.copied = stream.record_event()


class InProcess(Channel):
    """One rank's end of an Exchange."""

    def __init__(self, index: int, exchange: Exchange) -> None:
        super().__init__(index, exchange.size, exchange.alarm)
        self._exchange = exchange
        self._times: Counter[tuple[str, int, str]] = Counter()

    def post(self, name: str, source: int, buffers: Tensors) -> None:
        self._open(self._posted, name, source)
        self._times["from", source, name] += 1
        self._exchange.bring_buffers(self._key_from(source, name), buffers)

    def recv(self, name: str) -> Tensors:
        return self._exchange.take_buffers(self._key_from(self._shut(self._posted, name), name))

    def send(self, name: str, target: int, tensors: Tensors) -> None:
        self._open(self._sending, name, target)
        self._times["to", target, name] += 1
        self._exchange.bring_tensors(self._key_to(target, name), tensors)

    def sent(self, name: str) -> None:
        self._exchange.drop_tensors(self._key_to(self._shut(self._sending, name), name))

    def reset(self) -> None:
        super().reset()
        self._times.clear()
        self._exchange.forget_all()

    def _key_from(self, source: int, name: str) -> _Key:
        """A name comes again while the other end still holds its last message: the two are told apart by their number."""
        return source, self.index, name, self._times["from", source, name]

    def _key_to(self, target: int, name: str) -> _Key:
        return self.index, target, name, self._times["to", target, name]
