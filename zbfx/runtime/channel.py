"""Channels carry named tuples of tensors between ranks: what every channel offers.

A message has a name (the action that consumes it), one sender and one receiver. Four calls carry it:

    post(name, source, buffers)   receiver: these buffers will hold it; returns at once
    send(name, target, tensors)   sender: these tensors leave; returns at once; the channel holds them until `sent`
    recv(name) -> buffers         receiver: waits until the buffers are filled; the channel forgets them
    sent(name)                    sender: waits until the tensors may be reused; the channel drops them

Tensors and buffers are dense and have equal dtypes, shapes and strides (`Rank` has checked that). On CUDA, "waits" means
that the current stream waits: the host never does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zbfx.errors import RankError
from zbfx.runtime.failures import Alarm

Tensors = tuple[Tensor, ...]


def window(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor's storage window: uint8[nbytes], sharing its memory whatever the order of its strides."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Channel:
    """One rank's end. Subclasses carry the messages; what all share is here."""

    def __init__(self, index: int, size: int, alarm: Alarm) -> None:
        self.index, self.size, self.alarm = index, size, alarm
        self.action = ""  # what the rank is doing: heartbeats and failure reports name it
        self._posted: dict[str, int] = {}  # message -> the rank it comes from
        self._sending: dict[str, int] = {}  # message -> the rank it goes to
        self._rounds = 0

    def post(self, name: str, source: int, buffers: Tensors) -> None:
        raise NotImplementedError

    def recv(self, name: str) -> Tensors:
        raise NotImplementedError

    def send(self, name: str, target: int, tensors: Tensors) -> None:
        raise NotImplementedError

    def sent(self, name: str) -> None:
        raise NotImplementedError

    def finish(self, *, streams: bool = False) -> None:
        """The step is over: RankError if another rank failed meanwhile, or if a message is left under way (a stream's may be)."""
        self.alarm.check()
        if (left := [*self._posted, *self._sending]) and not streams:
            raise RankError(
                f"the step ended with messages under way: {', '.join(left)}; every post needs its recv, every send its sent"
            )

    def reset(self) -> None:
        """Forget what a failed step left behind. On every rank of the channel, while none runs; then `alarm.reset()`."""
        self._posted.clear()
        self._sending.clear()

    def close(self) -> None:
        """Give back what the channel holds outside this process; a channel between threads holds nothing."""

    def _open(self, book: dict[str, int], name: str, peer: int) -> None:
        """Note that message `name` is under way; RankError if it is already, or if no rank `peer` exists."""
        self.alarm.check()
        if name in book:
            raise RankError(f"message {name} is under way already; its recv or sent comes before it is posted or sent again")
        if peer == self.index or not 0 <= peer < self.size:
            raise RankError(f"message {name}: no other rank {peer} among {self.size} ranks (this is rank {self.index})")
        book[name] = peer

    def _shut(self, book: dict[str, int], name: str) -> int:
        """The peer of message `name`, which is no longer noted; RankError if it is not under way."""
        self.alarm.check()
        if name not in book:
            raise RankError(f"message {name} is not under way: `recv` needs `post` first, and `sent` needs `send`")
        return book.pop(name)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Every rank's `tensor` (dense, alike on all) becomes rank `source`'s, in place. All ranks call it."""
        self._rounds += 1
        if self.index != source:
            self.post(self._name(source, self.index), source, (tensor,))
            self.recv(self._name(source, self.index))
            return
        for peer in self._peers():
            self.send(self._name(source, peer), peer, (tensor,))
        for peer in self._peers():
            self.sent(self._name(source, peer))

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order. All ranks call it; for small things (it sends all to all)."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self._swap(torch.tensor([data.numel()]), [1] * self.size)
        texts = self._swap(data, [int(length) for length in lengths])
        return [json.loads(bytes(text.tolist())) for text in texts]

    def _swap(self, mine: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Rank r's `mine` for each r; rank r's has lengths[r] elements."""
        self._rounds += 1
        for peer in self._peers():
            self.post(self._name(peer, self.index), peer, (torch.empty(lengths[peer], dtype=mine.dtype),))
        for peer in self._peers():
            self.send(self._name(self.index, peer), peer, (mine,))
        received = {peer: self.recv(self._name(peer, self.index))[0] for peer in self._peers()}
        for peer in self._peers():
            self.sent(self._name(self.index, peer))
        return [received.get(rank, mine) for rank in range(self.size)]

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.index]

    def _name(self, source: int, target: int) -> str:
        """The message of the present round from source to target; no action is written like this."""
        return f"round {self._rounds} {source}>{target}"
