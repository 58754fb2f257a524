"""Periodic plans: when each node would run if microbatches came at a steady pace. They become words by sorting, or priorities.

A plan is a vector of numbers without a unit, so one found for a small problem serves for any number of ranks and microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

from zbfx.passes.order_problem import INF, Problem, Word


def plan_keys(problem: Problem, x: Sequence[float]) -> list[list[float]]:
    """When the plan has node v of microbatch mb: a start per node, one period per microbatch, quicker starts and quicker ends.

    x = period (in busiest rank's work per microbatch), per leg the stretch of its hops, per turn a wait (in periods), then
    four pairs of how many microbatches, and at which pace (in the same work): the first Fs, the last Bs, the first Bs, the
    last Fs. A leg is a run of num_ranks nodes.
    Starts rise along the nodes, so sorting a rank's actions by them can never deadlock.
    """
    nodes, legs = len(problem.rank), count_legs(problem)
    period = max(problem.work) / problem.microbatches * x[0]
    start, starts = 0.0, [0.0]
    for v in range(nodes - 1):
        leg, hop = min(v // problem.num_ranks, legs - 1), problem.seconds[v] + problem.hop[v]
        turn = (v + 1) % problem.num_ranks == 0 and leg < legs - 1
        start += hop + period * x[1 + legs + leg] if turn else hop * x[1 + leg]
        starts.append(start)
    return shifted_keys(problem, starts, period, x[2 * legs :])


def shifted_keys(problem: Problem, starts: Sequence[float], period: float, quick: Sequence[float]) -> list[list[float]]:
    """Keys of all microbatches from those of microbatch 0: one period apart, but for the four quick pairs (see plan_keys)."""
    m = problem.microbatches
    unit = max(problem.work) / m
    first_f, last_b, first_b, last_f = ((quick[k], period - quick[k + 1] * unit) for k in range(0, 8, 2))
    forward, backward = _shifts(m, period, first_f, last_f), _shifts(m, period, first_b, last_b)
    keys = [[start + shift for shift in (forward if v < problem.num_stages else backward)] for v, start in enumerate(starts)]
    small = 1e-6 * period
    if any(b < f for f, b in zip(keys[problem.num_stages - 1], keys[problem.num_stages], strict=True)):
        for before, row in itertools.pairwise(keys):
            for mb in range(m):
                row[mb] = max(row[mb], before[mb] + small)
    for row in keys:
        row.append(INF)
    return keys


def _shifts(m: int, period: float, first: tuple[float, float], last: tuple[float, float]) -> list[float]:
    """When each microbatch comes: (how many, seconds saved on each) at the start and at the end."""
    (quick, gain), (late, late_gain) = first, last
    return [period * mb - gain * min(mb, quick) - late_gain * max(0.0, mb - (m - late)) for mb in range(m)]


def plain_plan(legs: int, stretch: float = 1.0) -> tuple[float, ...]:
    """A steady plan: all hops stretched alike, no waits, no quick start or end."""
    return (1.0,) + (stretch,) * legs + (0.0,) * (legs - 1) + (0.0, 0.5) * 4


def sort_words(problem: Problem, keys: Sequence[Sequence[float]]) -> list[Word]:
    """Per rank its nodes in the order of their keys; each node comes once per microbatch."""
    m = problem.microbatches
    words = []
    for own in problem.nodes:
        times = [time for v in own for time in keys[v][:m]]
        letters = [v for v in own for _ in range(m)]
        words.append([letters[k] for k in sorted(range(len(times)), key=times.__getitem__)])
    return words


def count_legs(problem: Problem) -> int:
    """Runs of num_ranks nodes: 4 for a V, 8 for a zigzag."""
    return max(2, round(len(problem.rank) / problem.num_ranks))


def sample_plan(problem: Problem, rng: Random) -> tuple[float, ...]:
    """A plan whose activations fill a share of the memory: by slow hops, or by a quick start, or by both."""
    legs, m = count_legs(problem), problem.microbatches
    unit = max(problem.work) / m
    full = stretch_that_fills(problem, unit)
    share = rng.choice((1, 1, 1, 0.95, 0.9, 0.85, 0.8, 1.05))
    slow = rng.random() < 0.55
    if slow:
        level, spread = full * share, rng.choice((0, 0, 0.1))
    else:
        level, spread = rng.choice((1, 1, 1.1, 1.3, rng.uniform(1, max(1.0, full)))), rng.choice((0, 0, 0.1))
    hops = [max(0.9, level * (1 + rng.gauss(0, spread))) for _ in range(legs)]
    if rng.random() < 0.3:
        bend = rng.uniform(-0.5, 0.5) * max(0.0, full - 1)
        hops = [h + bend if k < legs // 2 else h - bend for k, h in enumerate(hops)]
    turns = [rng.choice((0, 0, rng.uniform(0, 0.3))) for _ in range(legs - 1)]
    chunks = max(1.0, legs / 2)
    spare = 0.0 if slow else max(0.0, full * share - level) / max(full, 1e-9) * problem.num_ranks
    pace = rng.choice((0.33, 0.4, 0.5, 0.4 / chunks))
    quick = spare / (1 - pace)
    late = quick * rng.choice((1, 1, 1, 0.5, 0.2, 0))
    if rng.random() < 0.3:  # the first and the last microbatches quicker as a whole
        start, end = ((rng.uniform(0, 0.5 * problem.num_ranks), rng.uniform(0.2, 0.7)) for _ in range(2))
        return (1.0, *hops, *turns, *start, *end, *start, *end)
    more = [
        n for _ in range(2) for n in (rng.choice((0, 0, rng.uniform(0, problem.num_ranks))), rng.choice((1 / chunks, 0.4, 0.5)))
    ]
    return (1.0, *hops, *turns, quick, pace, late, rng.choice((0.33, 0.4, 0.5)), *more)


def mutate_plan(problem: Problem, x: Sequence[float], rng: Random) -> tuple[float, ...]:
    """The plan with some of its numbers moved a little, or its start or end made quicker or slower for F and B alike."""
    legs, y = count_legs(problem), list(x)
    scale, rate = rng.choice((1, 0.3, 0.1)), rng.choice((0.15, 0.4))
    if rng.random() < 0.25:
        hurry(problem, y, 2 * legs + rng.choice((0, 2)), rng)
        if rng.random() < 0.6:
            return tuple(y)
    spread = [0.03] + [0.3] * legs + [0.3] * (legs - 1)
    least = [0.5] + [0.3] * legs + [0.0] * (legs - 1)
    for k, width in enumerate(spread):
        if rng.random() < rate:
            y[k] = max(least[k], y[k] + rng.gauss(0, width) * scale)
    return move_quick(y, 2 * legs, scale, rate, rng)


def move_quick(y: list[float], at: int, scale: float, rate: float, rng: Random) -> tuple[float, ...]:
    """The plan with some of its four quick pairs, which begin at y[at], moved a little."""
    for k in range(at, at + 8):
        if rng.random() < rate:
            count = (k - at) % 2 == 0
            y[k] = max(0.0 if count else 0.05, y[k] + rng.gauss(0, 3.0 if count else 0.1) * scale)
    return tuple(y)


def sample_quick(problem: Problem, rng: Random) -> tuple[float, ...]:
    """Four quick pairs, some of them idle; at times the same for F and B."""
    most, chunk = problem.num_ranks / 2, 1 / max(1.0, count_legs(problem) / 2)

    def pair(rest: int, *paces: float) -> tuple[float, float]:
        return rng.choice((*(0,) * rest, rng.uniform(0, most))), rng.choice(paces)

    first, last = pair(2, chunk, 0.5, 0.4, 0.33, 0.25, 0.67, 0.75), pair(1, 0.33, 0.4, 0.5, 0.25)
    if rng.random() < 0.3:
        return (*first, *last, *first, *last)
    return (*first, *last, *pair(2, chunk, 0.5, 0.4), *pair(2, chunk, 0.4, 0.5))


def hurry(problem: Problem, y: list[float], k: int, rng: Random) -> None:
    """Lets the microbatches of the start (k: the place of its first pair) or of the end go through at another pace as a whole."""
    if rng.random() < 0.4:
        count, pace = rng.uniform(0, 0.5 * problem.num_ranks), rng.uniform(0.2, 0.7)
    else:
        count, pace = y[k] + rng.gauss(0, 1) * rng.choice((1, 0.3)), y[k + 1] + rng.gauss(0, 0.05)
    y[k] = y[k + 4] = max(0.0, count)
    y[k + 1] = y[k + 5] = max(0.05, pace)


def is_scarce(problem: Problem) -> bool:
    """Whether memory is so tight that hops can hardly wait: there a plan kept strictly does better than priorities."""
    return stretch_that_fills(problem, max(problem.work) / problem.microbatches) < 1.7


def stretch_that_fills(problem: Problem, unit: float) -> float:
    """By how much all hops may be longer than they are for the activations in flight to fill the tightest rank's memory."""
    stages = problem.num_stages
    starts = [0.0]
    for seconds, hop in zip(problem.seconds, problem.hop, strict=True):
        starts.append(starts[-1] + seconds + hop)
    stretch = INF
    for r, own in enumerate(problem.nodes):
        byte_seconds = sum(problem.memory[v] * (starts[2 * stages - v] - starts[v]) for v in own if v < stages)
        if byte_seconds > 0:
            stretch = min(stretch, problem.room[r] * unit / byte_seconds)
    chunks = stages / problem.num_ranks
    most = 1.5 * chunks * problem.num_ranks * unit / max(starts[-1] / 2, 1e-12)
    return min(stretch, most) if most > 0 else 1.0
