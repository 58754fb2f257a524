"""Schedules by name, by placement and by search, compiled and run: the same numbers whatever the order."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import zbfx
from tests.models import Case, mlp
from tests.reference import Reference, differences, memory_differences
from zbfx.ir import Schedule
from zbfx.ordering import chunks_of, order_forward, place_stages

MICROBATCHES = 4
QUICK = 0.2  # seconds of a search


@pytest.fixture(scope="module")
def case() -> Case:
    return mlp()


def compiled(case: Case, **options: object) -> tuple[torch.nn.Module, zbfx.Pipeline]:
    model = case.fresh()
    args, kwargs, target = case.batch(2 * MICROBATCHES)
    pipe = zbfx.compile(
        model, 4, example_inputs=args, example_kwargs=kwargs, example_target=target, loss=case.loss, microbatches=MICROBATCHES,
        **options,
    )  # fmt: skip
    return model, pipe


def check(case: Case, model: torch.nn.Module, pipe: zbfx.Pipeline) -> None:
    """One step equals one process, and holds the bytes that were predicted."""
    args, kwargs, target = case.batch(2 * MICROBATCHES)
    pipe.watch(memory=True)
    loss = pipe.step(*args, target=target, **kwargs)
    wanted = Reference(case, 2).step(MICROBATCHES)
    assert differences(model, loss, wanted) == []
    assert memory_differences(pipe.plan, pipe.observed, range(len(pipe.plan.programs))) == []


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [
        ("zb-v", (0, 1, 1, 0)),
        ("v-half", (0, 1, 1, 0)),
        ("interleaved-1f1b", (0, 1, 0, 1)),
        ("zb-h2", (0, 1, 2, 3)),
        ("looped-bfs", (0, 1, 0, 1)),
        ("auto", (0, 1, 2, 3)),
    ],
)
def test_every_kind_of_schedule_trains_the_same(case: Case, schedule: str, placement: tuple[int, ...]) -> None:
    model, pipe = compiled(case, schedule=schedule)
    assert pipe.plan.schedule.placement == placement
    check(case, model, pipe)


def test_the_search_takes_the_placement_it_is_given(case: Case) -> None:
    model, pipe = compiled(case, schedule="auto", placement="v", ranks=2)
    assert pipe.plan.schedule.placement == (0, 1, 1, 0)
    check(case, model, pipe)


def test_the_search_keeps_the_limit_in_bytes_of_the_program(case: Case) -> None:
    _, free = compiled(case, schedule="auto")
    need = max(s + p.peak for s, p in zip(free.plan.static_bytes, free.plan.programs, strict=True))
    _, tight = compiled(case, schedule="auto", memory=need - 1)
    for limit, program in zip(tight.plan.costs.limit, tight.plan.programs, strict=True):
        assert limit is not None and program.peak <= limit


def test_whole_backwards_run_as_one_function_and_split_ones_as_two(case: Case) -> None:
    _, pipe = compiled(case, schedule="1f1b")
    assert "stage_1.BW(" in pipe.plan.programs[1].source and "stage_1.W(" not in pipe.plan.programs[1].source
    source = pipe.reschedule("zb-h1").plan.programs[1].source
    assert "stage_1.B(" in source and "stage_1.W(" in source and "stage_1.BW(" not in source


def test_a_schedule_of_the_users_own(case: Case) -> None:
    _, pipe = compiled(case, schedule="1f1b")
    given = Schedule(pipe.plan.schedule.placement, pipe.plan.schedule.ranks, "mine")
    model, own = compiled(case, schedule=given)
    check(case, model, own)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"placement": "v", "ranks": 3}, "multiple of ranks"),
        ({"placement": "spiral", "ranks": 2}, "spiral"),
        ({"placement": (0, 2, 1, 2), "ranks": 2}, "0 to 1"),
        ({"placement": (0, 1), "ranks": 2}, "each of the 4 stages"),
        ({"schedule": "zb-v", "placement": "blocks", "ranks": 2}, "zb-v"),
    ],
)
def test_placements_that_do_not_fit_are_refused(case: Case, options: dict[str, object], words: str) -> None:
    with pytest.raises(zbfx.ZbfxError, match=words):
        compiled(case, **options)


def test_default_placements() -> None:
    assert place_stages(None, "zb-h1", 5, 2) == (0, 0, 0, 1, 1)
    assert place_stages(None, "zb-v", 4, 2) == (0, 1, 1, 0)
    assert place_stages("interleaved", "auto", 6, 2) == (0, 1, 0, 1, 0, 1)
    assert (chunks_of("zb-v"), chunks_of("1f1b")) == (2, 1)
    assert [str(a) for a in order_forward((0, 1, 1, 0), 2, 2).ranks[0]] == ["0F0", "3F0", "0F1", "3F1"]


# ---------------------------------------------------------------- searched for the model's own costs


@pytest.mark.parametrize("schedule", ["auto", "zb-1p", "zb-2p"])
def test_searches_use_W_in_parts(case: Case, schedule: str) -> None:
    model, pipe = compiled(case, schedule=schedule, seconds=QUICK, w_parts=2, ranks=2)
    assert {a.part for rank in pipe.plan.schedule.ranks for a in rank if a.kind == "W"} == {0, 1}
    assert any("stage_1.GRADIENTS[1])" in p.source for p in pipe.plan.programs)
    check(case, model, pipe)


def test_the_search_of_placements_says_why(case: Case) -> None:
    model, pipe = compiled(case, schedule="auto", seconds=QUICK, placement="auto", ranks=2)
    solution = pipe.plan.solution
    assert solution is not None and solution.schedule == pipe.plan.schedule
    assert all(name in solution.why for name in ("placement", "linear", "v", "interleaved"))
    for name in ("linear", "v", "interleaved"):
        _, other = compiled(case, schedule="auto", seconds=QUICK, placement=name, ranks=2)
        assert pipe.plan.timeline.makespan <= other.plan.timeline.makespan * (1 + 1e-9)
    check(case, model, pipe)


def test_the_search_of_placements_counts_the_parameters_of_each(case: Case) -> None:
    """A limit that the parameters of one placement alone exceed leaves the others."""
    statics = {}
    for name in ("linear", "v", "interleaved"):
        _, pipe = compiled(case, schedule="auto", seconds=QUICK, placement=name, ranks=2)
        statics[name] = max(s + p.peak for s, p in zip(pipe.plan.static_bytes, pipe.plan.programs, strict=True))
    model, pipe = compiled(case, schedule="auto", seconds=QUICK, placement="auto", ranks=2, memory=min(statics.values()))
    plan = pipe.plan
    assert all(s + p.peak <= min(statics.values()) for s, p in zip(plan.static_bytes, plan.programs, strict=True))
    check(case, model, pipe)


def test_exact_proves_what_auto_found_or_better(case: Case) -> None:
    pytest.importorskip("ortools", reason="needs OR-Tools: pip install zbfx[exact]")
    _, auto = compiled(case, schedule="auto", seconds=QUICK, placement="v", ranks=2)
    model, exact = compiled(case, schedule="exact", placement="v", ranks=2, seconds=4.0)
    found = exact.plan.solution
    assert found is not None and found.timeline.makespan <= auto.plan.timeline.makespan * (1 + 1e-9)
    assert found.bound_makespan <= found.timeline.makespan * (1 + 1e-9)
    check(case, model, exact)


def test_exact_names_what_it_needs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    monkeypatch.setenv("ZBFX_CACHE", "off")
    with pytest.raises(zbfx.InputError, match=r"pip install 'zbfx\[exact\]'"):
        compiled(case, schedule="exact")


def test_shares_of_the_activations_are_limits(case: Case) -> None:
    """zb-1p holds no more at an action's end than as many whole activations as there are ranks, zb-2p no more than twice that."""
    for name, share in (("zb-1p", 1), ("zb-2p", 2)):
        _, pipe = compiled(case, schedule=name, seconds=QUICK, ranks=2, placement="v")
        stages, placement = pipe.plan.costs.stages, pipe.plan.schedule.placement
        held = [sum(c.bytes_F for c, home in zip(stages, placement, strict=True) if home == r) for r in range(2)]
        assert max(pipe.plan.timeline.peak) <= share * 2 * max(held)
        assert pipe.plan.schedule.name == name


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_plans_say_their_bound(case: Case, objective: str, tmp_path: Path) -> None:
    _, pipe = compiled(case, schedule="auto", seconds=QUICK, objective=objective)
    plan = pipe.plan
    assert plan.solution is not None and plan.solution.objective == objective
    kind = "" if objective == "makespan" else " without a barrier"
    words = f"bubble{kind} {getattr(plan.timeline, f'bubble_{objective}'):.1%} ("
    assert words in str(plan) and words in plan.programs[1].source.splitlines()[0]
    assert f"within {plan.solution.gap:.1%}" in str(plan) or ("(optimal)" in str(plan) and plan.solution.gap < 5e-4)
    again = zbfx.load(plan.save(tmp_path / "plan"), case.fresh()).plan
    assert again.solution is not None and again.solution.bound_span == plan.solution.bound_span
    assert (str(again), again.solution.why, again.solution.gap) == (str(plan), plan.solution.why, plan.solution.gap)
    _, fixed = compiled(case, schedule="1f1b")
    assert fixed.plan.solution is None and "optim" not in str(fixed.plan)


