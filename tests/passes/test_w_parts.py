"""W in parts: together they are the whole W, bit for bit and operator for operator; programs hold the bytes predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import zbfx
from tests.models import MODELS
from tests.passes.graphs import TRACED, RandomNet, captured_of, cut, most_stages, random_nets, split
from tests.passes.schedules import in_parts, random_schedules
from tests.passes.test_communicate import costs_for, run_with_rendezvous
from tests.passes.test_split_backward import call, interpret, layers, real, work
from tests.reference import Reference, differences, memory_differences
from zbfx.errors import VerifyError
from zbfx.ir import Action, Joint, Part, Schedule, Stage, function_of
from zbfx.passes.allocate import allocate
from zbfx.passes.communicate import communicate
from zbfx.passes.course import bare
from zbfx.passes.order_fixed import order_fixed
from zbfx.passes.simulate import simulate
from zbfx.passes.split_backward import root_of
from zbfx.passes.w_parts import divide_w, expanded, with_w_parts
from zbfx.text import parse_action
from zbfx.verify_program import verify_programs, verify_stage


def one(node: fx.Node) -> float:
    """Every operator takes a second."""
    return 1.0


def functions(stage: Stage) -> list[fx.Graph]:
    every = (stage.F, stage.B, stage.W, *[part.W for part in stage.parts])
    return [fn.graph for fn in every if fn is not None]


def check_equal(joint: Joint, stage: Stage, parts: int) -> None:
    """F, B and all parts give what the joint graph gives, bit for bit."""
    places = [n for n in joint.graph.nodes if n.op == "placeholder"]
    generator = torch.Generator().manual_seed(0)
    values = [real(n, generator) for n in places]
    wanted = interpret(joint.graph, *values)
    nx, nc, end = len(joint.forward.inputs), len(joint.forward.leaves), len(values) - len(joint.tangents)
    groups = {
        "p": values[: end - nx - nc], "c": values[end - nx - nc : end - nx], "x": values[end - nx : end], "gy": values[end:],
    }  # fmt: skip
    gradients: dict[int, torch.Tensor] = {}
    for action in [
        Action(stage.index, "F", 0),
        Action(stage.index, "B", 0),
        *[Action(stage.index, "W", 0, i) for i in range(parts)],
    ]:
        fn = function_of(stage, action)
        if fn is None:
            continue
        if stage.parts and action.part is not None:
            groups["k"] = groups[f"k{action.part}"]
        call(fn, groups)
        if "gp" in groups:
            positions = stage.parts[action.part or 0].gradients if stage.parts else range(len(stage.gparams))
            gradients |= dict(zip(positions, groups.pop("gp"), strict=True))
    got = [*groups["y"], *groups.get("gx", ()), *[gradients[i] for i in sorted(gradients)]]
    assert len(got) == len(wanted) and all(map(torch.equal, got, wanted))


@TRACED
@given(random_nets(), st.integers(1, 4), st.integers(2, 4))
def test_the_parts_of_random_graphs_are_the_whole(net: RandomNet, num_stages: int, parts: int) -> None:
    captured = captured_of(net, torch.randn(4, 6))
    for joint, stage in split(captured, cut(captured, min(num_stages, most_stages(captured)))):
        before = str(stage.W)
        divided = divide_w(stage, parts, one)
        verify_stage(divided)
        check_equal(joint, divided, parts)
        assert work(functions(divided)) == work(functions(stage)), "an operator runs twice, or not at all"
        assert str(stage.W) == before


def test_text_of_a_stage_in_parts(golden: Callable[..., None]) -> None:
    """The first stage has no B of its own; in the last, norm and linear both need the norm's input."""
    torch.manual_seed(0)
    net = layers(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
    captured = captured_of(net, torch.randn(4, 6), loss=lambda out, _: out.square().mean())
    lines = []
    for _, stage in split(captured, cut(captured, 2, pins=["3"])):
        divided = divide_w(stage, 2, one)
        assert divided.B is not None
        lines += [f"stage {stage.index}: gradients {[p.gradients for p in divided.parts]}", f"B: {divided.B.gives}\n{divided.B}"]
        lines += [f"W_{i}:\n{part.W}" for i, part in enumerate(divided.parts)]
    golden("\n\n".join(lines))


def test_what_two_parts_need_is_kept_once_until_the_last_of_them() -> None:
    """y = a(x) + b(x): both weights' gradients need x, and each the gradient of y."""

    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b, self.last = (nn.Linear(8, 8, bias=False) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.first(x))
            return self.last(torch.tanh(self.a(h) + self.b(h).sin())).square().mean()

    captured = captured_of(Twin(), torch.randn(4, 8))
    stages = [s for _, s in split(captured, cut(captured, 3, pins=["a", "last"]))]
    whole, divided = stages[1], divide_w(stages[1], 2, one)
    kept = [{n.name for n in divided.B.outputs[1 + 2 * i : 3 + 2 * i]} for i in range(2)]
    assert len(kept[0] & kept[1]) == 1, "x is in both lists"
    words = "0F0 1F0 2F0 2B0 2W0 1B0 0B0 0W0 1W0.0 1W0.1"
    schedule = Schedule((0, 0, 0), (tuple(map(parse_action, words.split())),))
    running = (stages[0], divided, stages[2])
    (instrs,) = communicate(bare(schedule, simulate(schedule, costs_for(schedule))), running)
    held = allocate(0, instrs, running, {})
    at = {str(i.action): h for i, h in zip(held.instrs, held.held, strict=True) if i.verb == "compute"}
    x, gy = 4 * 8 * 4, 4 * 8 * 4
    assert at["0W0"] - at["1W0.0"] == gy and at["1W0.0"] - at["1W0.1"] == x + gy
    assert whole.B is not None and divided.B is not None and len(set(divided.B.outputs)) == len(whole.B.outputs)


def test_gradients_that_share_work_stay_together_and_run_as_part_0() -> None:
    """A convolution's backward gives weight and bias at once."""
    net = layers(nn.PReLU(), nn.Conv1d(6, 6, 3, padding=1), nn.Tanh())
    captured = captured_of(net, torch.randn(4, 6, 5), loss=lambda out, _: out.square().mean())
    stage = split(captured, cut(captured, 2, pins=["1"]))[1][1]
    divided = divide_w(stage, 3, one)
    assert divided is stage
    assert [function_of(divided, Action(1, "W", 0, i)) for i in range(3)] == [stage.W, None, None]
    assert expanded(Action(1, "W", 0), divided) == (Action(1, "W", 0),)


def test_parts_are_of_about_the_same_seconds_and_in_the_order_of_parameters() -> None:
    net = layers(nn.Linear(6, 6), *[nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh()) for _ in range(6)])
    captured = captured_of(net, torch.randn(4, 6), loss=lambda out, _: out.square().mean())
    stage = split(captured, cut(captured, 2, pins=["1"]))[1][1]
    assert [p.gradients for p in divide_w(stage, 3, one).parts] == [(0, 1), (2, 3), (4, 5)]
    assert [p.gradients for p in divide_w(stage, 8, one).parts] == [(0,), (1,), (2,), (3,), (4,), (5,), (), ()]
    assert stage.W is not None
    heavy = root_of(stage.W.outputs[0])
    assert [p.gradients for p in divide_w(stage, 2, lambda n: 9.0 if n is heavy else 1.0).parts] == [(0,), (1, 2, 3, 4, 5)]


