"""Which rank holds which stage, and in what order it works: fixed schedules by name, a given one, or the searches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zbfx import errors
from zbfx.errors import InputError, MemoryBudgetError, ZbfxError
from zbfx.ir import Action, CostModel, Schedule, Solution
from zbfx.passes.order_any import order_any, share_limits
from zbfx.passes.order_bounds import Bounds
from zbfx.passes.order_fixed import block_placement, order_fixed
from zbfx.passes.order_places import candidate_placements
from zbfx.passes.order_search import OBJECTIVES, solution_of
from zbfx.passes.placements import NAMES, build_placement
from zbfx.text import costs_to_dict, schedule_from_json, solution_to_json
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
# Schedules that are searched for the costs; these two are "auto" within 1 or 2 times p * bytes of F of the largest rank.
_SHARES = {"zb-1p": 1.0, "zb-2p": 2.0}
SEARCHED = ("auto", "exact", *_SHARES)


@dataclass(frozen=True, slots=True)
class Search:
    """How to search. objective: span or makespan; w_parts: of each W; seconds: the budget (None: by size; for exact 30).

    agree(question, answer): in a process group, the answer of one process for all.
    """

    objective: str = "makespan"
    w_parts: int = 1
    seconds: float | None = None
    agree: Callable[[str, Callable[[], str]], str] | None = field(default=None, compare=False)


def check_search(search: Search, schedule: str | Schedule, placement: str | Sequence[int] | None) -> None:
    """Raises InputError for what no search, or not this schedule's, can do."""
    if search.objective not in OBJECTIVES:
        raise InputError(f"objective={search.objective!r} must be one of {', '.join(OBJECTIVES)}")
    if not isinstance(search.w_parts, int) or search.w_parts < 1:
        raise InputError(f"w_parts={search.w_parts!r}: a W has at least 1 part")
    if search.seconds is not None and not search.seconds > 0:
        raise InputError(f"seconds={search.seconds!r}: a search needs more than 0")
    name = schedule if isinstance(schedule, str) else "one of your own"
    if search.w_parts > 1 and name not in ("auto", *_SHARES):
        raise InputError(f"w_parts={search.w_parts}, but schedule {name} takes each W as it is: schedule='auto' uses parts")
    if search.seconds is not None and name not in SEARCHED:
        raise InputError(f"seconds={search.seconds}, but schedule {name} is not searched: that is {', '.join(SEARCHED)}")
    if placement == "auto" and name not in ("auto", "exact"):
        raise InputError(f"placement='auto', but schedule {name} needs a placement: schedule='auto' or 'exact' searches one")


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
    schedule: str | Schedule, placement: Sequence[int], microbatches: int, costs: CostModel, search: Search
) -> tuple[Schedule, Solution | None]:
    """The verified order of all actions; where it was searched, with its bound. InputError, ScheduleError, MemoryBudgetError."""
    ranks, stages = len(costs.limit), len(costs.stages)
    if isinstance(schedule, Schedule):
        if schedule.num_stages != stages or len(schedule.ranks) != ranks:
            raise InputError(
                f"the schedule is for {schedule.num_stages} stages on {len(schedule.ranks)} ranks, "
                f"compile was asked for {stages} stages on {ranks} ranks"
            )
        if schedule.microbatches != microbatches:
            raise InputError(f"the schedule runs {schedule.microbatches} microbatches, compile was asked for {microbatches}")
        return verify_schedule(schedule), None
    if schedule in SEARCHED:
        solution = _searched(schedule, placement, microbatches, costs, search)
        return verify_schedule(solution.schedule), solution
    return verify_schedule(order_fixed(schedule, placement, microbatches, costs=costs)), None


def order_places(
    schedule: str, num_stages: int, ranks: int, microbatches: int, costs_for: Callable[[Sequence[int]], CostModel], search: Search
) -> Solution:
    """The best schedule over all placements that suit; `why` says what each gave. costs_for(placement): limits depend on it."""
    places = candidate_placements(num_stages, ranks)
    if not places:
        raise InputError(f"{num_stages=} cannot fill {ranks=}: every rank holds at least one stage")
    costs: dict[str, CostModel] = {}
    refused: dict[str, InputError | MemoryBudgetError] = {}
    for name, place in places.items():
        try:
            costs[name] = costs_for(place)
        except InputError as error:  # parameters alone are over the limit
            refused[name] = error
    if not refused and len({c.limit for c in costs.values()}) == 1:
        return _searched(schedule, None, microbatches, costs.popitem()[1], search)
    found: dict[str, Solution] = {}
    for name in costs:
        try:
            found[name] = _searched(schedule, places[name], microbatches, costs[name], search)
        except MemoryBudgetError as error:
            refused[name] = error
    if not found:
        raise next(iter(refused.values()))
    ranking = sorted(found, key=lambda n: getattr(found[n].timeline, search.objective))
    times = ", ".join(f"{n} {getattr(found[n].timeline, search.objective):.4g} s" for n in ranking)
    over = f"; over the limit: {', '.join(refused)}" if refused else ""
    best = found[ranking[0]]
    return replace(best, why=f"placement {ranking[0]}: {search.objective} {times}{over}; {best.why}")


def _searched(schedule: str, placement: Sequence[int] | None, microbatches: int, costs: CostModel, search: Search) -> Solution:
    method = schedule
    if schedule in _SHARES and placement is not None:
        # Of activations alone: what temporaries add shows when the program is laid out.
        plain = replace(costs, stages=tuple(replace(c, peak_F=0, peak_B=0, peak_W=0) for c in costs.stages))
        shares = share_limits(placement, plain, _SHARES[schedule])
        limit = tuple(s if b is None else min(b, s) for b, s in zip(costs.limit, shares, strict=True))
        method, costs = "auto", replace(plain, limit=limit)
    options: dict[str, Any] = {"objective": search.objective, "w_parts": search.w_parts, "seconds": search.seconds}

    def answer() -> str:
        """For other processes: the solution, or the error, as text."""
        try:
            return solution_to_json(order_any(method, placement, microbatches, costs, **options))
        except ZbfxError as error:
            return json.dumps({"error": type(error).__name__, "text": str(error)})

    if search.agree is None:
        solution = order_any(method, placement, microbatches, costs, **options)
    else:
        place = None if placement is None else list(placement)
        question = json.dumps([method, place, microbatches, options, costs_to_dict(costs)])
        solution = _read_solution(search.agree(question, answer), costs)
    return replace(solution, schedule=replace(solution.schedule, name=schedule))


def _read_solution(text: str, costs: CostModel) -> Solution:
    fields = json.loads(text)
    if "error" in fields:
        raise getattr(errors, fields["error"])(fields["text"])
    bounds = Bounds(fields["lower_bound"]["span"], fields["lower_bound"]["makespan"])
    schedule = schedule_from_json(text)
    return solution_of(schedule, costs, bounds, fields["objective"], fields["w_parts"], fields["seconds"], fields["why"])


def order_forward(placement: Sequence[int], microbatches: int, ranks: int) -> Schedule:
    """Forward only: every rank runs its stages microbatch by microbatch."""
    own = [[k for k, r in enumerate(placement) if r == rank] for rank in range(ranks)]
    words = tuple(tuple(Action(k, "F", mb) for mb in range(microbatches) for k in stages) for stages in own)
    return Schedule(tuple(placement), words, "forward")
