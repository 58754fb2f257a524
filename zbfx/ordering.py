"""Which rank holds which stage, and in what order it works: fixed schedules by name, a given one, or the search."""

from __future__ import annotations

from collections.abc import Sequence

from zbfx.errors import InputError
from zbfx.ir import Action, CostModel, Schedule
from zbfx.passes.order_any import order_any
from zbfx.passes.order_fixed import block_placement, order_fixed
from zbfx.passes.placements import NAMES, build_placement
from zbfx.verify import verify_schedule

# Schedules that are made for a placement of their own; all others take blocks of consecutive stages.
_PLACEMENT_OF = {
    "interleaved-1f1b": "interleaved",
    "interleaved-zb": "interleaved",
    "looped-bfs": "interleaved",
    "zb-v": "v",
    "v-half": "v",
    "v-min": "v",
    "dualpipe-v": "v",
}


def chunks_of(schedule: str | Schedule) -> int:
    """Stages a rank at least, for a schedule by name: 2 where ranks return to several stages."""
    return 2 if isinstance(schedule, str) and schedule in _PLACEMENT_OF else 1


def place_stages(placement: str | Sequence[int] | None, schedule: str | Schedule, num_stages: int, ranks: int) -> tuple[int, ...]:
    """placement[stage] -> rank: as given (a name or a list), as the schedule has it, or what the named schedule is made for.

    Raises InputError where stages, ranks and placement do not fit.
    """
    if placement is None:
        if isinstance(schedule, Schedule):
            placement = schedule.placement
        else:
            placement = _PLACEMENT_OF.get(schedule, "blocks")
    if placement in ("blocks", "linear"):
        return block_placement(num_stages, ranks)
    if isinstance(placement, str):
        if num_stages % ranks:
            raise InputError(f"placement={placement!r} needs num_stages to be a multiple of ranks, found {num_stages=}, {ranks=}")
        if placement not in NAMES:
            raise InputError(f"{placement=} is none of {', '.join(NAMES)}, or a list with the rank of each stage")
        return build_placement(placement, ranks, num_stages // ranks)
    given = tuple(placement)
    if len(given) != num_stages or sorted(set(given)) != list(range(ranks)):
        raise InputError(f"placement={list(given)}: give the rank, 0 to {ranks - 1}, of each of the {num_stages} stages")
    return given


def order(
    schedule: str | Schedule, placement: Sequence[int], microbatches: int, costs: CostModel, *, objective: str = "makespan"
) -> Schedule:
    """The verified order of all actions. Raises InputError, ScheduleError, MemoryBudgetError."""
    ranks, stages = len(costs.limit), len(costs.stages)
    if isinstance(schedule, Schedule):
        if schedule.num_stages != stages or len(schedule.ranks) != ranks:
            raise InputError(
                f"the schedule is for {schedule.num_stages} stages on {len(schedule.ranks)} ranks, "
                f"compile was asked for {stages} stages on {ranks} ranks"
            )
        if schedule.microbatches != microbatches:
            raise InputError(f"the schedule runs {schedule.microbatches} microbatches, compile was asked for {microbatches}")
    elif schedule == "auto":
        schedule = order_any("auto", placement, microbatches, costs, objective=objective).schedule
    else:
        schedule = order_fixed(schedule, placement, microbatches, costs=costs)
    return verify_schedule(schedule)


def order_forward(placement: Sequence[int], microbatches: int, ranks: int) -> Schedule:
    """Forward only: every rank runs its stages microbatch by microbatch."""
    own = [[k for k, r in enumerate(placement) if r == rank] for rank in range(ranks)]
    words = tuple(tuple(Action(k, "F", mb) for mb in range(microbatches) for k in stages) for stages in own)
    return Schedule(tuple(placement), words, "forward")