def test_another_schedule_keeps_the_placement_that_was_searched(case: Case) -> None:
    _, pipe = compiled(case, schedule="auto", seconds=QUICK, placement="auto", ranks=2, w_parts=2)
    place = pipe.plan.schedule.placement
    assert pipe.reschedule("auto", microbatches=2).plan.schedule.placement == place


def test_predicting_first_decides_the_placement(case: Case) -> None:
    model = case.fresh()
    args, _, target = case.batch(2 * MICROBATCHES)
    pipe = zbfx.compile(
        model, 4, loss=case.loss, microbatches=MICROBATCHES, ranks=2, schedule="auto", seconds=QUICK, placement="auto"
    )
    pipe.predict(*args)
    loss = pipe.step(*args, target=target)
    assert pipe.plan.schedule.placement == (0, 0, 1, 1) and pipe.plan.solution is not None
    assert differences(model, loss, Reference(case, 2).step(MICROBATCHES)) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "auto", "w_parts": 0}, "w_parts=0: a W has at least 1 part"),
        ({"schedule": "zb-h1", "w_parts": 2}, "w_parts=2, but schedule zb-h1 takes each W as it is"),
        ({"schedule": "exact", "w_parts": 2}, "w_parts=2, but schedule exact"),
        ({"schedule": "auto", "objective": "speed"}, "objective='speed' must be one of span, makespan"),
        ({"schedule": "exact", "seconds": 0}, "seconds=0: a search needs more than 0"),
        ({"schedule": "gpipe", "seconds": 3.0}, "seconds=3.0, but schedule gpipe is not searched"),
        ({"schedule": "zb-h1", "placement": "auto"}, "placement='auto', but schedule zb-h1 needs a placement"),
    ],
)
def test_searches_that_cannot_be_are_refused(case: Case, options: dict[str, object], words: str) -> None:
    with pytest.raises(zbfx.InputError, match=re.escape(words)):
        compiled(case, **options)
