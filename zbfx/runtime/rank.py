"""A rank: the nine verbs that generated programs call, and `execute`, which runs one step of a program.

A program is `step(rank)` and `MESSAGES`. An action is written as everywhere, `2F0` or `0W3.1`; a message is named by the
action that consumes it. `MESSAGES` says what travels, for all microbatches at once (`"2F"`) or for one (`"2F0"`, which wins):

    MESSAGES = {"2F": (1, 2, (("float32", (2, 128, 64), (8192, 64, 1)),))}      # from rank, to rank, (dtype, shape, stride) each
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from zbfx.errors import RankError
from zbfx.runtime.channel import Channel, Tensors
from zbfx.runtime.failures import Failure, describe
from zbfx.runtime.record import Recorder

Layout = tuple[str, tuple[int, ...], tuple[int, ...]]  # dtype name, shape, stride in elements
_K = TypeVar("_K")
_V = TypeVar("_V")
Messages = Mapping[str, tuple[int, int, Sequence[Layout]]]


class Sink(Protocol):
    """Takes the gradients of a parameter, one microbatch after another, in place of its `.grad`."""

    parameter: Tensor

    def add(self, grad: Tensor) -> None: ...


class Rank:
    """One rank, for one step or many.

    params[stage]: what the stage's functions take first: parameters, buffers and constants, in the program's order.
    grads[stage]: for each output of the stage's W, the tensor whose `.grad` it adds to, a Sink that takes it, or None.
    inputs[stage, mb]: the stage's own input leaves for a microbatch. weights[mb]: 0-dim tensor, the tangent of its loss.
    All of it lies on `device` and outlives the step; the recorder counts none of it. prefix: of the names of messages, where
    other programs' may be under way.
    """

    def __init__(
        self,
        index: int,
        channel: Channel,
        *,
        messages: Messages,
        params: Mapping[int, Sequence[Tensor]],
        grads: Mapping[int, Sequence[Tensor | Sink | None]],
        inputs: Mapping[tuple[int, int], Sequence[Tensor]],
        weights: Sequence[Tensor] = (),
        device: torch.device | str = "cpu",
        recorder: Recorder | None = None,
        prefix: str = "",
    ) -> None:
        self.prefix = prefix
        self.index, self.channel, self.device = index, channel, torch.device(device)
        self.messages = messages
        for name, (_, _, layouts) in messages.items():
            _refuse_holes(name, layouts)
        self.recorder = recorder or Recorder(self.device)
        self.losses = tuple(torch.empty_like(weight) for weight in weights)  # filled by `loss`, one per microbatch
        self.outputs: dict[int, Tensors] = {}  # filled by `loss` when there are no weights
        self._params = {stage: tuple(value.detach() for value in values) for stage, values in params.items()}
        self._grads = {stage: tuple(values) for stage, values in grads.items()}
        self._inputs = {key: tuple(values) for key, values in inputs.items()}
        self._weights = tuple(weights)

    # ------------------------------------------------------------ the verbs

    def begin(self, action: str) -> None:
        """Mark where an action begins: what follows, until the next begin, is recorded as its, and failures name it."""
        self.channel.alarm.check()
        self.channel.action = action
        self.recorder.begin(action)

    def params(self, stage: int) -> Tensors:
        """The stage's parameters, buffers and constants."""
        return look_up(self._params, stage, f"parameters of stage {stage}")

    def inputs(self, stage: int, mb: int) -> Tensors:
        """The stage's own input leaves for a microbatch."""
        return look_up(self._inputs, (stage, mb), f"inputs of stage {stage} for microbatch {mb}")

    def post(self, name: str) -> None:
        """Allocate the buffers of a message and announce them to its sender; returns at once."""
        source, layouts = self._message(name, 1)
        buffers = tuple(_empty(layout, self.place(name)) for layout in layouts)
        self.recorder.count(buffers)
        with self.recorder.paused():
            self.channel.post(self.prefix + name, source, buffers)

    def recv(self, name: str) -> Tensors:
        """Wait for a posted message; its tensors."""
        with self.recorder.waiting("recv"):
            return self.channel.recv(self.prefix + name)

    def send(self, name: str, *tensors: Tensor) -> None:
        """Start sending; the channel holds the tensors until `sent`. Nobody may write into them before."""
        target, layouts = self._message(name, 0)
        if (actual := tuple(map(_layout, tensors))) != (declared := tuple(map(_canonical, layouts))):
            raise RankError(f"message {name}: MESSAGES declares {_show(declared)}, the program sends {_show(actual)}")
        with self.recorder.paused():
            self.channel.send(self.prefix + name, target, tensors)

    def sent(self, name: str) -> None:
        """Wait until a message has left; the channel drops its tensors."""
        with self.recorder.waiting("sent"):
            self.channel.sent(self.prefix + name)

    def loss(self, mb: int, *results: Tensor) -> Tensor | None:
        """Note what the last stage gives: a microbatch's loss (copied to `losses[mb]`, on its device), or, without weights, the
        model's outputs (`outputs[mb]`). Returns the tangent that the loss's backward starts from.
        """
        if not self._weights:
            self.outputs[mb] = results
            return None
        if not 0 <= mb < len(self.losses):
            raise RankError(f"no weight for the loss of microbatch {mb}: there are {len(self.losses)}")
        self.losses[mb].copy_(results[0])
        return self._weights[mb]

    def accumulate(self, stage: int, grads: Sequence[Tensor | None], which: Sequence[int] | None = None) -> None:
        """Add W's outputs to the gradients, in place; a first gradient is taken as it is. which: those of the stage's gradients
        that a part of W gives.
        """
        targets = look_up(self._grads, stage, f"gradients of stage {stage}")
        if which is not None:
            if not all(0 <= i < len(targets) for i in which):
                raise RankError(f"stage {stage} has {len(targets)} gradients, the program accumulates numbers {list(which)}")
            targets = tuple(targets[i] for i in which)
        if len(targets) != len(grads):
            raise RankError(f"stage {stage} has {len(targets)} gradients, the program accumulates {len(grads)}")
        for target, grad in zip(targets, grads, strict=True):
            if target is None or grad is None:
                continue
            if not isinstance(target, Tensor):
                target.add(grad)
                self.recorder.keep(grad)
            elif target.grad is None:
                kept = grad.to(target.grad_dtype or grad.dtype)  # a parameter may ask for gradients in float32
                target.grad = kept
                self.recorder.keep(kept)
            else:
                target.grad.add_(grad)

    # ------------------------------------------------------------ behind them

    def place(self, name: str) -> torch.device:
        """Where the buffers of a message lie."""
        return self.device

    def static(self) -> list[Tensor]:
        """What exists before the step and outlives it."""
        given = [*self._params.values(), *self._inputs.values()]
        given_targets = [target for values in self._grads.values() for target in values if target is not None]
        targets = [target if isinstance(target, Tensor) else target.parameter for target in given_targets]
        gradients = [target.grad for target in targets if target.grad is not None]
        tensors = [value for values in given for value in values if isinstance(value, Tensor)]  # a random source is none
        return [*tensors, *targets, *gradients, *self._weights, *self.losses]

    def _message(self, name: str, end: int) -> tuple[int, Sequence[Layout]]:
        """The other end of a message (this rank is its `end`: 0 the sender, 1 the receiver) and what travels."""
        found = self.messages.get(name) or self.messages.get(re.sub(r"\d+(\.\d+)?$", "", name))
        if found is None:
            raise RankError(f"message {name} is not in MESSAGES, which has {', '.join(self.messages) or 'nothing'}")
        if found[end] != self.index:
            role = ("sender", "receiver")[end]
            raise RankError(f"message {name} goes from rank {found[0]} to {found[1]}; rank {self.index} is not its {role}")
        return found[0] if end else found[1], found[2]


