"""Steps that never flush (PipeDream-2BW, section 3): the order of many steps as one stream, of which each step is a slice.

A named schedule is asked for the order of many steps' microbatches at once. From one step's first forward to the next one's
it repeats itself; that stretch is the body. The first step does of it what is its own, the end what is the last step's.
Weights change (U) as soon as a step's gradients are complete (G), tied ones are exchanged (T) and, where steps are clipped or
checked, the state of all is known (S, V); all of it in passing, at places where nobody waits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zbfx.errors import ScheduleError
from zbfx.ir import Action, Cost, CostModel, Course, Schedule, Timeline
from zbfx.passes.course import Feeds, chain_of, timed
from zbfx.verify import verify_schedule

_SLACK = 0.5  # of an action: by so much a message of the weights may be late, and still nobody waits for it
STEPS = 8  # of the stream that is laid out: enough for the middle ones to be alike
Orders = list[list[Action]]


@dataclass(frozen=True, slots=True)
class Stream:
    """A course of STEPS steps, numbered in unit time; timeline: with the real costs. Microbatch t * m + j is the j-th of step t;
    what comes once a step has the step's number.

    begins[r][t]: index in rank r's order at which step t begins; the last entry is where the end begins.
    """

    course: Course
    microbatches: int
    begins: tuple[tuple[int, ...], ...]
    timeline: Timeline


def stream(
    order: Callable[[int], Schedule],
    microbatches: int,
    costs: CostModel,
    *,
    checked: bool,
    tied: Sequence[Sequence[int]] = (),
    update: Sequence[float] = (),
) -> Stream:
    """order(n): the schedule of n microbatches. tied: per parameter that several ranks use, those ranks.

    Raises ScheduleError where the order does not repeat itself, or m is too small: weights of two versions do not suffice.
    """
    schedule, begins = _laid_out(order(STEPS * microbatches), microbatches)
    unit = replace(
        costs,
        stages=tuple(Cost(1.0, 1.0, 1.0) for _ in costs.stages),
        comm=tuple(tuple(0.0 for _ in row) for row in costs.comm),
        links=(),
        edge_bytes=(),
    )
    orders, begins, feeds = _with_updates(schedule, begins, microbatches, unit, checked, tied)
    numbering = timed(schedule, orders, unit, feeds)
    real = timed(schedule, orders, costs, feeds, update=update)
    period = _period(real, begins)
    return Stream(Course(schedule, numbering, feeds, period=period), microbatches, begins, real)


def _laid_out(raw: Schedule, m: int) -> tuple[Schedule, tuple[tuple[int, ...], ...]]:
    """The stream's order: of one step's slice, first what is its own, then all again and again, then what is the last one's."""
    orders: Orders = []
    begins = []
    for rank, actions in enumerate(raw.ranks):
        at = [next(i for i, a in enumerate(actions) if a.kind == "F" and a.mb >= t * m) for t in range(STEPS)]
        body, after = ([_moved(a, -t * m) for a in actions[at[t] : at[t + 1]]] for t in (2, 3))
        counts = {Counter((a.stage, letter) for a in body for letter in a.kind)[s, k] for s in _held(raw, rank) for k in "FBW"}
        if body != after or counts != {m}:
            raise ScheduleError(
                f"2bw needs an order that repeats itself every step; {raw.name} with {m} microbatches does not on rank {rank}: "
                "use 1f1b, zb-h1 or zb-v"
            )
        _refuse_old_weights(raw, rank, body, m)
        start, end = [a for a in body if a.mb >= 0], [a for a in body if a.mb < 0]
        begins.append((0, *(len(start) + t * len(body) for t in range(STEPS))))
        orders.append([*start, *(_moved(a, t * m) for t in range(1, STEPS) for a in body), *(_moved(a, STEPS * m) for a in end)])
    schedule = Schedule(raw.placement, tuple(tuple(o) for o in orders), raw.name)
    return verify_schedule(schedule), tuple(begins)


def _held(schedule: Schedule, rank: int) -> list[int]:
    return [k for k, home in enumerate(schedule.placement) if home == rank]


def _refuse_old_weights(schedule: Schedule, rank: int, body: Sequence[Action], m: int) -> None:
    """A backward of two steps ago would need a third version of the weights, and so may one whose microbatch's successor in the
    next step comes before it. Microbatches are counted from the body's step on.
    """
    at = {a: i for i, a in enumerate(body)}
    old = [a for a in body if a.mb < -m or (a.mb < 0 and at.get(Action(a.stage, "F", a.mb + m), len(body)) < at[a])]
    if old:
        raise ScheduleError(
            f"2bw keeps two versions of the weights, so a step needs at least as many microbatches as are under way; with "
            f"microbatches={m}, rank {rank} of {schedule.name} runs {old[0].kind} of a microbatch after {m} more have begun"
        )


def _moved(a: Action, by: int) -> Action:
    return replace(a, mb=a.mb + by)


