"""Schedule + when the weights change -> Course: what each rank does in a step besides F, B and W, and when.

The loss (L) goes from the last stage's rank to all others as soon as it is known. Where steps are clipped or checked, the
state of the gradients (S) passes from rank to rank, in the order of their first stages; the last one knows all, and that
comes back as the validation (V). U is the optimizer's update.

synchronous: L, S, V, U end the step. post-validation (Zero Bubble, section 4): L, S, U end it, and the V of the last step
stands among the first forwards, as late as it arrives, so that nobody waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from zbfx.ir import ONCE, Action, CostModel, Course, Schedule, Span, Timeline
from zbfx.passes.simulate import action_seconds, bubble, count_parts, hop_seconds, memory_curve
from zbfx.verify import dependencies

_WARM_UP = 8  # steps before those that are shown
_LONGEST_WARM_UP = 64  # steps after which every rank should take as long as the others
Orders = Sequence[Sequence[Action]]
Feeds = dict[Action, tuple[Action, ...]]


def bare(schedule: Schedule, timeline: Timeline) -> Course:
    """The schedule alone: the user's own optimizer steps afterwards."""
    return Course(schedule, timeline, period=timeline.makespan)


def synchronous(schedule: Schedule, costs: CostModel, *, checked: bool, update: Sequence[float] = ()) -> Course:
    """Every rank ends the step with the state of all gradients, and updates. update[r]: seconds of rank r's U."""
    chain = chain_of(schedule)
    with_loss, feeds = with_losses(schedule)
    orders = [[*rank, *_tail(r, "SVU" if checked else "SU")] for r, rank in enumerate(with_loss)]
    if checked:
        feeds |= {Action(a, "S", 0): (Action(b, "S", 0),) for a, b in pairwise(chain)}
        feeds |= {Action(b, "V", 0): (Action(a, "V", 0),) for a, b in pairwise(chain)}
    timeline = timed(schedule, orders, costs, feeds, update=update)
    return Course(schedule, timeline, feeds, period=_settled(schedule, orders, costs, feeds, update, timeline))


def post_validation(schedule: Schedule, costs: CostModel, *, update: Sequence[float] = ()) -> Course:
    """Every rank updates on what it knows, and validates during the first forwards of the next step."""
    chain = chain_of(schedule)
    with_loss, feeds = with_losses(schedule)
    feeds |= {Action(a, "S", 0): (Action(b, "S", 0),) for a, b in pairwise(chain)}
    tails = [[*rank, *_tail(r, "SU")] for r, rank in enumerate(with_loss)]
    first = timed(schedule, tails, costs, feeds, update=update)
    free = [spans[-1].end if spans else 0.0 for spans in first.spans]
    second = timed(schedule, tails, costs, feeds, update=update, free=free)
    arrival, arrivals = free[chain[-1]], {chain[-1]: free[chain[-1]]}
    for a, b in reversed(list(pairwise(chain))):
        arrival += _latency(costs, b, a)
        arrivals[a] = arrival
    repeated = _before_validation(schedule, second, arrivals, chain)
    orders = [[*o[:n], Action(r, "V", 0), *o[n:]] for r, (o, n) in enumerate(zip(tails, repeated, strict=True))]
    feeds |= {Action(b, "V", 0): (Action(a, "V", 0),) for a, b in pairwise(chain)}
    timeline = timed(schedule, orders, costs, feeds, update=update, free=free)
    ends = [spans[-1].end if spans else 0.0 for spans in timeline.spans]
    period = max((b - a for a, b in zip(free, ends, strict=True)), default=0.0)
    return Course(schedule, _from_zero(timeline), feeds, repeated, period)


def several(course: Course, costs: CostModel, steps: int) -> Timeline:
    """Steps as they follow one another once every rank takes as long for one as the others, from the first start on."""
    orders = [[s.action for s in spans] for spans in course.timeline.spans]
    free: list[float] = []
    rows: list[list[Span]] = []
    for number in range(_WARM_UP + steps):
        timeline = timed(course.schedule, orders, costs, dict(course.feeds), free=free)
        free = [spans[-1].end if spans else 0.0 for spans in timeline.spans]
        shown = rows if number > _WARM_UP else [[] for _ in orders]
        rows = [[*row, *spans] for row, spans in zip(shown, timeline.spans, strict=True)]
    return _from_zero(_timeline(rows, course.timeline.peak))


def _settled(
    schedule: Schedule, orders: Orders, costs: CostModel, feeds: Feeds, update: Sequence[float], timeline: Timeline
) -> float:
    """Seconds from a step to the next, once every rank takes as many: what a first step leaves early on one rank is used up."""
    before = [0.0] * len(orders)
    for _ in range(_LONGEST_WARM_UP):
        ends = [spans[-1].end if spans else 0.0 for spans in timeline.spans]
        steps = [b - a for a, b in zip(before, ends, strict=True)]
        if max(steps) - min(steps) <= 1e-9 * max(steps):
            break
        before, timeline = ends, timed(schedule, orders, costs, feeds, update=update, free=ends)
    return max(steps, default=0.0)


def chain_of(schedule: Schedule) -> list[int]:
    """The ranks in the order of their first stages: the state of the gradients is passed along it."""
    return sorted(range(len(schedule.ranks)), key=schedule.placement.index)


