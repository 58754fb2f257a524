"""A schedule and how weights change -> the course of a step and every rank's instructions, proven and with their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zbfx.errors import ScheduleError, VerifyError
from zbfx.ir import Action, CostModel, Course, Program, Schedule, Stage, Value
from zbfx.passes.allocate import Messages, allocate, allocate_stream, message_values
from zbfx.passes.communicate import communicate, validation
from zbfx.passes.course import bare, post_validation, synchronous
from zbfx.passes.fold import fold, unfolded
from zbfx.passes.liveness import Profile
from zbfx.passes.simulate import simulate
from zbfx.passes.stream import stream
from zbfx.training import Training
from zbfx.verify_program import verify_programs, verify_stream


def make_programs(
    schedule: Schedule,
    repeated: Callable[[int], Schedule],
    stages: Sequence[Stage],
    costs: CostModel,
    training: Training | None,
    profiles: dict[int, Profile],
) -> tuple[Course, tuple[Program, ...]]:
    """repeated(n): the same kind of schedule for n microbatches, of which 2BW makes its stream. Raises ScheduleError."""
    homes = tied_ranks(stages, schedule.placement)
    messages = messages_of(stages, homes, training)
    if training is not None and training.weights == "2bw":
        return _streams(schedule, repeated, stages, costs, training, profiles, messages, homes)
    course = _course(schedule, costs, training)
    shared = sorted({r for ranks in homes.values() for r in ranks}) if training is not None else []
    instrs = communicate(course, stages, shared)
    programs = tuple(allocate(r, i, stages, profiles, messages, validation(i)) for r, i in enumerate(instrs))
    verify_programs(programs)
    return course, programs


def messages_of(stages: Sequence[Stage], homes: dict[str, list[int]], training: Training | None) -> Messages:
    """What travels to an action, tied gradients included: (consumer) -> types. homes: as tied_ranks gives them."""

    def values(consumer: Action) -> tuple[Value, ...]:
        if consumer.kind != "T" or consumer.part is None:
            return message_values(consumer, stages)
        shared = [name for name, ranks in homes.items() if consumer.stage in ranks and consumer.part in ranks]
        return tuple(_gradient(name, stages, training) for name in shared)

    return values


def tied_ranks(stages: Sequence[Stage], placement: Sequence[int]) -> dict[str, list[int]]:
    """The parameters that get gradients on more than one rank, in the order of their first stages, and those ranks, ascending."""
    users: dict[str, set[int]] = {}
    for stage in stages:
        for i in stage.gparams:
            users.setdefault(stage.names[i], set()).add(placement[stage.index])
    return {name: sorted(ranks) for name, ranks in users.items() if len(ranks) > 1}


def _gradient(name: str, stages: Sequence[Stage], training: Training | None) -> Value:
    """The type in which a parameter's gradient is added up."""
    stage = next(s for s in stages if name in s.names)
    value = stage.F.value(stage.F.takes["p"][stage.names.index(name)])
    return replace(value, dtype=value.dtype if training is None else training.master_dtype(value.dtype))


def _course(schedule: Schedule, costs: CostModel, training: Training | None) -> Course:
    """What a step does besides F, B and W: nothing where the user's own optimizer steps."""
    if training is None:
        return bare(schedule, simulate(schedule, costs))
    if training.validates:
        return post_validation(schedule, costs)
    return synchronous(schedule, costs, checked=training.checked)


def _streams(
    schedule: Schedule,
    repeated: Callable[[int], Schedule],
    stages: Sequence[Stage],
    costs: CostModel,
    training: Training,
    profiles: dict[int, Profile],
    messages: Messages,
    homes: dict[str, list[int]],
) -> tuple[Course, tuple[Program, ...]]:
    laid = stream(repeated, schedule.microbatches, costs, checked=training.checked, tied=[*homes.values()])
    parts = fold(laid, stages)
    programs = tuple(allocate_stream(r, p, stages, profiles, messages) for r, p in enumerate(parts))
    try:
        for times in (0, 1, 3):
            verify_stream(*unfolded(programs, times))
    except VerifyError as error:
        raise ScheduleError(
            f"2bw: {schedule.name} with {schedule.microbatches} microbatches a step cannot run as one stream of steps, each of "
            f"which ends before the next begins on another rank: use 1f1b, zb-h1 or zb-v.\n{error}"
        ) from error
    timeline = simulate(schedule, costs)
    return Course(schedule, timeline, laid.course.feeds, period=laid.course.period), programs
