"""Woven plans: steady plans in which no rank is ever asked for two actions at once.

A microbatch passes a rank once on each of its legs: n times on the way up (ranks rising), n times on the way down. Let one
come every `period`, and cut the period into n cells. If a hop up and a hop down together take a cell, trains that follow each
other a cell apart pass between those of the other direction at every rank alike, and Ws fill what is left of the cell. So hops
can be short, which is what holds little memory, and yet nobody waits; with hops of another length the trains run into each
other every few ranks. On a V and on a zigzag such a plan holds about p/2 * M_B and loses nothing in the middle. V-Half (arXiv
2405.15362) is the one for equal times and no messages.

Trains of one direction only keep apart if a round trip does not end where it began: the phases of the legs are numbers of
the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from zbfx.passes.order_plan import count_legs, hurry, move_quick, sample_quick, shifted_keys
from zbfx.passes.order_problem import Problem

_LEAST_WAIT = 0.1  # cells between the ends of two legs


def weave_keys(problem: Problem, x: Sequence[float]) -> list[list[float]]:
    """When the plan has node v of microbatch mb.

    x = period (in busiest rank's work per microbatch), a hop up and a hop down together (in cells), the share of the hop up,
    per leg but the first its phase (in cells, against the first leg at the rank where it starts), then four pairs as in
    plan_keys.
    """
    p, nodes, legs = problem.num_ranks, len(problem.rank), count_legs(problem)
    unit = max(problem.work) / problem.microbatches
    cells = legs / 2
    cell = x[0] * unit / cells or 1.0
    up, down = x[1] * x[2] * cell, x[1] * (1 - x[2]) * cell
    starts, start = [0.0], 0.0
    for v in range(1, nodes):
        leg = min(v // p, legs - 1)
        if v % p == 0 and v // p < legs:
            least = start / cell + _LEAST_WAIT
            phase = x[2 + leg] + problem.rank[v] * up / cell
            start = cell * (least + (phase - least) % cells)
        else:
            start += up if problem.rank[v] > problem.rank[v - 1] else down
        starts.append(start)
    return shifted_keys(problem, starts, x[0] * unit, x[2 + legs :])


def plain_weaves(problem: Problem) -> list[tuple[float, ...]]:
    """The steady woven plans: trains of one direction a cell apart, later legs first or last, those of the other right behind
    them or halfway."""
    legs, (_, busy) = count_legs(problem), _least_hop(problem)
    quiet = (0.0, 0.5) * 4
    return [
        (1.0, hop, 0.5, *_phases(legs, apart * hop, meet), *quiet)
        for apart in (1, -1)
        for hop in sorted({1.0, *_closed_hops(problem, apart)[-1:]})
        for meet in (busy, 0.5)
    ]


def sample_weave(problem: Problem, rng: Random) -> tuple[float, ...]:
    """A woven plan: trains of one direction a cell, or a hop up and down, apart, or with no wait at a turn."""
    least, busy = _least_hop(problem)
    period = 1 + rng.choice((0, 0, 0.01, 0.02, 0.04, 0.06))
    apart = rng.choice((-1, 1))
    closed = _closed_hops(problem, apart)
    hop = rng.choice(closed) if closed and rng.random() < 0.4 else rng.uniform(min(0.95 * least, 0.9), 1.05)
    meet = rng.uniform(min(busy, 0.5), 0.6)
    # Few ranks meet few trains: there the shortest round trip may do better than one that keeps all of them apart.
    space = rng.choice((apart * hop, apart, problem.num_ranks * hop))
    return (period, hop, 0.5, *_phases(count_legs(problem), space, meet), *sample_quick(problem, rng))


def _phases(legs: int, space: float, meet: float) -> list[float]:
    """Of all legs but the first: trains `space` apart, those of the other direction `meet` behind, both in cells."""
    return [space * (k // 2) + (meet if k % 2 else 0.0) for k in range(1, legs)]


def _least_hop(problem: Problem) -> tuple[float, float]:
    """The longest action with its message, there and back, and the longest action alone; in cells."""
    cell = max(problem.work) / problem.microbatches / max(1, count_legs(problem) // 2) or 1.0
    return 2 * max(a + b for a, b in zip(problem.seconds, problem.hop, strict=True)) / cell, max(problem.seconds) / cell


def _closed_hops(problem: Problem, apart: int) -> list[float]:
    """Hops up and down, in cells, with which a round trip without waits ends just one hop up and down before (apart = -1), or
    behind (1), where it began."""
    p, cells, least = problem.num_ranks, max(1, count_legs(problem) // 2), _least_hop(problem)[0]
    return [hop for n in range(1, p + 2) if p > apart and 0.8 * least <= (hop := cells * n / (p - apart)) <= 1.1]


def mutate_weave(problem: Problem, x: Sequence[float], rng: Random) -> tuple[float, ...]:
    """The plan with some of its numbers moved a little: phases one by one or as a direction, hops, starts and ends."""
    legs, y = count_legs(problem), list(x)
    scale, rate = rng.choice((1, 0.3, 0.1, 0.03)), rng.choice((0.1, 0.2, 0.4))
    if rng.random() < 0.3:
        moved = rng.gauss(0, 0.1) * scale
        for k in range(rng.choice((1, 2)), legs, 2):
            y[2 + k] += moved
    spread = [0.03, 0.03, 0.03] + [0.15] * (legs - 1)
    least = [0.9, 0.3, 0.2]
    for k, width in enumerate(spread):
        if rng.random() < rate:
            y[k] += rng.gauss(0, width) * scale
            if k < len(least):
                y[k] = max(least[k], y[k])
    if rng.random() < 0.2:
        hurry(problem, y, 2 + legs + rng.choice((0, 2)), rng)
    return move_quick(y, 2 + legs, scale, rate, rng)
