"""The channel between processes on CPU: gloo, with a tag for each tensor, so that the order of messages cannot matter.

A gloo receive cannot be polled or cancelled. But a receive that times out makes gloo close the connections of its whole
process group and fail everything that waits on them: that is how the alarm frees a rank from a wait (`_interrupt`).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from zbfx.runtime.channel import Channel, Tensors, window
from zbfx.runtime.failures import Alarm, Failure
from zbfx.runtime.heartbeat import Heartbeat

_LAST_TAG = 2**31 - 1  # `_interrupt`'s own


class Gloo(Channel):
    """One rank's end of a gloo process group over all ranks, which the channel owns.

    timeout: seconds to wait for one message of a rank that is alive, however slow. dead_after: see Heartbeat. alarm: shared by
    the channels of this process, so that a failure seen by one ends the waits of all; action: what the process is doing.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        dead_after: float = 5.0,
        timeout: float = 1800.0,
        host: int = -1,
        alarm: Alarm | None = None,
        action: Callable[[], str] | None = None,
    ) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), alarm or Alarm())
        self.timeout = timeout
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._works: dict[tuple[str, str], tuple[Tensors, list[Any]]] = {}
        self._heartbeat = Heartbeat(
            store, self.index, self.size, self.alarm, action or (lambda: self.action), dead_after=dead_after, host=host
        )
        self._heartbeat.start()
        self.alarm.listen(self._interrupt)

    def post(self, name: str, source: int, buffers: Tensors) -> None:
        self._open(self._posted, name, source)
        works = [dist.irecv(bytes_, source, self._group, tag) for bytes_, tag in _wire(name, buffers)]
        self._works["recv", name] = buffers, works

    def recv(self, name: str) -> Tensors:
        return self._wait("recv", name, self._shut(self._posted, name))

    def send(self, name: str, target: int, tensors: Tensors) -> None:
        self._open(self._sending, name, target)
        works = [dist.isend(bytes_, target, self._group, tag) for bytes_, tag in _wire(name, tensors)]
        self._works["sent", name] = tensors, works

    def sent(self, name: str) -> None:
        self._wait("sent", name, self._shut(self._sending, name))

    def reset(self) -> None:
        """A failure closes the group's connections for good: nothing to reset to. The next step fails with the same error."""

    def close(self) -> None:
        """Wait for the others to close too, then give up the group."""
        self._heartbeat.leave(self.timeout)
        self.alarm.forget(self._interrupt)
        self._works.clear()
        with suppress(RuntimeError):
            dist.destroy_process_group(self._group)

    def _wait(self, verb: str, name: str, peer: int) -> Tensors:
        tensors, works = self._works.pop((verb, name))
        begun = time.monotonic()
        try:
            for work in works:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            self._explain(f"{name} ({verb})", peer, time.monotonic() - begun, error)
        return tensors

    def _explain(self, what: str, peer: int, waited: float, error: RuntimeError) -> NoReturn:
        """A wait broke: find out why before saying so. What a dying peer leaves behind is a closed connection first."""
        if waited >= self.timeout:
            cause = f"waited {self.timeout:g} s for {what} with rank {peer}, which is alive; a larger timeout waits longer"
            self.alarm.ring(Failure(self.index, self.action, cause))
        end = time.monotonic() + 1.5 * self._heartbeat.dead_after + 1
        while self.alarm.failure is None and time.monotonic() < end and not self._heartbeat.has_left(peer):
            with suppress(RuntimeError):  # the store's loss is the heartbeat's to tell
                self._heartbeat.look()
            self.alarm.wait(0.02)
        left = "it ended while others waited for it" if self._heartbeat.has_left(peer) else f"connection lost: {error}"
        self.alarm.ring(Failure(peer, "", left))
        self.alarm.check()
        raise error  # not reached: the alarm has rung

    def _interrupt(self, _: Failure) -> None:
        """End every wait of this rank, by closing the group's connections."""
        for peer in self._peers()[:1]:
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1, dtype=torch.uint8), peer, self._group, _LAST_TAG)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))


def _wire(name: str, tensors: Tensors) -> list[tuple[Tensor, int]]:
    """What travels of each tensor: the bytes of its storage window, and a tag; of an empty tensor, nothing.

    Two names may share a tag (one pair in 2**31): then the order of sends, which is the order of posts, keeps them apart.
    """
    return [
        (window(tensor), zlib.crc32(f"{name} {place}".encode()) % _LAST_TAG)
        for place, tensor in enumerate(tensors)
        if tensor.numel()
    ]
