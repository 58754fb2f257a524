"""Synchronous and post-validating steps: whatever the schedule, the placement and what a step finds, no rank waits for ever, the
state passes every rank once, and the weights change once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.passes.schedules import random_schedules
from tests.passes.test_communicate import costs_for, stages_of
from tests.passes.weighty import flagged, run_with_rendezvous, training
from zbfx.ir import Action, Course, Program, Schedule
from zbfx.passes.course import chain_of, post_validation, synchronous
from zbfx.passes.order_fixed import order_fixed
from zbfx.programs import make_programs

STEPS: tuple[tuple[str, ...], ...] = (  # flags of steps that follow one another; after all but the last two the next is ahead
    (),
    ("ahead",),
    ("ahead", "wrong"),
    ("ahead",),
    ("ahead", "wrong", "cautious"),
    ("cautious",),
    (),
    ("ahead", "cautious"),
)


def no_stream(_: int) -> Schedule:
    raise AssertionError("only 2bw repeats its schedule")


def programs_for(schedule: Schedule, weights: str, *, checked: bool, hop: float = 0.1) -> tuple[Course, tuple[Program, ...]]:
    stages, costs = stages_of(schedule.num_stages), costs_for(schedule, hop=hop)
    return make_programs(schedule, no_stream, stages, costs, training(weights, checked=checked), {})


def steps_of(program: Program, steps: Sequence[Sequence[str]]) -> list[object]:
    return [i for flags in steps for i in flagged(program.instrs, *flags)]


@settings(max_examples=10)
@given(st.data())
def test_any_schedule_runs_in_any_mode(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, 5))
    schedule = data.draw(random_schedules(num_stages, data.draw(st.integers(1, min(4, num_stages)))))
    weights, checked = data.draw(st.sampled_from(["synchronous", "post-validation"])), data.draw(st.booleans())
    course, programs = programs_for(schedule, weights, checked=checked, hop=data.draw(st.sampled_from([0.0, 0.1, 3.0])))
    late = weights == "post-validation" and checked
    steps = STEPS if late else ((), ())
    assert run_with_rendezvous([steps_of(p, steps) for p in programs]) == ""
    if late:
        flushed = [[*steps_of(p, STEPS[:2]), *p.flush] for p in programs]
        assert run_with_rendezvous(flushed) == ""
    for p in programs:
        _check_once(p, schedule, late=late, checked=checked)
    assert [a.action for a in course.timeline.spans[0] if a.action.kind in "FBW"] == list(schedule.ranks[0]) or "BW" in str(
        schedule.ranks[0]
    )


def _check_once(program: Program, schedule: Schedule, *, late: bool, checked: bool) -> None:
    """In every kind of step: one report, one measure, one update; the state learnt as often as it should be."""
    for flags in STEPS if late else [()]:
        verbs = [i.verb for i in flagged(program.instrs, *flags)]
        again = "wrong" in flags
        assert (verbs.count("report"), verbs.count("measure"), verbs.count("update")) == (1, 1, 1)
        learnt = ("ahead" in flags) + ("cautious" in flags) if late else int(checked)
        assert verbs.count("learn") == learnt
        stages = stages_of(schedule.num_stages)
        own = [a for a in schedule.ranks[program.rank] for letter in a.kind if getattr(stages[a.stage], letter) is not None]
        computes = verbs.count("compute")
        assert computes >= len(own) if again else computes == len(own)


def test_what_runs_again_is_what_used_the_weights() -> None:
    """The forwards before the validation, with their sends; nothing of the chain's end, which knew."""
    _, programs = programs_for(order_fixed("zb-h2", (0, 1, 2, 3), 8), "post-validation", checked=True)
    for p in programs:
        plain = [i for i in flagged(p.instrs, "ahead") if i.verb == "compute"]
        learns = next(n for n, i in enumerate(p.instrs) if i.verb == "learn" and i.when == "ahead")
        before = [str(i.action) for i in p.instrs[:learns] if i.verb == "compute" and not i.when]
        again = [str(i.action) for i in p.instrs if i.verb == "compute" and i.when == "wrong"]
        assert again == before and all(name[1] == "F" for name in again)
        assert bool(again) == (p.rank != 3)
        assert len([i for i in flagged(p.instrs, "ahead", "wrong") if i.verb == "compute"]) == len(plain) + len(again)


@pytest.mark.parametrize(
    "name, placement", [("gpipe", (0, 1, 2, 3)), ("zb-v", (0, 1, 1, 0)), ("gpipe", (2, 0, 1)), ("1f1b", (0,))]
)
def test_the_state_passes_along_first_stages(name: str, placement: tuple[int, ...]) -> None:
    schedule = order_fixed(name, placement, 4)
    chain = chain_of(schedule)
    assert [placement.index(r) for r in chain] == sorted(placement.index(r) for r in chain)
    for course in (synchronous(schedule, costs_for(schedule), checked=True), post_validation(schedule, costs_for(schedule))):
        for a, b in pairwise(chain):
            assert course.feeds[Action(a, "S", 0)] == (Action(b, "S", 0),)
            assert course.feeds[Action(b, "V", 0)] == (Action(a, "V", 0),)
        last = placement[-1]
        assert set(course.feeds.get(Action(last, "L", 0), ())) == {Action(r, "L", 0) for r in chain if r != last}


def test_unchecked_steps_exchange_no_state() -> None:
    for weights in ("synchronous", "post-validation"):
        _, programs = programs_for(order_fixed("zb-h1", (0, 1), 4), weights, checked=False)
        assert not any(i.action.kind in "SV" and i.verb in ("send", "recv") for p in programs for i in p.instrs)
        assert not any(p.flush for p in programs)
