"""What the processes of these tests run; each function imports by name in a new process."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.runtime.programs import RANK_0, RANK_1, Example, program
from zbfx.errors import RankError
from zbfx.runtime import Channel, Memory, Rank, Recorder, connect, execute, place

# One of each kind of tensor that can travel: dtypes, no dimension, no element, permuted strides, a window into a storage.
KINDS: dict[str, Any] = {
    "float32": lambda: torch.randn(3, 4),
    "bfloat16": lambda: torch.randn(3, 4).bfloat16(),
    "float64": lambda: torch.randn(3, 4, dtype=torch.float64),
    "complex64": lambda: torch.randn(3, 4, dtype=torch.complex64),
    "int64": lambda: torch.arange(12) - 2**40,
    "bool": lambda: torch.arange(12) % 3 == 0,
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 4),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "window": lambda: torch.randn(5, 4)[1:3],
    "nan": lambda: torch.tensor([float("nan"), float("-inf"), -0.0]),
}


def kinds() -> tuple[torch.Tensor, ...]:
    """The same tensors on every rank."""
    torch.manual_seed(1)
    return tuple(make() for make in KINDS.values())


def layout(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride()


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal layout and bits (nan equals itself, 0.0 is not -0.0)."""
    return layout(a) == layout(b) and torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def example_rank(channel: Channel, example: Example | None = None, **record: Any) -> tuple[Rank, Any, Example]:
    """This rank of the two-stage example, its step, and the example."""
    example, index = example or Example(), channel.index
    device = example.weights[0].device
    module = program((RANK_0, RANK_1)[index])
    rank = Rank(
        index,
        channel,
        messages=module.MESSAGES,
        params={index: example.params[index]},
        grads={index: example.params[index]},
        inputs={key: leaves for key, leaves in example.inputs.items() if key[0] == index},
        weights=example.weights if index else (),
        device=device,
        recorder=Recorder(device, **record),
    )
    return rank, module.step, example


def bare_rank(channel: Channel, messages: Any) -> Rank:
    """A rank without stages: for programs that only send messages."""
    return Rank(channel.index, channel, messages=messages, params={}, grads={}, inputs={})


def everything(channel: Channel) -> dict[str, Any]:
    """Checks that share two processes; what each found."""
    return {
        "kinds": _kinds_travel(channel),
        "order": _order_does_not_matter(channel),
        "step": _two_steps(channel),
        "gather": channel.all_gather({"rank": channel.index, "text": "é" * (channel.index + 1)}),
        "broadcast": _broadcast(channel),
        "slow": _slow_is_not_dead(channel),
    }


def _kinds_travel(channel: Channel) -> list[str]:
    """Names of the kinds that did not arrive as they left."""
    mine = kinds()
    rank = bare_rank(channel, {"1F": (0, 1, [layout(t) for t in mine])})

    def step(rank: Rank) -> None:
        if rank.index == 0:
            rank.send("1F0", *mine)
            rank.sent("1F0")
        else:
            rank.post("1F0")
            got.extend(rank.recv("1F0"))

    got: list[torch.Tensor] = []
    execute(rank, step)
    return [name for name, a, b in zip(KINDS, mine, got or mine, strict=True) if not same_bytes(a, b)]


def _order_does_not_matter(channel: Channel) -> list[float]:
    """Sends of 0 to 1 in one order, receives in another, while 1 sends to 0 too: what arrived."""
    one = ("float32", (4096,), (1,))
    messages = {"1F": (0, 1, (one,)), "0B": (1, 0, (one,))}
    here, there = ("0B", "1F") if channel.index == 0 else ("1F", "0B")
    arrived: list[float] = []

    def step(rank: Rank) -> None:
        for mb in (0, 1, 2):
            rank.post(f"{here}{mb}")
        for mb in (2, 0, 1):
            rank.send(f"{there}{mb}", torch.full((4096,), float(mb)))
        for mb in (1, 2, 0):
            arrived.append(rank.recv(f"{here}{mb}")[0].mean().item())
        for mb in (0, 1, 2):
            rank.sent(f"{there}{mb}")

    execute(bare_rank(channel, messages), step)
    return arrived