def with_losses(schedule: Schedule) -> tuple[list[list[Action]], Feeds]:
    """Puts L behind the last stage's F of the last microbatch, and at the end of every other rank."""
    last = schedule.placement[-1]
    final = Action(schedule.num_stages - 1, "F", schedule.microbatches - 1)
    result = []
    for r, order in enumerate(schedule.ranks):
        at = order.index(final) + 1 if r == last else len(order)
        result.append([*order[:at], Action(r, "L", 0), *order[at:]])
    others = tuple(Action(r, "L", 0) for r in range(len(schedule.ranks)) if r != last)
    return result, {Action(last, "L", 0): others} if others else {}


def timed(
    schedule: Schedule,
    orders: Orders,
    costs: CostModel,
    feeds: Feeds,
    *,
    update: Sequence[float] = (),
    free: Sequence[float] = (),
) -> Timeline:
    """When each action of the orders starts and ends, from `free[r]` seconds on for rank r. S, V and L take no time themselves;
    their messages take a link's latency."""
    parts, last, home = count_parts(schedule), schedule.num_stages - 1, schedule.placement
    arrived: dict[Action, float] = {}
    clock = list(free) or [0.0] * len(orders)
    spans: list[list[Span]] = [[] for _ in orders]
    heads = [0] * len(orders)
    waits = {c: p for p, consumers in feeds.items() for c in consumers}
    waiting: dict[Action, list[int]] = {}
    ready = list(range(len(orders) - 1, -1, -1))
    while ready:
        r = ready.pop()
        while heads[r] < len(orders[r]):
            a = orders[r][heads[r]]
            before = waits.get(a) or _feeder(a, last)
            if before is not None and _rank(before, home) != r:
                if before not in arrived:
                    waiting.setdefault(before, []).append(r)
                    break
                hop = _latency(costs, _rank(before, home), r) if a in waits else _hop(costs, before, a, home)
                clock[r] = max(clock[r], arrived[before] + hop)
            seconds = update[r] if a.kind == "U" and update else 0.0 if a.kind in ONCE else action_seconds(a, costs, parts)
            spans[r].append(Span(a, clock[r], clock[r] + seconds))
            clock[r] += seconds
            heads[r] += 1
            done = Action(a.stage, "B", a.mb) if a.kind == "BW" else a
            arrived[done] = clock[r]
            ready += waiting.pop(done, ())
    peak = tuple(max(memory_curve(schedule, costs, r), default=0) for r in range(len(orders)))
    return _timeline(spans, peak)


def _tail(rank: int, kinds: str) -> list[Action]:
    return [Action(rank, kind, 0) for kind in kinds]  # type: ignore[arg-type]


def _feeder(a: Action, last: int) -> Action | None:
    """The action on a neighbouring stage that F, B or BW waits for."""
    if a.kind in ONCE or a.kind == "W":
        return None
    found = [Action(s, k, mb) for s, k, mb in dependencies(a, last) if s != a.stage]  # type: ignore[arg-type]
    return found[0] if found else None


def _rank(a: Action, home: Sequence[int]) -> int:
    return a.stage if a.kind in ONCE else home[a.stage]


def _hop(costs: CostModel, before: Action, a: Action, home: Sequence[int]) -> float:
    return hop_seconds(costs, min(before.stage, a.stage), home[before.stage], home[a.stage])


def _latency(costs: CostModel, source: int, target: int) -> float:
    return costs.links[source][target].latency if costs.links else costs.comm[source][target]


def _before_validation(
    schedule: Schedule, timeline: Timeline, arrivals: Mapping[int, float], chain: Sequence[int]
) -> tuple[int, ...]:
    """How many of each rank's first forwards come before the validation: those that start before it arrives, or so soon after
    that a little delay would make the rank wait.

    Never what depends on the chain's end, which validates before it does anything, nor on a forward that comes after its own
    rank's validation: the messages of what is run again must be those of what was run.
    """
    end = schedule.placement.index(chain[-1])
    counts = [0] * len(timeline.spans)
    for r, spans in enumerate(timeline.spans):
        for span in spans:
            soon = arrivals[r] + (span.end - span.start) / 2
            if span.action.kind != "F" or span.action.stage >= end or span.start >= soon:
                break
            counts[r] += 1
    changed = True
    while changed:
        early = {s.action for spans, n in zip(timeline.spans, counts, strict=True) for s in spans[:n]}
        changed = False
        for r, spans in enumerate(timeline.spans):
            for i, span in enumerate(spans[: counts[r]]):
                a = span.action
                if a.stage and replace(a, stage=a.stage - 1) not in early:
                    counts[r], changed = i, True
                    break
    return tuple(counts)


def _timeline(spans: Sequence[Sequence[Span]], peak: tuple[int, ...]) -> Timeline:
    """Over all actions, those of the weights included."""
    busy = [rank for rank in spans if rank]
    span = max((rank[-1].end - rank[0].start for rank in busy), default=0.0)
    makespan = max((rank[-1].end for rank in busy), default=0.0) - min((rank[0].start for rank in busy), default=0.0)
    work = max((sum(s.end - s.start for s in rank) for rank in busy), default=0.0)
    return Timeline(tuple(map(tuple, spans)), span, makespan, bubble(span, work), bubble(makespan, work), peak)


def _from_zero(timeline: Timeline) -> Timeline:
    """The same, from the first start on."""
    zero = min((rank[0].start for rank in timeline.spans if rank), default=0.0)
    spans = tuple(tuple(Span(s.action, s.start - zero, s.end - zero) for s in rank) for rank in timeline.spans)
    return replace(timeline, spans=spans)
