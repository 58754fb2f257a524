"""Schedules by name, by placement and by search, compiled and run: the same numbers whatever the order."""

from __future__ import annotations

import pytest
import torch

import zbfx
from tests.models import Case, mlp
from tests.reference import Reference, differences, memory_differences
from zbfx.ir import Schedule
from zbfx.ordering import chunks_of, order_forward, place_stages

MICROBATCHES = 4


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