def _two_steps(channel: Channel) -> dict[str, Any]:
    """Two steps of the example, the second adding to the first's gradients: largest error, and the memory record."""
    memory = Memory()
    rank, step, example = example_rank(channel, memory=memory, times=True)
    execute(rank, step)
    first = memory.peak, memory.held
    execute(rank, step)
    losses, grads = example.reference()
    mine = grads[2 * rank.index : 2 * rank.index + 2]
    errors = [(p.grad - 2 * g).abs().max().item() for p, g in zip(example.params[rank.index], mine, strict=True)]
    errors += [abs(a.item() - b.item()) for a, b in zip(rank.losses, losses, strict=False)]
    return {"error": max(errors), "peak": first[0], "held": first[1], "spans": [s.action for s in rank.recorder.spans()]}


def _broadcast(channel: Channel) -> list[float]:
    tensor = torch.arange(3.0) + 10 * channel.index
    channel.broadcast(tensor, channel.size - 1)
    return tensor.tolist()


def _slow_is_not_dead(channel: Channel) -> float:
    """Rank 0 keeps rank 1 waiting for longer than `dead_after` (3 s in these tests)."""

    def step(rank: Rank) -> None:
        if rank.index == 0:
            time.sleep(5.5)
            rank.send("1F0", torch.ones(1))
            rank.sent("1F0")
        else:
            rank.post("1F0")
            rank.recv("1F0")

    begun = time.monotonic()
    execute(bare_rank(channel, {"1F": (0, 1, (("float32", (1,), (1,)),))}), step)
    return time.monotonic() - begun


def ring(channel: Channel) -> list[float]:
    """Every rank sends to the next; twice around."""
    size, index = channel.size, channel.index
    messages = {f"{r}F": ((r - 1) % size, r, (("float32", (2,), (1,)),)) for r in range(size)}
    got: list[float] = []

    def step(rank: Rank) -> None:
        for mb in (0, 1):
            rank.post(f"{index}F{mb}")
            rank.send(f"{(index + 1) % size}F{mb}", torch.full((2,), float(10 * mb + index)))
        for mb in (0, 1):
            got.append(rank.recv(f"{index}F{mb}")[0][0].item())
            rank.sent(f"{(index + 1) % size}F{mb}")

    execute(bare_rank(channel, messages), step)
    return got


def stop_at(channel: Channel, how: str, folder: str) -> None:
    """Rank 1 goes away in action 1F1, as `how` says; rank 0 waits for it, rank 2 for rank 0. Each writes what it was told."""
    one = (("float32", (2,), (1,)),)
    rank = bare_rank(channel, {"0B": (1, 0, one), "2F": (0, 2, one)})

    def step(rank: Rank) -> None:
        rank.begin(f"{rank.index}F1")
        if rank.index == 0:
            rank.post("0B1")
            rank.recv("0B1")
        if rank.index == 2:
            rank.post("2F1")
            rank.recv("2F1")
        time.sleep(0.6)  # a heartbeat tells where this rank is
        if how == "raise":
            raise ValueError("no such token: 7")
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(60)

    begun = time.monotonic()
    try:
        execute(rank, step)
    except RankError as error:
        text = f"{time.monotonic() - begun:.2f}|{error}"
        try:
            execute(rank, lambda rank: rank.begin("0F0"))
        except RankError as again:
            text += f"|{again}"
        Path(folder, str(rank.index)).write_text(text)
        raise


if __name__ == "__main__":  # under torchrun: the folder to write to is the argument
    here, opened = place(), connect()
    Path(sys.argv[1], str(opened.index)).write_text(f"{here} {ring(opened)}")
    opened.close()
