"""The decoder that decides in order of time: `dispatch`. Its input are priorities, not words."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from zbfx.passes.order_decode import EPS, NO_CUTOFF, Cutoff, Outcome, Rules, fits, settled_period
from zbfx.passes.order_problem import INF, Full, Problem


def dispatch(
    problem: Problem, keys: Sequence[Sequence[float]], rules: Rules, *, keep: bool = False, cutoff: Cutoff = NO_CUTOFF
) -> Outcome:
    """Decides in order of time: a free rank runs the ready F or B with the smallest key, or a W, or waits, by the rules.

    keys[v][mb] are priorities, one more entry per node at the end (any). With the guard built in it always comes to an end.
    """
    m, nodes, ranks = problem.microbatches, len(problem.rank), problem.num_ranks
    stages, seconds, memory, parts, reserve = problem.num_stages, problem.seconds, problem.memory, problem.parts, problem.reserve
    w_seconds, w_memory, hop, home = problem.w_seconds, problem.w_memory, problem.hop, problem.rank
    arrival: list[list[float]] = [[0.0] * m + [INF]] + [[INF] * (m + 1) for _ in range(nodes)]
    count, held, busy = [0] * nodes, [0.0] * ranks, [0.0] * ranks
    first, last = [-1.0] * ranks, [0.0] * ranks
    pending: list[list[int]] = [[] for _ in range(ranks)]
    done_w = [0] * ranks
    forwards = [[v for v in own if v < stages] for own in problem.nodes]
    own_nodes = [tuple(reversed(own)) for own in problem.nodes]
    f_left = [len(own) * m for own in forwards]
    todo = nodes * m
    out: list[Full] = [[] for _ in range(ranks)]
    heap = [(0.0, r) for r in range(ranks)]
    slack = cutoff.slack(problem)
    next_at, next_key = (
        [arrival[v][0] for v in range(nodes)],
        [keys[v][0] for v in range(nodes)],
    )  # of each node's next microbatch
    needs = [memory[v] + max(reserve[v], rules.spare * memory[v]) for v in range(stages)]
    while heap:
        t, r = heappop(heap)
        if busy[r] > t:
            continue
        free, now = problem.room[r] + EPS - held[r], t + EPS
        best, soon_node, best_key, soon, urgent, urgent_at, blocked = -1, -1, INF, INF, INF, INF, INF
        for v in own_nodes[r]:
            ready = next_at[v]
            if ready <= now:
                key = next_key[v]
                if v < stages and free < needs[v] and not _admits(problem, forwards[r], count, v, free, rules.spare):
                    if key < blocked:
                        blocked = key
                elif key < best_key:
                    best, best_key = v, key
            elif ready < INF:
                if ready < soon:
                    soon, soon_node = ready, v
                if next_key[v] < urgent:
                    urgent, urgent_at = next_key[v], ready
        w = done_w[r]
        has_w = w < len(pending[r])
        if has_w:
            # The last node feeds nobody: once no F is left, a W in front of it can only help.
            share = rules.fill if f_left[r] else (rules.fill_end if soon_node < nodes - 1 else 0.0)
            fill = share * w_seconds[pending[r][w]] - EPS
        else:
            fill = INF
        wants_w = has_w and (blocked < INF or soon - t >= fill)
        if best >= 0:
            if has_w and blocked < best_key - rules.w_first:
                best, wants_w = -1, True
            elif urgent < best_key - rules.lead and urgent_at - t < rules.patience * seconds[best]:
                best, wants_w, soon = -1, has_w and urgent_at - t >= fill, urgent_at
        if best >= 0:
            v, j = best, count[best]
            end = t + seconds[v]
            if first[r] < 0:
                first[r] = t
                idle = t if cutoff.from_zero else 0.0
            else:
                idle = t - last[r]
            slack[r] -= idle
            if slack[r] < 0:
                return Outcome(INF, INF, (), sum(count))
            held[r] += memory[v]
            count[v] = j + 1
            next_at[v], next_key[v] = arrival[v][j + 1], keys[v][j + 1]
            todo -= 1
            if v < stages:
                f_left[r] -= 1
            else:
                pending[r].extend([problem.stage[v]] * parts)
            if keep:
                out[r].append((problem.stage[v], 0 if v < stages else 1))
            ready = arrival[v + 1][j] = end + hop[v]
            if v + 1 < nodes:
                if count[v + 1] == j:
                    next_at[v + 1] = ready
                other = home[v + 1]
                if busy[other] <= ready:
                    heappush(heap, (ready, other))
        elif wants_w:
            s = pending[r][w]
            slack[r] -= t - last[r]
            done_w[r] = w + 1
            held[r] -= w_memory[s]
            end = t + w_seconds[s]
            if keep:
                out[r].append((s, 2))
        else:
            if soon < INF:
                heappush(heap, (soon, r))
            continue
        busy[r] = last[r] = end
        heappush(heap, (end, r))
    if todo:
        return Outcome(INF, INF, (), sum(count))
    for r in range(ranks):
        for s in pending[r][done_w[r] :]:
            last[r] += w_seconds[s]
            if keep:
                out[r].append((s, 2))
    span = max(b - a for a, b in zip(first, last, strict=True))
    period = settled_period(arrival[nodes], m)
    return Outcome(span, max(last), tuple(out) if keep else (), sum(count), period)


def _admits(problem: Problem, forwards: Sequence[int], count: Sequence[int], v: int, free: float, spare: float) -> bool:
    """Whether F node v may run in `free` bytes; the rank's last F stage and its oldest microbatch need not leave any spare."""
    last = forwards[-1]
    if spare > 0 and v != last and count[v] > count[last] and free < problem.memory[v] * (1 + spare):
        return False
    return fits(problem, forwards, count, v, free, True)
