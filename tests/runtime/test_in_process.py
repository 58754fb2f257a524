"""Ranks as threads: messages, numbers, failures, and what the channel holds and for how long."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.workers import KINDS, bare_rank, example_rank, kinds, layout, same_bytes
from tests.runtime.programs import RANK_0, RANK_1, Example, program
from zbfx.errors import RankError
from zbfx.runtime import Exchange, Rank, run_threads

ONE = (("float32", (2,), (1,)),)
Step = Callable[[Rank], Any]


def run(messages: Any, steps: Sequence[Step], exchange: Exchange | None = None) -> None:
    """One step of ranks that only send messages."""
    exchange = exchange or Exchange(len(steps))
    run_threads([bare_rank(channel, messages) for channel in exchange.channels()], steps)


def test_numbers_of_two_steps() -> None:
    example = Example()
    modules = [program(source) for source in (RANK_0, RANK_1)]
    ranks = [
        Rank(
            index,
            channel,
            messages=modules[index].MESSAGES,
            params=example.params,
            grads=example.params,
            inputs=example.inputs,
            weights=example.weights,
        )
        for index, channel in enumerate(Exchange(2).channels())
    ]
    losses, grads = example.reference()
    for step in (1, 2):  # the second adds to the gradients of the first
        run_threads(ranks, [module.step for module in modules])
        mine = [p.grad for stage in (0, 1) for p in example.params[stage]]
        for got, expected in zip(mine, grads, strict=True):
            assert got is not None
            torch.testing.assert_close(got, (step * expected).float())
    for got, loss in zip(ranks[1].losses, losses, strict=True):
        torch.testing.assert_close(got, loss.detach().float())


def test_every_kind_of_tensor_travels() -> None:
    mine = kinds()
    got: list[torch.Tensor] = []

    def sender(rank: Rank) -> None:
        rank.send("1F0", *mine)
        rank.sent("1F0")

    def receiver(rank: Rank) -> None:
        rank.post("1F0")
        got.extend(rank.recv("1F0"))

    run({"1F": (0, 1, [layout(tensor) for tensor in mine])}, [sender, receiver])
    assert [name for name, a, b in zip(KINDS, mine, got, strict=True) if not same_bytes(a, b)] == []


@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(1, 12))
def test_any_order_of_posts_and_sends(seed: int, size: int, count: int) -> None:
    """All post and send first, in any order, then wait in any order: nothing may depend on who comes first."""
    rng = random.Random(seed)
    pairs = [rng.sample(range(size), 2) for _ in range(count)]
    messages = {f"{i}F0": (a, b, ONE) for i, (a, b) in enumerate(pairs)}
    got: dict[int, float] = {}

    def make(index: int) -> Step:
        posts = [i for i, (_, b) in enumerate(pairs) if b == index]
        sends = [i for i, (a, _) in enumerate(pairs) if a == index]
        first = rng.sample([(1, i) for i in posts] + [(0, i) for i in sends], len(posts) + len(sends))
        second = rng.sample(first, len(first))

        def step(rank: Rank) -> None:
            for receives, i in first:
                if receives:
                    rank.post(f"{i}F0")
                else:
                    rank.send(f"{i}F0", torch.full((2,), float(i)))
            for receives, i in second:
                if receives:
                    got[i] = rank.recv(f"{i}F0")[0].sum().item()
                else:
                    rank.sent(f"{i}F0")

        return step

    run(messages, [make(index) for index in range(size)])
    assert got == {i: 2.0 * i for i in range(count)}


def test_a_send_does_not_wait_and_holds_its_tensors_until_sent() -> None:
    sent_at: list[float] = []
    posted = threading.Event()

    def sender(rank: Rank) -> None:
        tensor = torch.ones(2)
        storage = weakref.ref(tensor.untyped_storage())
        rank.send("1F0", tensor)
        sent_at.append(time.monotonic())
        del tensor
        gc.collect()
        assert storage() is not None
        posted.set()
        rank.sent("1F0")
        assert storage() is None

    def receiver(rank: Rank) -> None:
        posted.wait(10)
        rank.post("1F0")
        assert rank.recv("1F0")[0].tolist() == [1.0, 1.0]

    run({"1F": (0, 1, ONE)}, [sender, receiver])


def test_a_failure_stops_all_and_names_itself_and_the_exchange_can_be_used_again() -> None:
    exchange = Exchange(3)
    messages = {"0B": (1, 0, ONE), "2F": (0, 2, ONE)}
    seen: dict[int, str] = {}

    def waits(name: str) -> Step:
        def step(rank: Rank) -> None:
            rank.begin(f"{rank.index}F0")
            rank.post(name)
            try:
                rank.recv(name)
            except RankError as error:
                seen[rank.index] = str(error)
                raise

        return step

    def fails(rank: Rank) -> None:
        rank.begin("1B3")
        time.sleep(0.1)
        raise ValueError("out of\ntokens")

    begun = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1 failed at 1B3: ValueError: out of tokens$") as caught:
        run(messages, [waits("0B0"), fails, waits("2F0")], exchange)
    assert time.monotonic() - begun < 5
    assert isinstance(caught.value.__cause__, ValueError)
    assert seen == dict.fromkeys((0, 2), "rank 1 failed at 1B3: ValueError: out of tokens")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]

    def first(rank: Rank) -> None:
        rank.send("2F0", torch.ones(2))
        rank.sent("2F0")

    def last(rank: Rank) -> None:
        rank.post("2F0")
        rank.recv("2F0")

    run(messages, [first, lambda rank: None, last], exchange)


def test_a_step_that_leaves_a_message_behind_is_refused() -> None:
    def sender(rank: Rank) -> None:
        rank.send("1F0", torch.ones(2))

    def receiver(rank: Rank) -> None:
        rank.post("1F0")
        rank.recv("1F0")

    with pytest.raises(RankError, match=r"rank 0 failed.*messages under way: 1F0"):
        run({"1F": (0, 1, ONE)}, [sender, receiver])


def test_gather_and_broadcast_between_threads() -> None:
    gathered: dict[int, Any] = {}
    tensors = [torch.full((3,), float(i)) for i in range(3)]

    def step(rank: Rank) -> None:
        gathered[rank.index] = rank.channel.all_gather([rank.index, "x" * rank.index])
        rank.channel.broadcast(tensors[rank.index], 2)

    run({}, [step] * 3)
    assert [gathered[rank] for rank in range(3)] == [[[0, ""], [1, "x"], [2, "xx"]]] * 3
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3] * 3


@pytest.mark.gpu
def test_numbers_on_one_gpu_without_host_synchronisation() -> None:
    """Two ranks share a GPU; torch raises at any synchronisation that it notices within the step."""
    example = Example("cuda")
    ranks, steps = [], []
    for channel in Exchange(2).channels():
        rank, step, _ = example_rank(channel, example, times=True)
        ranks.append(rank)
        steps.append(step)
    run_threads(ranks, steps)
    for params in example.params.values():
        for param in params:
            param.grad = None
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_threads(ranks, steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    _, grads = example.reference()
    for got, expected in zip([p.grad for s in (0, 1) for p in example.params[s]], grads, strict=True):
        torch.testing.assert_close(got, expected.float())
    assert all(span.end >= span.start for rank in ranks for span in rank.recorder.spans())


@pytest.mark.gpu
def test_a_received_buffer_is_not_overwritten_by_earlier_kernels_on_one_gpu() -> None:
    """Long kernels delay both sides, and freed memory is reused at once: each message must still arrive whole."""
    shape, rounds = (1 << 20,), 20
    one = (("float32", shape, (1,)),)
    sums: list[torch.Tensor] = []

    def sender(rank: Rank) -> None:
        for i in range(rounds):
            torch.cuda._sleep(2_000_000)
            rank.send(f"1F{i}", torch.full(shape, float(i), device="cuda"))
            rank.sent(f"1F{i}")
            torch.full(shape, -1.0, device="cuda")  # takes the memory that was sent

    def receiver(rank: Rank) -> None:
        for i in range(rounds):
            torch.full(shape, -2.0, device="cuda")
            rank.post(f"1F{i}")  # takes that memory, which kernels may still be writing
            (x,) = rank.recv(f"1F{i}")
            torch.cuda._sleep(1_000_000)
            sums.append(x.double().sum())

    ranks = [
        Rank(c.index, c, messages={"1F": (0, 1, one)}, params={}, grads={}, inputs={}, device="cuda")
        for c in Exchange(2).channels()
    ]
    run_threads(ranks, [sender, receiver])
    assert [s.item() for s in sums] == [float(i) * shape[0] for i in range(rounds)]
