"""Bytes: hand-made functions counted by hand, and random models measured while they run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zbfx
from tests.models import Case
from tests.passes.graphs import TRACED, RandomNet, captured_of, cut, most_stages, random_nets, split
from tests.passes.schedules import random_schedules
from tests.reference import Reference, differences, memory_differences
from zbfx.passes.liveness import Ledger, last_uses, profile


def own_loss(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output


@TRACED
@given(random_nets(), st.integers(1, 4), st.data())
def test_random_models_under_random_schedules_equal_one_process_and_the_prediction(
    net: RandomNet, num_stages: int, data: st.DataObject
) -> None:
    """The whole compiler: loss, gradients, and bytes at every action."""
    batch = lambda n: ((torch.randn(n, 6, generator=torch.Generator().manual_seed(n)),), {}, None)  # noqa: E731
    case = Case(net.train(), own_loss, batch)
    num_stages = min(num_stages, most_stages(captured_of(net, *batch(4)[0])))
    ranks = data.draw(st.integers(1, num_stages))
    model = case.fresh()
    pipe = zbfx.compile(model, num_stages, ranks=ranks, example_inputs=batch(4)[0], loss=own_loss, microbatches=1)
    schedule = data.draw(random_schedules(num_stages, ranks, 3))
    pipe.reschedule(schedule, microbatches=schedule.microbatches)
    pipe.watch(times=False, memory=True)
    loss = pipe.step(*batch(4 * schedule.microbatches)[0])
    differs = differences(model, loss, Reference(case, 4).step(schedule.microbatches))
    shared_over_ranks = len({k for s in pipe.plan.stages for k in [s.index] if "shared.weight" in s.names}) > 1
    assert [d for d in differs if not (shared_over_ranks and d.startswith("shared.weight"))] == []
    assert memory_differences(pipe.plan, pipe.observed, range(ranks)) == []


def stage_of(model: nn.Module, *args: torch.Tensor) -> Any:
    captured = captured_of(model, *args, loss=lambda out, _: out.sum())
    return split(captured, cut(captured, 1))[0][1]


def test_a_chain_holds_what_is_saved_and_peaks_by_two() -> None:
    """x -> tanh -> tanh -> tanh -> sum over 100 floats: the first two results live together, the saved ones to the end."""
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Tanh(), nn.Tanh())
    stage = stage_of(model, torch.randn(10, 10))
    ledger = Ledger()
    groups = ledger.call(profile(stage.F), [])
    assert len(groups["s"]) == 2 and ledger.live == 2 * 400 + 4  # both tanhs, and the loss
    assert ledger.peak == 800 + 4
    ledger.drop(groups["y"])
    assert ledger.live == 800
    ledger.call(profile(stage.W), [*groups["s"], None])
    assert ledger.live == 400  # the gradient of the weight


def test_storages_are_counted_once_however_many_names_look_at_them() -> None:
    ledger = Ledger()
    a = ledger.new(100)
    b = ledger.new(10)
    assert (ledger.live, ledger.peak) == (110, 110)
    ledger.drop([a, None])
    assert (ledger.live, ledger.peak) == (10, 110)
    ledger.drop([b])
    assert ledger.live == 0


def test_a_value_held_outside_survives_a_call_that_is_done_with_it() -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.a(x))
            return self.b(h).relu() + h

    captured = captured_of(Passes(), torch.randn(4, 4), loss=lambda out, _: out.sum())
    stage = split(captured, cut(captured, 2, pins=["b"]))[1][1]
    ledger = Ledger()
    x = ledger.new(64)
    groups = ledger.call(profile(stage.F), [x])
    assert x in groups["s"]  # it is saved: the same storage under another name
    sizes = ledger.live
    ledger.drop(groups["y"])
    assert ledger.live == sizes - 4


@TRACED
@given(random_nets(), st.integers(1, 3))
def test_every_name_dies_at_its_last_use_and_never_before(net: RandomNet, num_stages: int) -> None:
    captured = captured_of(net, torch.randn(4, 6))
    for _, stage in split(captured, cut(captured, min(num_stages, most_stages(captured)))):
        for fn in (stage.F, stage.B, stage.W):
            if fn is None:
                continue
            last, order = last_uses(fn.graph), {n: i for i, n in enumerate(fn.graph.nodes)}
            outputs = set(fn.outputs)
            for name, user in last.items():
                assert name not in outputs and user in name.users
                assert all(order[u] <= order[user] for u in name.users)


def test_gradients_already_there_change_nothing() -> None:
    """Peaks of two microbatches in a row are equal once both have been through: nothing is left behind."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    pipe = zbfx.compile(model, 2, loss=nn.functional.mse_loss, microbatches=3, schedule="1f1b")
    pipe.prepare(torch.randn(6, 8), target=torch.randn(6, 8))
    for program in pipe.plan.programs:
        assert program.held[-1] == 0
        ends = [h for i, h in zip(program.instrs, program.held, strict=True) if i.verb == "compute" and i.action.kind == "W"]
        assert all(a >= b for a, b in pairwise(ends[-2:]))


@pytest.mark.parametrize("microbatches", [8, 12])
def test_1f1b_holds_no_more_with_more_microbatches_and_gpipe_does(microbatches: int) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    pipe = zbfx.compile(model, 2, loss=nn.functional.mse_loss, microbatches=4, schedule="1f1b")
    pipe.prepare(torch.randn(8, 8), target=torch.randn(8, 8))
    base = [p.peak for p in pipe.plan.programs]
    pipe.reschedule("1f1b", microbatches=microbatches)
    assert pipe.plan.programs[1].peak == base[1]
    pipe.reschedule("gpipe", microbatches=microbatches)
    assert pipe.plan.programs[1].peak > 2 * base[1]
