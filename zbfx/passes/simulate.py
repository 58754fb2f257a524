"""Schedule + costs -> Timeline: when each action starts and ends, what the iteration costs, what each rank holds.

Semantics: a rank does its actions in order, one at a time; a message leaves when its producer has ended, takes `hop_seconds`
while compute goes on, and its consumer starts no earlier than it arrives. BW is one unit of B + W seconds whose gradient
leaves at its end; a part of a W takes its share of the seconds and bytes. Time grows linearly with the number of actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zbfx.errors import InputError, MemoryBudgetError
from zbfx.ir import Action, CostModel, Schedule, Span, Timeline
from zbfx.text import format_bytes
from zbfx.verify import show_around, verify_schedule

_LONGEST_WARM_UP = 64  # iterations after which a period that has not settled is averaged


def simulate(schedule: Schedule, costs: CostModel, *, serialize_links: bool = False) -> Timeline:
    """A verified schedule -> its Timeline, from 0 seconds on. `serialize_links`: a link carries one message at a time."""
    check_costs(schedule, costs)
    words = _compile(schedule, costs)
    starts = _run(schedule, words, [0.0] * len(schedule.ranks), serialize_links)
    spans = tuple(
        tuple(Span(a, s, s + step.seconds) for a, s, step in zip(actions, begun, word, strict=True))
        for actions, begun, word in zip(schedule.ranks, starts, words, strict=True)
    )
    return _timeline(schedule, costs, spans)


def steady_period(schedule: Schedule, costs: CostModel, *, serialize_links: bool = False) -> float:
    """Seconds per iteration when iterations follow one another on every rank without a barrier (at most `span`)."""
    check_costs(schedule, costs)
    words = _compile(schedule, costs)
    free, history = [0.0] * len(schedule.ranks), [0.0]
    for _ in range(_LONGEST_WARM_UP):
        starts = _run(schedule, words, free, serialize_links)
        shift = [s[-1] + w[-1].seconds if s else f for s, w, f in zip(starts, words, free, strict=True)]
        steps = [b - a for a, b in zip(free, shift, strict=True)]
        free = shift
        history.append(max(free))
        if max(steps) - min(steps) <= 1e-9 * max(max(steps), 1.0):
            return max(steps)
    half = len(history) // 2
    return (history[-1] - history[half]) / (len(history) - 1 - half)


def memory_curve(schedule: Schedule, costs: CostModel, rank: int) -> tuple[int, ...]:
    """Bytes that the rank holds at the end of each of its actions."""
    totals = count_parts(schedule)
    return tuple(accumulate(_action_bytes(a, costs, totals) for a in schedule.ranks[rank]))


def highest_bytes(schedule: Schedule, costs: CostModel, rank: int) -> list[int]:
    """The most bytes that the rank holds during each of its actions, their temporaries included."""
    held = (0, *memory_curve(schedule, costs, rank))
    actions = schedule.ranks[rank]
    return [max(after, before + _temporary(a, costs)) for a, (before, after) in zip(actions, pairwise(held), strict=True)]


def refuse_over_budget(schedule: Schedule, costs: CostModel) -> None:
    """Raises MemoryBudgetError where a rank would hold more than its limit, temporaries of the running action included."""
    for rank, limit in enumerate(costs.limit):
        if limit is None or rank >= len(schedule.ranks):
            continue
        highest = highest_bytes(schedule, costs, rank)
        worst = max(highest, default=0)
        if worst > limit:
            index = next(i for i, b in enumerate(highest) if b > limit)
            raise MemoryBudgetError(
                f"rank {rank} would hold {worst} bytes ({format_bytes(worst)}), {format_bytes(worst - limit)} over its limit of"
                f" {limit} bytes ({format_bytes(limit)}); raise it, use more ranks, or let schedule='auto' search an order\n"
                + show_around(schedule, rank, index)
            )


def hop_seconds(costs: CostModel, stage: int, source: int, target: int) -> float:
    """Seconds of the message from `stage` (an activation) or to it (a gradient) across the cut behind it; 0 on one rank."""
    if source == target:
        return 0.0
    if not costs.links:
        return costs.comm[source][target]
    link = costs.links[source][target]
    return link.latency + costs.edge_bytes[stage] / link.bandwidth


def check_costs(schedule: Schedule, costs: CostModel) -> None:
    """Raises InputError unless the costs speak of this schedule's stages and ranks, with times that are times."""
    ranks = len(schedule.ranks)
    rows = [len(row) for row in costs.comm]
    if len(costs.stages) != schedule.num_stages or len(costs.limit) != ranks or rows != [ranks] * ranks:
        raise InputError(
            f"costs are for {len(costs.stages)} stages and {len(costs.limit)} ranks (comm {len(costs.comm)} rows),"
            f" the schedule has {schedule.num_stages} stages and {ranks} ranks"
        )
    if costs.links and (len(costs.links) != ranks or len(costs.edge_bytes) != schedule.num_stages - 1):
        raise InputError(
            f"links are for {len(costs.links)} ranks and {len(costs.edge_bytes)} edges between stages;"
            f" give one row per rank ({ranks}) and the bytes of each edge ({schedule.num_stages - 1})"
        )
    for stage, cost in enumerate(costs.stages):
        if not all(0 <= x < float("inf") for x in (cost.F, cost.B, cost.W)):
            raise InputError(f"stage {stage}: times must be finite and not negative, found F={cost.F}, B={cost.B}, W={cost.W}")
    if not all(0 <= x < float("inf") for row in costs.comm for x in row):
        raise InputError(f"comm must be finite and not negative, found {costs.comm}")


