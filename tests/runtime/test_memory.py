"""Bytes, exactly: what counts, from when to when, and that threads do not blur it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.workers import bare_rank, example_rank
from tests.runtime.programs import Example
from zbfx.runtime import Exchange, Memory, Rank, Recorder, execute, run_threads

K = 1024  # bytes of torch.ones(256)


def figures(step: Any, **given: Any) -> Memory:
    """The record of a step of a lone rank."""
    memory = Memory()
    (channel,) = Exchange(1).channels()
    rank = Rank(0, channel, messages={}, **{"params": {}, "grads": {}, "inputs": {}, **given}, recorder=Recorder(memory=memory))
    execute(rank, step)
    return memory


def test_storages_count_not_tensors() -> None:
    def step(rank: Rank) -> None:
        rank.begin("0F0")
        x = torch.ones(256)
        rank.begin("0F1")
        v, w = x.view(2, 128), x.t()
        x.add_(1)
        rank.begin("0F2")
        del x, v
        rank.begin("0F3")  # w keeps the whole storage alive
        part = torch.ones(256)[:1].clone()
        rank.begin("0F4")
        del w, part
        rank.begin("0F5")

    memory = figures(step)
    assert memory.held == [("0F0", 0), ("0F1", K), ("0F2", K), ("0F3", K), ("0F4", K + 4), ("0F5", 0)]
    assert memory.peak == 2 * K + 4


def test_static_storages_never_count_whatever_views_them() -> None:
    weight, leaf, grad = torch.nn.Parameter(torch.ones(256)), torch.ones(256), torch.zeros(256)
    weight.grad = grad

    def step(rank: Rank) -> None:
        (w,), (x,) = rank.params(0), rank.inputs(0, 0)
        views = w.view(16, 16).t(), x[3:], w.detach()
        rank.begin("0W0")
        rank.accumulate(0, (torch.ones(256),))
        del views
        rank.begin("0W1")

    memory = figures(step, params={0: (weight,)}, grads={0: (weight,)}, inputs={(0, 0): (leaf,)})
    assert memory.held == [("0W0", 0), ("0W1", 0)]
    assert (memory.peak, weight.grad) == (K, grad)


def test_a_first_gradient_turns_static() -> None:
    weight = torch.nn.Parameter(torch.ones(256))

    def step(rank: Rank) -> None:
        rank.accumulate(0, (torch.ones(256), None))
        rank.begin("0W1")
        rank.accumulate(0, (torch.ones(256), None))
        rank.begin("0W2")

    memory = figures(step, grads={0: (weight, torch.ones(3))})
    assert memory.held == [("0W1", 0), ("0W2", 0)]
    assert memory.peak == K
    assert weight.grad is not None and weight.grad.tolist() == [2.0] * 256


def test_peak_sees_arguments_and_outputs_together() -> None:
    def step(rank: Rank) -> None:
        x = torch.ones(256)
        x = torch.mul(x, torch.ones(256))  # two arguments and the output
        x = torch.mul(x, 2)
        rank.begin("0F1")

    memory = figures(step)
    assert (memory.peak, memory.current) == (3 * K, 0)
    assert memory.held == [("0F1", K)]


def test_a_loss_is_copied_out() -> None:
    def step(rank: Rank) -> None:
        loss = torch.ones(())
        tangent = rank.loss(0, loss)
        del loss
        rank.begin("0B0")
        assert tangent.item() == 0.5

    assert figures(step, weights=[torch.tensor(0.5)]).held == [("0B0", 0)]


def test_nothing_is_watched_or_held_after_the_step() -> None:
    def step(rank: Rank) -> None:
        rank.begin("0F0")
        kept.append(torch.ones(256))

    kept: list[torch.Tensor] = []
    memory = figures(step)
    kept.clear()
    torch.ones(256)
    assert (memory.current, memory.peak, memory._alive, memory._static) == (K, K, {}, {})


def test_messages_count_at_the_receiver_from_post_and_at_the_sender_until_sent() -> None:
    memories = Memory(), Memory()
    messages = {"1F": (0, 1, (("float32", (256,), (1,)), ("int64", (256,), (1,))))}

    def sender(rank: Rank) -> None:
        x, ids = torch.ones(256), torch.arange(256)
        rank.send("1F0", x, ids)
        del x, ids
        rank.begin("0F1")
        rank.sent("1F0")
        rank.begin("0F2")

    def receiver(rank: Rank) -> None:
        rank.begin("1F0")
        rank.post("1F0")
        rank.begin("1F1")
        x, ids = rank.recv("1F0")
        rank.begin("1F2")
        del x
        rank.begin("1F3")
        del ids

    for _ in range(25):  # whoever copies, sooner or later: the figures may not move
        ranks = [bare_rank(channel, messages) for channel in Exchange(2).channels()]
        for rank, memory in zip(ranks, memories, strict=True):
            rank.recorder = Recorder(memory=memory)
        run_threads(ranks, [sender, receiver])
        assert memories[0].held == [("0F1", 3 * K), ("0F2", 0)]
        assert memories[1].held == [("1F0", 0), ("1F1", 3 * K), ("1F2", 3 * K), ("1F3", 2 * K)]
        assert [memory.peak for memory in memories] == [3 * K, 3 * K]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_figures_of_the_example_do_not_depend_on_timing_or_device(device: str) -> None:
    for _ in range(10):
        example, exchange = Example(device), Exchange(2)
        both = [example_rank(channel, example, memory=Memory()) for channel in exchange.channels()]
        run_threads([rank for rank, _, _ in both], [step for _, step, _ in both])
        memories = [rank.recorder.memory for rank, _, _ in both]
        assert [memory.peak for memory in memories if memory] == [3648, 3648]
        assert memories[0] and memories[0].held == [("0F0", 0), ("0F1", 1024), ("0W0", 2048), ("0W1", 1024)]
