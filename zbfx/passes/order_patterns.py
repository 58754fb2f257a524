"""Families of candidate orders for the search. A candidate is a family's name, a vector of numbers, and the decoder's rules.

- pattern: F and B sorted by a periodic plan (`plan_keys`), then `follow`. Best where memory is scarce.
- priority: the same plan as priorities of `dispatch`. Best at about 1p, and wherever the plan does not fit exactly.
- model: `dispatch` in a simplified world (F and B last 1, W its share, no messages), deepest node first; its words, then
  `follow`.
- zb-v, v-half, v-min: the closed patterns for V placements, then `follow`.
- 1f1b: each rank warms up with a number of Fs that its memory allows, then F and B take turns, then `follow`. Linear
  placements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from zbfx.ir import Action
from zbfx.passes.order_chunks import v_half, v_min, zb_v
from zbfx.passes.order_decode import NO_CUTOFF, Cutoff, Outcome, Rules, dispatch, follow
from zbfx.passes.order_problem import INF, Problem, Word


@dataclass(frozen=True, slots=True)
class Candidate:
    """One point of the search."""

    family: str
    x: tuple[float, ...]
    rules: Rules


def decode(problem: Problem, candidate: Candidate, *, keep: bool = False, cutoff: Cutoff = NO_CUTOFF) -> Outcome:
    """What the candidate gives on the problem; its numbers hold for any number of microbatches."""
    x, rules = candidate.x, candidate.rules
    if candidate.family == "pattern":
        return follow(problem, sort_words(problem, plan_keys(problem, x)), rules, keep=keep, cutoff=cutoff)
    if candidate.family == "priority":
        return dispatch(problem, plan_keys(problem, x), rules, keep=keep, cutoff=cutoff)
    words = _WORDS[candidate.family](problem, x)
    return Outcome(INF, INF) if words is None else follow(problem, words, rules, keep=keep, cutoff=cutoff)


def effort(problem: Problem, candidate: Candidate, letters: int) -> float:
    """Work of one decoding, about in microseconds: what the search counts its budget in, so that it ends at the same point
    always.

    letters: how many were decoded; the rest was planned only.
    """
    planned = len(problem.rank) * problem.microbatches
    chunks = len(problem.rank) / problem.num_ranks
    plan, step = {"pattern": (0.9, 1.5), "priority": (0.6, 2.7 + 0.3 * chunks), "model": (3.8 + 0.3 * chunks, 1.5)}.get(
        candidate.family, (0.3, 1.5)
    )
    return planned * plan + letters * step


# ---------------------------------------------------------------- the periodic plan


def plan_keys(problem: Problem, x: Sequence[float]) -> list[list[float]]:
    """When the plan has node v of microbatch mb: a start per node, one period per microbatch, a quicker start and a
    quicker end.

    x = period (in busiest rank's work per microbatch), per leg the stretch of its hops, per turn a wait (in periods), then
    how many
    microbatches start quickly and at which pace, how many end quickly and at which pace. A leg is a run of num_ranks nodes.
    Starts rise along the nodes, so sorting a rank's actions by them can never deadlock.
    """
    m, nodes, legs = problem.microbatches, len(problem.rank), count_legs(problem)
    unit = max(problem.work) / m
    period = unit * x[0]
    quick, pace, late, late_pace = x[2 * legs : 2 * legs + 4]
    start, starts = 0.0, [0.0]
    for v in range(nodes - 1):
        leg, hop = min(v // problem.num_ranks, legs - 1), problem.seconds[v] + problem.hop[v]
        turn = (v + 1) % problem.num_ranks == 0 and leg < legs - 1
        start += hop + period * x[1 + legs + leg] if turn else hop * x[1 + leg]
        starts.append(start)
    forward = [period * mb - (period - pace * unit) * min(mb, quick) for mb in range(m)]
    backward = [period * mb - (period - late_pace * unit) * max(0.0, mb - (m - late)) for mb in range(m)]
    keys = [[start + shift for shift in (forward if v < problem.num_stages else backward)] for v, start in enumerate(starts)]
    small = 1e-6 * period
    for before, row in itertools.pairwise(keys):
        for mb in range(m):
            row[mb] = max(row[mb], before[mb] + small)
    for row in keys:
        row.append(INF)
    return keys


def sort_words(problem: Problem, keys: Sequence[Sequence[float]]) -> list[Word]:
    """Per rank its nodes in the order of their keys; each node comes once per microbatch."""
    m = problem.microbatches
    words = []
    for own in problem.nodes:
        timed = [(keys[v][mb], v) for v in own for mb in range(m)]
        timed.sort()
        words.append([v for _, v in timed])
    return words


def count_legs(problem: Problem) -> int:
    """Runs of num_ranks nodes: 4 for a V, 8 for a zigzag."""
    return max(2, round(len(problem.rank) / problem.num_ranks))


def sample_plan(problem: Problem, rng: Random) -> tuple[float, ...]:
    """A plan whose activations fill a share of the memory: by slow hops, or by a quick start, or by both."""
    legs, m = count_legs(problem), problem.microbatches
    unit = max(problem.work) / m
    full = _stretch_that_fills(problem, unit)
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
    return (1.0, *hops, *turns, quick, pace, late, rng.choice((0.33, 0.4, 0.5)))


def mutate_plan(problem: Problem, x: Sequence[float], rng: Random) -> tuple[float, ...]:
    """The plan with some of its numbers moved a little."""
    legs, scale, rate = count_legs(problem), rng.choice((1, 0.3, 0.1)), rng.choice((0.15, 0.4))
    spread = [0.03] + [0.3] * legs + [0.3] * (legs - 1) + [3.0, 0.1, 3.0, 0.1]
    least = [0.5] + [0.3] * legs + [0.0] * (legs - 1) + [0.0, 0.05, 0.0, 0.05]
    y = list(x)
    for k in range(len(y)):
        if rng.random() < rate:
            y[k] = max(least[k], y[k] + rng.gauss(0, spread[k]) * scale)
    return tuple(y)


def is_scarce(problem: Problem) -> bool:
    """Whether memory is so tight that hops can hardly wait: there a plan kept strictly does better than priorities."""
    return _stretch_that_fills(problem, max(problem.work) / problem.microbatches) < 1.7


def _stretch_that_fills(problem: Problem, unit: float) -> float:
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


# ---------------------------------------------------------------- rules


def sample_rules(family: str, rng: Random) -> Rules:
    """Random rules for the family's decoder."""
    rules = Rules(fill=rng.choice((0.05, 0.3, 0.6, 1)), fill_end=rng.choice((0.3, 0.6, 1, 1)))
    if family == "priority":
        return replace(
            rules,
            lead=rng.choice((0, 0, 0.2, 0.5, 1, 99)),
            patience=rng.choice((0, 0.3, 0.6, 1, 2, 9)),
            w_first=rng.choice((-99, 0, 0, 0.5, 99)),
        )
    return replace(rules, ahead_f=rng.choice((0, 1, 2)), ahead_b=rng.random() < 0.5, guard=rng.random() < 0.5)


def mutate_rules(family: str, rules: Rules, rng: Random) -> Rules:
    """The rules with some of them moved."""
    if rng.random() < 0.3:
        rules = replace(rules, fill=min(1.2, max(0.0, rules.fill + rng.gauss(0, 0.2))))
    if rng.random() < 0.3:
        rules = replace(rules, fill_end=min(1.2, max(0.0, rules.fill_end + rng.gauss(0, 0.2))))
    if rng.random() < 0.75:
        return rules
    other = sample_rules(family, rng)
    names = ("lead", "patience", "w_first") if family == "priority" else ("ahead_f", "ahead_b", "guard")
    name = rng.choice(names)
    if family == "priority" and rng.random() < 0.6:
        value = max(0.0, getattr(rules, name) + rng.gauss(0, 0.3))
    else:
        value = getattr(other, name)
    return replace(rules, **{name: value})


# ---------------------------------------------------------------- words without a plan


def sample_model(rng: Random) -> tuple[float, ...]:
    """Numbers of the model family: W's length, B's length, the pull of depth, a head start of B, fill, share of the memory."""
    return (
        rng.choice((0.4, 0.5, 0.6, 0.7, 0.8, 1.0)),
        rng.choice((1.0, 1.0, 1.0, 0.9, 1.1)),
        rng.choice((0.5, 0.5, 0.5, 0.2, 1.0)),
        rng.choice((0.0, 0.0, 2.0, 4.0)),
        rng.choice((0.05, 0.05, 0.3, 1.0)),
        rng.choice((1.0, 1.0, 1.0, 0.97, 0.94, 0.9)),
    )


def mutate_model(x: Sequence[float], rng: Random) -> tuple[float, ...]:
    """The model's numbers with some drawn anew or moved a little."""
    fresh = sample_model(rng)
    moved = [value + rng.gauss(0, 0.05) if rng.random() < 0.5 else new for value, new in zip(x, fresh, strict=True)]
    mixed = [new if rng.random() < 0.3 else value for value, new in zip(x, moved, strict=True)]
    return (max(0.05, mixed[0]), max(0.3, mixed[1]), *mixed[2:5], min(1.0, max(0.3, mixed[5])))


def _model_words(problem: Problem, x: Sequence[float]) -> list[Word] | None:
    w, b, depth, head_start, fill, share = x
    stages, nodes, m = problem.num_stages, len(problem.rank), problem.microbatches
    model = replace(
        problem,
        seconds=(1.0,) * stages + (b,) * stages,
        hop=(0.0,) * nodes,
        w_seconds=(w / problem.parts,) * stages,
        room=tuple(
            max(room * share, sum(problem.memory[v] for v in own if v < stages))
            for room, own in zip(problem.room, problem.nodes, strict=True)
        ),
    )
    period = max(model.work) / m
    shift = [-depth * v + (head_start * problem.num_ranks if v >= stages else 0.0) for v in range(nodes)]
    keys = [[s + period * mb for mb in range(m)] + [INF] for s in shift]
    found = dispatch(model, keys, Rules(fill=fill, fill_end=1.0), keep=True)
    if found.span == INF:
        return None
    return [[s if kind == 0 else 2 * stages - 1 - s for s, kind in word if kind < 2] for word in found.words]


def _v_words(problem: Problem, build: Callable[[int, int, int], list[list[Action]]]) -> list[Word]:
    stages = problem.num_stages
    ranks = build(problem.num_ranks, 2, problem.microbatches)
    return [[a.stage if a.kind == "F" else 2 * stages - 1 - a.stage for a in rank if a.kind != "W"] for rank in ranks]


def _warm_up_words(problem: Problem, x: Sequence[float]) -> list[Word] | None:
    """The warm-up of a rank is x[0] * (ranks behind it) + x[1]; every rank holds one block of stages, which it runs as one."""
    m, stages, p = problem.microbatches, problem.num_stages, problem.num_ranks
    words = []
    for own in problem.nodes:
        f = [v for v in own if v < stages]
        b = [v for v in own if v >= stages]
        depth = len({problem.placement[s] for s in range(f[0])})
        held = sum(problem.memory[v] for v in f)
        room = problem.room[problem.placement[f[0]]]
        fit = m if held <= 0 or room == INF else int(room / held + 1e-9)
        warm = max(0, min(round(x[0] * (p - 1 - depth) + x[1]), fit - 1, m - 1))
        word = f * warm
        for mb in range(m):
            word += (f if warm + mb < m else []) + b
        words.append(word)
    return words


_WORDS: dict[str, Callable[[Problem, Sequence[float]], list[Word] | None]] = {
    "model": _model_words,
    "zb-v": lambda problem, x: _v_words(problem, zb_v),
    "v-half": lambda problem, x: _v_words(problem, v_half),
    "v-min": lambda problem, x: _v_words(problem, v_min),
    "1f1b": _warm_up_words,
}


def fixed_candidates(problem: Problem) -> list[Candidate]:
    """The closed patterns that suit the placement, each with a few rules."""
    p, placement = problem.num_ranks, problem.placement
    forth = tuple(range(p))
    out = []
    if placement == forth + forth[::-1]:
        rules = [Rules(fill, 1.0, ahead) for fill in (1.0, 0.6, 0.3) for ahead in (0, 2)]
        out += [Candidate("zb-v", (), r) for r in rules]
        rules = [Rules(fill, 1.0, ahead) for fill in (1.0, 0.7, 0.4, 0.1) for ahead in (0, 2)]
        out += [Candidate(name, (), r) for name in ("v-half", "v-min") for r in rules]
    if list(placement) == sorted(placement):
        warm_ups = [(k, more) for k in (1.0, 1.5, 2.0, 2.05, 2.1, 2.2) for more in (0.0, 0.5)]
        rules = [Rules(fill, end, ahead) for fill, end in ((1.0, 1.0), (0.05, 0.3), (0.3, 0.3)) for ahead in (0, 2)]
        out += [Candidate("1f1b", x, r) for x in warm_ups for r in rules]
    model = (
        (0.6, 1.0, 0.5, 0.0, 0.05, 1.0),
        (0.8, 1.0, 0.5, 0.0, 0.05, 1.0),
        (0.6, 1.0, 0.5, 4.0, 0.05, 1.0),
        (1.0, 1.0, 0.5, 0.0, 0.05, 1.0),
    )
    out += [Candidate("model", x, Rules(fill, 1.0, 0)) for x in model for fill in (0.6, 0.4)]
    legs, period = count_legs(problem), max(problem.work) / problem.microbatches
    full = max(1.0, min(4.0, _stretch_that_fills(problem, period)))
    if is_scarce(problem):
        plan = (1.0,) + (1.0,) * legs + (0.0,) * (legs - 1) + (0.0, 0.5, 0.0, 0.5)
        return out + [Candidate("pattern", plan, Rules(fill, end)) for fill in (0.6, 0.9) for end in (0.3, 1.0)]
    for share in (1.0, 0.9):
        plan = (1.0,) + (full * share,) * legs + (0.0,) * (legs - 1) + (0.0, 0.5, 0.0, 0.5)
        for lead, patience in ((0.5, 0.5), (1.0, 1.0), (0.0, 1.0)):
            for fill in (0.1, 0.5):
                out.append(Candidate("priority", plan, Rules(fill, 1.0, lead=lead * period, patience=patience)))
    return out