def _with_updates(
    schedule: Schedule,
    begins: Sequence[Sequence[int]],
    m: int,
    unit: CostModel,
    checked: bool,
    tied: Sequence[Sequence[int]],
) -> tuple[Orders, tuple[tuple[int, ...], ...], Feeds]:
    """Puts L, G, T, S, V and U where what they wait for has been there for a while, in unit time, at the latest before the
    step after next.
    """
    bare = timed(schedule, schedule.ranks, unit, {})
    ranks = len(schedule.ranks)
    starts = [[s.start for s in spans] for spans in bare.spans]
    added: list[list[tuple[int, int, Action]]] = [[] for _ in range(ranks)]  # (before this index, number, action) of each rank
    feeds: Feeds = {}
    own = [_held(schedule, r) for r in range(ranks)]
    chain, last = chain_of(schedule), schedule.placement[-1]

    def put(rank: int, kind: str, step: int, time: float, least: int, part: int | None = None) -> tuple[int, float]:
        """The place of an action that can happen from `time` on, not before index `least`; and when it happens."""
        latest = begins[rank][step + 2] if step + 2 < len(begins[rank]) else len(starts[rank])
        at = min(max(least, bisect_left(starts[rank], time)), max(latest, least))
        added[rank].append((at, len(added[rank]), Action(rank, kind, step, part)))  # type: ignore[arg-type]
        ready = starts[rank][at - 1] if at else 0.0
        return at, max(time, ready)

    for t in range(STEPS):
        final = Action(schedule.num_stages - 1, "F", (t + 1) * m - 1)
        loss_at = schedule.ranks[last].index(final) + 1
        known = bare.spans[last][loss_at - 1].end
        put(last, "L", t, 0.0, loss_at)
        for r in range(ranks):
            if r != last:
                put(r, "L", t, known + _SLACK, begins[r][t])
        feeds[Action(last, "L", t)] = tuple(Action(r, "L", t) for r in range(ranks) if r != last)
        complete, at, final_g = {}, {}, {}
        for r, actions in enumerate(schedule.ranks):
            ends = [(1 + actions.index(w), s) for s in own[r] for w in _last_w(actions, s, (t + 1) * m - 1)]
            for at[r], stage in sorted(ends):
                put(r, "G", t, 0.0, at[r], stage)
                final_g[r] = Action(r, "G", t, stage)
            complete[r] = bare.spans[r][at[r] - 1].end
        for r in range(ranks):
            partners = sorted({q for group in tied if r in group for q in group} - {r})
            for q in partners:
                feeds[final_g[q]] = (*feeds.get(final_g[q], ()), Action(r, "T", t, q))
            times = {r: complete[r], **{q: complete[q] for q in partners}}
            for q in partners:
                at[r], _ = put(r, "T", t, times[q] + _SLACK, at[r], q)
            complete[r] = max(times.values())
        if checked:
            moment = 0.0
            for a in chain:
                moment = max(moment, complete[a])
                at[a], moment = put(a, "S", t, moment, at[a])
                moment += _SLACK
            moment -= _SLACK  # its end has the state already
            for a in reversed(chain):
                at[a], moment = put(a, "V", t, moment, at[a])
                moment += _SLACK
            feeds |= {Action(a, "S", t): (Action(b, "S", t),) for a, b in pairwise(chain)}
            feeds |= {Action(b, "V", t): (Action(a, "V", t),) for a, b in pairwise(chain)}
        for r in range(ranks):
            put(r, "U", t, 0.0, at[r])
    return (*_merged(schedule, begins, added), feeds)


def _last_w(actions: Sequence[Action], stage: int, mb: int) -> list[Action]:
    """The action that completes a stage's gradients of a microbatch."""
    return [a for a in actions if a.stage == stage and a.mb == mb and a.kind in ("W", "BW")][-1:]


def _merged(
    schedule: Schedule, begins: Sequence[Sequence[int]], added: Sequence[Sequence[tuple[int, int, Action]]]
) -> tuple[Orders, tuple[tuple[int, ...], ...]]:
    """The orders with what was added; where each step begins in them. What is added at a step's beginning ends the one before."""
    orders, places = [], []
    for r, actions in enumerate(schedule.ranks):
        order: list[Action] = []
        where: dict[int, int] = {}
        waiting = sorted(added[r], key=lambda x: x[:2])
        taken = 0
        for i in range(len(actions) + 1):
            while taken < len(waiting) and waiting[taken][0] == i:
                order.append(waiting[taken][2])
                taken += 1
            where[i] = len(order)
            if i < len(actions):
                order.append(actions[i])
        orders.append(order)
        places.append(tuple(where[i] if i else 0 for i in begins[r]))
    return orders, tuple(places)


def _period(timeline: Timeline, begins: Sequence[Sequence[int]]) -> float:
    """Seconds from the start of the last but one step to that of the last, on the slowest rank."""
    return max(spans[at[STEPS - 1]].start - spans[at[STEPS - 2]].start for spans, at in zip(timeline.spans, begins, strict=True))