# ---------------------------------------------------------------- the engine


@dataclass(frozen=True, slots=True)
class _Step:
    """An action for the engine: seconds, the message it waits for, the one it sends (-1: none), its hop and target rank."""

    seconds: float
    waits: int
    sends: int
    hop: float
    target: int


def _compile(schedule: Schedule, costs: CostModel) -> list[list[_Step]]:
    """Messages are numbered by their producer: F of (stage, mb) is stage*m + mb, B comes after all Fs.

    What an action needs from its own rank is there by order, so only messages between ranks are waited for.
    """
    totals, m, home = count_parts(schedule), schedule.microbatches, schedule.placement
    return [[_step(a, rank, m, home, costs, totals) for a in actions] for rank, actions in enumerate(schedule.ranks)]


def _step(a: Action, rank: int, m: int, home: Sequence[int], costs: CostModel, totals: dict[int, int]) -> _Step:
    seconds = action_seconds(a, costs, totals)
    if a.kind == "W":
        return _Step(seconds, -1, -1, 0.0, rank)
    ahead, first = (1, 0) if a.kind == "F" else (-1, len(home) * m)
    number = first + a.stage * m + a.mb
    source, target = (home[s] if 0 <= s < len(home) else rank for s in (a.stage - ahead, a.stage + ahead))
    hop = hop_seconds(costs, min(a.stage, a.stage + ahead), rank, target)
    return _Step(seconds, -1 if source == rank else number - ahead * m, -1 if target == rank else number, hop, target)


def _run(schedule: Schedule, words: Sequence[Sequence[_Step]], free: Sequence[float], serialize_links: bool) -> list[list[float]]:
    """Start of each action; `free[r]` is when rank r can begin."""
    arrived: dict[int, float] = {}
    link_free = [[0.0] * len(words) for _ in words]
    clock = list(free)
    starts: list[list[float]] = [[] for _ in words]
    waiting: dict[int, int] = {}
    ready = list(range(len(words) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        now, word, begun, links = clock[rank], words[rank], starts[rank], link_free[rank]
        while len(begun) < len(word):
            step = word[len(begun)]
            if step.waits >= 0:
                arrival = arrived.get(step.waits)
                if arrival is None:
                    waiting[step.waits] = rank
                    break
                now = max(now, arrival)
            begun.append(now)
            now += step.seconds
            if step.sends >= 0:
                leaves = max(now, links[step.target]) if serialize_links else now
                arrived[step.sends] = links[step.target] = leaves + step.hop
                if step.sends in waiting:
                    ready.append(waiting.pop(step.sends))
        clock[rank] = now
    if waiting:
        verify_schedule(schedule)  # raises, and names the circle of waits
    return starts


def _timeline(schedule: Schedule, costs: CostModel, spans: tuple[tuple[Span, ...], ...]) -> Timeline:
    busy = [rank for rank in spans if rank]
    first = min((rank[0].start for rank in busy), default=0.0)
    span = max((rank[-1].end - rank[0].start for rank in busy), default=0.0)
    makespan = max((rank[-1].end for rank in busy), default=0.0) - first
    work = max((sum(s.end - s.start for s in rank) for rank in busy), default=0.0)
    peak = tuple(max(memory_curve(schedule, costs, r), default=0) for r in range(len(spans)))
    return Timeline(spans, span, makespan, bubble(span, work), bubble(makespan, work), peak)


def bubble(cost: float, work: float) -> float:
    """The idle share of the iteration: (cost - busiest rank's work) / cost, never below 0 for rounding."""
    return max(0.0, (cost - work) / cost) if cost > 0 else 0.0


def count_parts(schedule: Schedule) -> dict[int, int]:
    """Parts of a W per stage; a stage absent here runs its Ws whole."""
    totals: dict[int, int] = {}
    for rank in schedule.ranks:
        for a in rank:
            if a.part is not None:
                totals[a.stage] = max(totals.get(a.stage, 1), a.part + 1)
    return totals


def action_seconds(a: Action, costs: CostModel, totals: dict[int, int]) -> float:
    """Seconds of an action of a schedule; `totals` as from `count_parts`."""
    cost = costs.stages[a.stage]
    if a.kind == "BW":
        return cost.B + cost.W
    seconds: float = getattr(cost, a.kind)
    return seconds if a.part is None else seconds / totals[a.stage]


def _action_bytes(a: Action, costs: CostModel, totals: dict[int, int]) -> int:
    cost = costs.stages[a.stage]
    if a.kind == "BW":
        return cost.bytes_B + cost.bytes_W
    change: int = getattr(cost, f"bytes_{a.kind}")
    if a.part is None:
        return change
    return change * (a.part + 1) // totals[a.stage] - change * a.part // totals[a.stage]


def _temporary(a: Action, costs: CostModel) -> int:
    cost = costs.stages[a.stage]
    if a.kind == "BW":
        return max(cost.peak_B, cost.bytes_B + cost.peak_W)
    temporary: int = getattr(cost, f"peak_{a.kind}")
    return temporary
