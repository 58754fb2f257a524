"""The channel between processes with a GPU each: NCCL, with a communicator for each directed pair of ranks.

torch gives every communicator a stream of its own, so that opposite directions never queue behind one another. A receive or
send starts when the current stream gets to it, and `Work.wait` makes the current stream wait: the host never does, until the
step's end (`finish`). Buffers are held until `recv` and tensors until `sent`, that is until the current stream follows the
communication; so the caching allocator may reuse them without `record_stream`.

A receive is a kernel that occupies its stream until the sender comes. With fewer hardware queues than streams it could hold
up a compute kernel of another stream, hence CUDA_DEVICE_MAX_CONNECTIONS (`launch.connect` sets it).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbfx.errors import RankError
from zbfx.runtime.channel import Tensors, window
from zbfx.runtime.failures import Alarm, Failure
from zbfx.runtime.gloo import Gloo

_KIND = re.compile(r"\d+([A-Z]+)\d+")  # of a message, by its name


class Nccl(Gloo):
    """One rank's end. pairs: every (from rank, to rank) that the programs use, the same on all ranks; apart: kinds of messages
    with a communicator of their own.

    What it inherits from Gloo carries small host values (`all_gather`) and the watch over the other processes.
    """

    def __init__(
        self,
        store: dist.Store,
        device: torch.device,
        pairs: Sequence[tuple[int, int]],
        *,
        apart: Sequence[str] = (),
        dead_after: float = 5.0,
        timeout: float = 1800.0,
        host: int = -1,
        alarm: Alarm | None = None,
        action: Callable[[], str] | None = None,
    ) -> None:
        super().__init__(store, dead_after=dead_after, timeout=timeout, host=host, alarm=alarm, action=action)
        self.device = device
        limit = timedelta(seconds=timeout)
        self._world = dist.new_group(backend="nccl", timeout=limit)
        links = [(*pair, kind) for pair in sorted(set(pairs)) for kind in ("", *apart)]
        self._pairs = {link: dist.new_group(sorted(link[:2]), backend="nccl", timeout=limit) for link in links}
        self._apart = frozenset(apart)
        self._connect()
        self.alarm.listen(self._abort)

    def post(self, name: str, source: int, buffers: Tensors) -> None:
        if self._on_host(buffers):
            return super().post(name, source, buffers)
        self._open(self._posted, name, source)
        group = self._pair(source, self.index, name)
        works = [dist.irecv(window(buffer), source, group) for buffer in buffers if buffer.numel()]
        self._works["recv", name] = buffers, works

    def send(self, name: str, target: int, tensors: Tensors) -> None:
        if self._on_host(tensors):
            return super().send(name, target, tensors)
        self._open(self._sending, name, target)
        group = self._pair(self.index, target, name)
        works = [dist.isend(window(tensor), target, group) for tensor in tensors if tensor.numel()]
        self._works["sent", name] = tensors, works

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Every rank's `tensor` becomes rank `source`'s, in place; one collective where it lies on the GPU."""
        if not tensor.is_cuda:
            return super().broadcast(tensor, source)
        self.alarm.check()
        dist.broadcast(tensor, source, self._world)

    def finish(self, *, streams: bool = False) -> None:
        """As every channel's; and wait for the device, so that a peer's death is noticed here and not as wrong numbers."""
        super().finish(streams=streams)
        done = torch.cuda.current_stream(self.device).record_event()
        while not done.query():
            self.alarm.check()
            time.sleep(0.0002)
        self.alarm.check()

    def close(self) -> None:
        self._works.clear()
        self.alarm.forget(self._abort)
        if self.alarm.failure is None:
            torch.cuda.synchronize(self.device)
        groups, self._pairs = [*self._pairs.values(), self._world], {}
        for group in groups if self.alarm.failure is None else ():  # a failure has aborted them already
            dist.destroy_process_group(group)
        super().close()

    def _wait(self, verb: str, name: str, peer: int) -> Tensors:
        tensors, works = self._works[verb, name]
        if self._on_host(tensors):
            return super()._wait(verb, name, peer)
        del self._works[verb, name]
        for work in works:
            work.wait()  # the current stream waits, the host does not
        return tensors

    def _connect(self) -> None:
        """Build each pair's communicator now, in one order on all ranks: built at first use, two pairs could wait for
        each other.
        """
        for (source, target, _), group in self._pairs.items():
            byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
            if self.index == source:
                dist.send(byte, target, group)
            elif self.index == target:
                dist.recv(byte, source, group)
        dist.all_reduce(torch.zeros(1, device=self.device), group=self._world)
        torch.cuda.synchronize(self.device)

    def _pair(self, source: int, target: int, name: str) -> Any:
        """The communicator of a message: NCCL matches what two ranks exchange by order, so what may overtake has its own."""
        kind = _KIND.match(name)
        link = (source, target, kind[1] if kind and kind[1] in self._apart else "")
        if link not in self._pairs:
            pairs = sorted({(a, b) for a, b, _ in self._pairs})
            raise RankError(f"the channel was opened without the pair of ranks {source} -> {target}; it has {pairs}")
        return self._pairs[link]

    @staticmethod
    def _on_host(tensors: Tensors) -> bool:
        return not any(tensor.is_cuda for tensor in tensors)

    def _abort(self, _: Failure) -> None:
        """End the kernels that wait for a rank that will not come, so that the host's next synchronisation returns."""
        for group in [*self._pairs.values(), self._world]:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                with suppress(RuntimeError):
                    group.abort()