def execute(rank: Rank, step: Callable[[Rank], Any], *, streams: bool = False) -> None:
    """Run one step of a rank's program in this thread. RankError names the rank, the action and the cause that stopped it,
    here or on whichever rank failed first; all other ranks of the channel get the same error. streams: the step goes on in the
    next one, so messages may be under way when it ends.
    """
    rank.channel.action = ""
    try:
        # Grad mode is on, as in the forward pass that was traced (kernels of recurrent layers ask for it); nothing requires grad.
        with torch.enable_grad(), rank.recorder.recording(rank.static()):
            step(rank)
        rank.channel.finish(streams=streams)
    except BaseException as error:
        _fail(rank, error)
    rank.channel.action = ""


def _fail(rank: Rank, error: BaseException) -> NoReturn:
    """Ring the alarm and raise what counts: the first failure, and where this rank was when it stopped."""
    place = rank.channel.action
    cause = str(error) if isinstance(error, RankError) else describe(error)
    failure = rank.channel.alarm.ring(Failure(rank.index, place, cause))
    if not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit: the others stop, this one obeys
        raise error
    seen = (
        ""
        if failure.rank == rank.index
        else f" (rank {rank.index} stopped at {place})"
        if place
        else f" (rank {rank.index} stopped)"
    )
    raise RankError(f"{failure}{seen}") from error


def look_up(table: Mapping[_K, _V], key: _K, what: str) -> _V:
    """table[key], or RankError saying what the rank has none of."""
    """table[key], or a RankError that says what is missing."""
    if key not in table:
        raise RankError(f"this rank has no {what}; it has {', '.join(map(str, table)) or 'none'}")
    return table[key]


def _empty(layout: Layout, device: torch.device) -> Tensor:
    """An uninitialised tensor of that layout."""
    name, shape, stride = layout
    return torch.empty_strided(shape, stride, dtype=_dtype(name), device=device)


def _dtype(name: str) -> torch.dtype:
    """The dtype called `float32`, say."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RankError(f"MESSAGES names a dtype {name!r} that torch does not have")
    return dtype


def _layout(tensor: Tensor) -> Layout:
    """A tensor's layout, in canonical form."""
    if tensor.is_conj() or tensor.is_neg():
        raise RankError("a lazily conjugated or negated tensor cannot be sent; resolve_conj() and resolve_neg() it first")
    return _canonical((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride()))


def _canonical(layout: Layout) -> Layout:
    """Strides that address nothing (of dimensions of size 1, of empty tensors) are 0: kernels differ in what they put there."""
    name, shape, stride = layout
    empty = 0 in shape
    return name, tuple(shape), tuple(0 if empty or size == 1 else step for size, step in zip(shape, stride, strict=True))


def _refuse_holes(name: str, layouts: Sequence[Layout]) -> None:
    """RankError unless the elements fill their storage window: channels send the window's bytes."""
    for layout in layouts:
        _, shape, stride = _canonical(layout)
        expected = 1
        for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1 and 0 not in shape):
            if step != expected:
                raise RankError(f"message {name}: {_show([layout])} has holes or overlaps; only dense tensors can be sent")
            expected *= size


def _show(layouts: Sequence[Layout]) -> str:
    return ", ".join(f"{name}{list(shape)} strides {stride}" for name, shape, stride in layouts) or "nothing"