# ---------------------------------------------------------------- whole pipelines


@cache
def stages_of(num_stages: int) -> tuple[Stage, ...]:
    """Equal stages of two linear layers and a norm."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh()) for _ in range(num_stages)]
    captured = captured_of(nn.Sequential(*blocks), torch.randn(2, 4), loss=lambda out, _: out.sum())
    return tuple(s for _, s in split(captured, cut(captured, num_stages, pins=[str(i) for i in range(1, num_stages)])))


@settings(max_examples=30)
@given(st.data())
def test_any_schedule_with_parts_gives_programs_that_cannot_deadlock(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, 4))
    schedule = data.draw(random_schedules(num_stages, data.draw(st.integers(1, num_stages)), max_parts=3))
    stages = with_w_parts(stages_of(num_stages), schedule, one)
    instrs = communicate(bare(schedule, simulate(schedule, costs_for(schedule))), stages)
    programs = tuple(allocate(r, i, stages, {}) for r, i in enumerate(instrs))
    verify_programs(programs)
    assert run_with_rendezvous(programs)
    for rank, program in enumerate(programs):
        wanted = [part for a in schedule.ranks[rank] for part in expanded(a, stages[a.stage])]
        real = [a for a in wanted if function_of(stages[a.stage], a) is not None]
        assert [i.action for i in program.instrs if i.verb == "compute"] == real
        assert program.held[-1:] in ((), (0,))


@cache
def reference(name: str) -> Reference:
    return Reference(MODELS[name](), 2)


def wrong(name: str, schedule: Schedule) -> list[str]:
    """What a step under the schedule gives, or holds, that it should not."""
    case, m = reference(name).case, schedule.microbatches
    model = case.fresh()
    args, kwargs, target = case.batch(2 * m)
    pipe = zbfx.compile(
        model, schedule.num_stages, example_inputs=args, example_kwargs=kwargs, example_target=target, loss=case.loss,
        microbatches=m, schedule=schedule,
    )  # fmt: skip
    pipe.watch(memory=True)
    loss = pipe.step(*args, target=target, **kwargs)
    wanted = reference(name).step(m)
    return differences(model, loss, wanted) + memory_differences(pipe.plan, pipe.observed, range(len(schedule.ranks)))


@settings(max_examples=8)
@given(st.data())
def test_any_schedule_with_parts_trains_the_same_and_holds_the_bytes_predicted(data: st.DataObject) -> None:
    assert wrong("mlp", data.draw(random_schedules(3, data.draw(st.integers(1, 3)), max_parts=3))) == []


def test_whole_Ws_and_backwards_may_stand_among_those_in_parts() -> None:
    words = "0F0 1F0 1BW0 0B0 0W0 0F1 1F1 1B1 1W1.0 1W1.1 0B1 0W1.0 0W1.1"
    assert wrong("mlp", Schedule((0, 0), (tuple(map(parse_action, words.split())),))) == []


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_models_in_parts_equal_one_process(name: str) -> None:
    assert wrong(name, in_parts(order_fixed("zb-v", (0, 1, 1, 0), 4), 3)) == []


# ---------------------------------------------------------------- refused


@pytest.fixture
def divided() -> Stage:
    return divide_w(stages_of(2)[1], 2, one)


def test_the_verifier_refuses_parts_that_do_not_fit(divided: Stage) -> None:
    first, second = divided.parts
    for parts, words in [
        ((first, Part(second.W, first.gradients)), r"stage 1 has \d gradients, the parts of its W give"),
        ((second, first), r"stage 1: B keeps \d values, W_0 takes \d"),
    ]:
        with pytest.raises(VerifyError, match=words):
            verify_stage(replace(divided, parts=parts))


def schedule_of(text: str) -> Schedule:
    return Schedule((0,), (tuple(map(parse_action, text.split())),))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0 0B0 0W0.1", "next is 0W0.0"),
        ("0F0 0F1 0B0 0B1 0W0.0 0W1.0 0W0.1 0W1.1", r"next is 0W0\.1"),
        ("0F0 0F1 0B0 0B1 0W0.0 0W0.1 0W1.0", "stage 0 has more: its 0W0.1"),
        ("0F0 0F1 0B0 0B1 0W0.0 0W1.0 0W1.1", "0W0.0 is the last part of its W"),
    ],
)
def test_schedules_whose_parts_do_not_match_are_refused(text: str, words: str) -> None:
    x: Any = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    m = schedule_of(text).microbatches
    with pytest.raises(zbfx.ScheduleError, match=words):
        zbfx.compile(
            model,
            1,
            example_inputs=(x,),
            example_target=x,
            loss=nn.functional.mse_loss,
            microbatches=m,
            schedule=schedule_of(text),
        )
