"""What people look at of weights in time: steps one after another, with updates and validations, and what each mode holds.

Each function gives lines of text, the grid of a timeline first, as `view_schedule` draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from zbfx.errors import InputError
from zbfx.ir import CostModel, Course, Program, Schedule, Timeline
from zbfx.passes.course import post_validation, several, synchronous
from zbfx.passes.order_fixed import FIXED, order_fixed
from zbfx.passes.simulate import bubble
from zbfx.passes.stream import Stream, stream
from zbfx.text import format_bytes
from zbfx.view_schedule import format_seconds, timeline_grid

SHOWN = 2  # steps one after another
SHOWN_OF_STREAM = 3
Parts = list[Text | Table | str]


def weights_view(
    weights: str, schedule: Schedule, costs: CostModel, *, checked: bool, width: int, tied: Sequence[Sequence[int]] = ()
) -> Parts:
    """The grid of a few steps, and what there is to say of them. Raises InputError, ScheduleError where 2bw cannot be."""
    if weights == "2bw":
        laid = stream(repeating(schedule, costs), schedule.microbatches, costs, checked=checked, tied=tied)
        return [*_of_stream(laid, costs, width), _compared(laid.course.period, schedule, costs, checked)]
    if weights == "post-validation" and checked:
        course = post_validation(schedule, costs)
        return [*_of_steps(course, costs, width), *_validation(course, costs), _compared(course.period, schedule, costs, checked)]
    course = synchronous(schedule, costs, checked=checked)
    return [*_of_steps(course, costs, width), _plain(course, weights, checked)]


def repeating(schedule: Schedule, costs: CostModel) -> Callable[[int], Schedule]:
    """The named schedule for other numbers of microbatches. Raises InputError where it is not one by name."""
    free = replace(costs, limit=(None,) * len(costs.limit))
    named = schedule.name in FIXED and order_fixed(schedule.name, schedule.placement, schedule.microbatches, costs=free)
    if not named or named.ranks != schedule.ranks:
        raise InputError(f"2bw makes one stream of all steps, from a schedule by name; {schedule.name!r} is none: take '1f1b'")
    return lambda n: order_fixed(schedule.name, schedule.placement, n, costs=free)


def resident_table(rows: Mapping[int, Mapping[str, int]], versions: int) -> Table:
    """Bytes that each rank holds from step to step, by name. versions: how many of the trained weights."""
    shown = [n for n in next(iter(rows.values())) if n in ("parameters", "gradients") or any(row[n] for row in rows.values())]
    titles = {"parameters": f"parameters, {versions} versions" if versions > 1 else "parameters", "state": "optimizer state"}
    table = Table(pad_edge=False, box=SIMPLE_HEAD)
    for name in ("rank", *[{"others": "buffers", **titles}.get(n, n) for n in shown], "resident"):
        table.add_column(name, justify="right")
    for rank, row in rows.items():
        table.add_row(str(rank), *[format_bytes(row[n]) if row[n] else "-" for n in shown], format_bytes(sum(row.values())))
    return table


def programs_line(programs: Sequence[Program]) -> str:
    """How long the programs are where a step is more than one text."""
    first = programs[0]
    if first.body:
        return (
            f"rank 0's program: {len(first.instrs)} instructions begin the stream, {len(first.body)} are a step of it, "
            f"{len(first.flush)} end it (pipe.flush())"
        )
    if first.flush:
        return (
            f"rank 0's program: {len(first.instrs)} instructions, {len(first.flush)} that validate the last step (pipe.flush())"
        )
    return f"rank 0's program: {len(first.instrs)} instructions, and none to flush"


# ---------------------------------------------------------------- behind it


def _of_steps(course: Course, costs: CostModel, width: int) -> Parts:
    return [f"{SHOWN} steps, one after another:", timeline_grid(several(course, costs, SHOWN), width=width)]


def _validation(course: Course, costs: CostModel) -> list[str]:
    again = [
        sum(s.end - s.start for s in [s for s in spans if s.action.kind == "F"][:n])
        for spans, n in zip(course.timeline.spans, course.repeated, strict=True)
    ]
    counts = ", ".join(f"rank {r} after {n} F" for r, n in enumerate(course.repeated))
    return [
        f"validation: {counts}",
        f"rollback: a rank whose step was wrong steps again from the weights before; then those F run again, "
        f"{format_seconds(max(again))} at most",
    ]


def _compared(period: float, schedule: Schedule, costs: CostModel, checked: bool) -> str:
    with_barrier = synchronous(schedule, costs, checked=True).period
    work = _work(schedule, costs)
    return (
        f"period {format_seconds(period)} from step to step, bubble {bubble(period, work):.2%}; synchronous "
        f"{format_seconds(with_barrier)}, bubble {bubble(with_barrier, work):.2%}"
    )


def _plain(course: Course, weights: str, checked: bool) -> str:
    work = max(sum(s.end - s.start for s in spans) for spans in course.timeline.spans)
    why = "all ranks wait for the state of all gradients" if checked else "no clipping, no loss scale: no rank waits for another"
    if weights == "post-validation":
        why += ", and there is nothing to validate"
    return f"period {format_seconds(course.period)} from step to step, bubble {bubble(course.period, work):.2%}; {why}"


def _work(schedule: Schedule, costs: CostModel) -> float:
    spans = synchronous(schedule, costs, checked=False).timeline.spans
    return max(sum(s.end - s.start for s in rank) for rank in spans)


def _of_stream(laid: Stream, costs: CostModel, width: int) -> Parts:
    timeline = laid.timeline
    cut = tuple(spans[: at[SHOWN_OF_STREAM]] for spans, at in zip(timeline.spans, laid.begins, strict=True))
    end = max(s.end for spans in cut for s in spans)
    shown = Timeline(cut, end, end, 0.0, 0.0, timeline.peak)
    table = Table(pad_edge=False, box=SIMPLE_HEAD)
    for name in ("step", "microbatches", "F and B use version", "U makes", "in the place of"):
        table.add_column(name, justify="right")
    m = laid.microbatches
    for t in range(SHOWN_OF_STREAM):
        old = "-" if t == 0 else f"version {t - 1}"
        table.add_row(str(t), f"{t * m} to {(t + 1) * m - 1}", str(max(t - 1, 0)), f"version {t + 1}", old)
    title = f"the stream's first {SHOWN_OF_STREAM} steps; two versions of the weights are alive:"
    return [title, timeline_grid(shown, width=width), table]
