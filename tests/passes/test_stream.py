"""2BW's stream of steps: laid out from named schedules, folded into start, body and end, proven on what runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.passes.schedules import random_schedules
from tests.passes.test_communicate import costs_for, stages_of
from tests.passes.weighty import run_with_rendezvous, training
from zbfx.errors import ScheduleError
from zbfx.ir import Program, Schedule
from zbfx.passes.fold import unfolded
from zbfx.passes.order_fixed import block_placement, order_fixed
from zbfx.passes.stream import STEPS, stream
from zbfx.programs import make_programs

V = {"zb-v", "v-half", "v-min"}


def placement_of(name: str, ranks: int) -> tuple[int, ...]:
    return (*range(ranks), *reversed(range(ranks))) if name in V else block_placement(ranks, ranks)


def programs_for(name: str, ranks: int, m: int, *, checked: bool = False, hop: float = 0.1) -> tuple[Program, ...]:
    place = placement_of(name, ranks)

    def order(n: int) -> Schedule:
        return order_fixed(name, place, n, costs=costs_for(Schedule(place, ((),) * ranks)))

    schedule, stages = order(m), stages_of(len(place))
    return make_programs(schedule, order, stages, costs_for(schedule, hop=hop), training("2bw", checked=checked), {})[1]


@settings(max_examples=8)
@given(st.data())
def test_a_stream_is_refused_or_runs(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["1f1b", "zb-h1", "zb-h2", *sorted(V)]))
    ranks, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    checked, hop = data.draw(st.booleans()), data.draw(st.sampled_from([0.0, 0.1, 3.0]))
    try:
        programs = programs_for(name, ranks, m, checked=checked, hop=hop)
    except ScheduleError as error:
        assert "2bw" in str(error)
        return
    for times in (0, 1, 5):
        unrolled, ends = unfolded(programs, times)
        assert run_with_rendezvous([p.instrs for p in unrolled], ends) == ""
    for p in programs:
        _check_step(p, m, checked=checked)


def _check_step(p: Program, m: int, *, checked: bool) -> None:
    """The body does a step's work once, of its own microbatches and of the step before's; start and end make a whole."""
    computes = [(i.action.stage, i.action.kind, i.action.mb) for i in p.body if i.verb == "compute"]
    assert len(set(computes)) == len(computes) and len(computes) % m == 0
    assert sorted(computes) == sorted(
        (i.action.stage, i.action.kind, i.action.mb) for part in (p.instrs, p.flush) for i in part if i.verb == "compute"
    )
    verbs = [i.verb for i in p.body]
    assert (verbs.count("update"), verbs.count("report")) == (1, 1)
    assert (verbs.count("measure"), verbs.count("learn")) == ((1, 1) if checked else (0, 0))
    assert all(i.back in (0, 1) for i in p.body) and not any(i.back for i in (*p.instrs, *p.flush))


@settings(max_examples=8)
@given(st.sampled_from(["1f1b", "zb-h1", "zb-v"]), st.integers(1, 4), st.integers(0, 4), st.booleans())
def test_two_versions_suffice(name: str, ranks: int, more: int, checked: bool) -> None:
    """At every F and B, the version that its step uses is one of the two newest: a step's update comes after all of its B."""
    for p in programs_for(name, ranks, 2 * ranks + more, checked=checked):
        (unrolled,), (ends,) = unfolded([p], 4)
        updates, begun = 0, 1
        for n, i in enumerate(unrolled.instrs):
            begun += sum(n == end for end in ends[:-1])
            if i.verb == "compute" and i.action.kind in ("F", "B", "BW"):
                used = max(begun - 1 - _back(p, n, ends) - 1, 0)
                assert updates - 1 <= used <= updates, (str(i.action), used, updates)
            updates += i.verb == "update"
        assert updates == 5


def _back(p: Program, at: int, ends: list[int]) -> int:
    """How many steps before the last that has begun an instruction's microbatch belongs."""
    if at >= ends[-1]:
        return 0
    step = sum(at >= end for end in ends)
    part = p.instrs if not step else p.body
    return part[at - ([0, *ends][step])].back


# ---------------------------------------------------------------- refused


def refusal(name: str, ranks: int, m: int) -> str:
    with pytest.raises(ScheduleError) as caught:
        programs_for(name, ranks, m)
    return str(caught.value)


def test_too_few_microbatches_are_refused() -> None:
    for name, ranks, m in (("1f1b", 4, 3), ("zb-h1", 4, 2), ("zb-h2", 4, 4)):
        text = refusal(name, ranks, m)
        assert "2bw keeps two versions of the weights" in text and f"microbatches={m}" in text, text
    assert programs_for("1f1b", 4, 4) and programs_for("zb-h1", 4, 4)


def test_orders_that_flush_are_refused() -> None:
    assert "gpipe with 4 microbatches does not on rank 0: use 1f1b, zb-h1 or zb-v" in refusal("gpipe", 2, 4)


@settings(max_examples=10)
@given(st.data())
def test_an_order_without_pattern_is_refused(data: st.DataObject) -> None:
    """Random orders repeat nothing (of one microbatch a step, nearly never)."""
    schedule = data.draw(random_schedules(2, 2, 4).filter(lambda s: s.microbatches > 1))
    costs = costs_for(schedule)

    def order(n: int) -> Schedule:
        return order_fixed("gpipe", (0, 1), n) if n != schedule.microbatches else schedule

    with pytest.raises(ScheduleError, match="2bw"):
        stream(order, schedule.microbatches, costs, checked=False)


def test_the_layout_is_of_several_steps() -> None:
    schedule = order_fixed("1f1b", (0, 1), 4)
    laid = stream(lambda n: order_fixed("1f1b", (0, 1), n), 4, costs_for(schedule), checked=True)
    assert [len(at) for at in laid.begins] == [STEPS + 1] * 2 and laid.begins[0][0] == 0
    kinds = [span.action.kind for span in laid.course.timeline.spans[0]]
    assert {k: kinds.count(k) for k in "SVUL"} == dict.fromkeys("SVUL", STEPS)
    assert kinds.count("F") == 4 * STEPS and laid.course.period == pytest.approx(4 * 3, abs=0.5)


# ---------------------------------------------------------------- the text


def lines_of(program: Program) -> list[str]:
    lines = [f"rank {program.rank}"]
    parts: dict[str, Any] = {"start" if program.body else "step": program.instrs, "body": program.body, "end": program.flush}
    for name, instrs in parts.items():
        lines += [f"  {name}:"] if instrs else []
        for i in instrs:
            peer = "" if i.peer is None else f" rank {i.peer}"
            when = f" if {i.when}" if i.when else ""
            back = " (of the step before)" if i.back else ""
            values = f": {', '.join(i.reads)} -> {', '.join(i.writes)}" if i.reads or i.writes else ""
            lines.append(f"    {i.verb} {i.action}{peer}{values}{when}{back}")
    return lines


@pytest.mark.parametrize("weights", ["synchronous", "post-validation", "2bw"])
def test_text_of_the_programs(weights: str, golden: Callable[..., None]) -> None:
    """What each rank does, checked, with 1f1b and four microbatches on two ranks."""

    def order(n: int) -> Schedule:
        return order_fixed("1f1b", (0, 1), n)

    schedule = order(4)
    programs = make_programs(schedule, order, stages_of(2), costs_for(schedule), training(weights, checked=True), {})[1]
    golden("\n".join(line for p in programs for line in lines_of(p)))
