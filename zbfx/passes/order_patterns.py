"""Families of candidate orders for the search. A candidate is a family's name, a vector of numbers, and the decoder's rules.

- pattern: F and B sorted by a periodic plan (order_plan), then `follow`. Best where memory is scarce.
- weave: the same, sorted by a plan whose trains never meet (order_weave). Best where memory is scarcest.
- priority: the first plan as priorities of `dispatch`. Best at about 1p, and wherever the plan does not fit exactly.
- model: `dispatch` in a simplified world (F and B last 1, W its share, no messages), deepest node first; its words, then
  `follow`.
- zb-v, v-half, v-min: the closed patterns for V placements, then `follow`.
- 1f1b: each rank warms up with a number of Fs that its memory allows, then F and B take turns, then `follow`. Linear
  placements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from zbfx.passes.order_decode import NO_CUTOFF, Cutoff, Outcome, Rules
from zbfx.passes.order_dispatch import dispatch
from zbfx.passes.order_follow import follow
from zbfx.passes.order_plan import (
    count_legs,
    is_scarce,
    mutate_plan,
    plain_plan,
    plan_keys,
    sample_plan,
    sort_words,
    stretch_that_fills,
)
from zbfx.passes.order_problem import INF, Problem
from zbfx.passes.order_seeds import known_plans
from zbfx.passes.order_weave import mutate_weave, plain_weaves, sample_weave, weave_keys
from zbfx.passes.order_words import build_words, mutate_model, sample_model


@dataclass(frozen=True, slots=True)
class Candidate:
    """One point of the search."""

    family: str
    x: tuple[float, ...]
    rules: Rules


def decode(problem: Problem, candidate: Candidate, *, keep: bool = False, cutoff: Cutoff = NO_CUTOFF) -> Outcome:
    """What the candidate gives on the problem; its numbers hold for any number of microbatches."""
    x, rules = candidate.x, candidate.rules
    if candidate.family in ("pattern", "weave"):
        keys = plan_keys(problem, x) if candidate.family == "pattern" else weave_keys(problem, x)
        return follow(problem, sort_words(problem, keys), rules, keep=keep, cutoff=cutoff)
    if candidate.family == "priority":
        return dispatch(problem, plan_keys(problem, x), rules, keep=keep, cutoff=cutoff)
    words = build_words(problem, candidate.family, x)
    return Outcome(INF, INF) if words is None else follow(problem, words, rules, keep=keep, cutoff=cutoff)


def effort(problem: Problem, candidate: Candidate, letters: int) -> float:
    """Work of one decoding, about in microseconds: what the search counts its budget in, so that it ends at the same point
    always.

    letters: how many were decoded; the rest was planned only.
    """
    planned = len(problem.rank) * problem.microbatches
    chunks = len(problem.rank) / problem.num_ranks
    plan, step = {
        "pattern": (0.9, 1.5),
        "weave": (0.9, 1.5),
        "priority": (0.6, 2.7 + 0.3 * chunks),
        "model": (3.8 + 0.3 * chunks, 1.5),
    }.get(candidate.family, (0.3, 1.5))
    return planned * plan + letters * step


# ---------------------------------------------------------------- at random, and from another


def sample(problem: Problem, rng: Random) -> Candidate:
    """A candidate drawn at random."""
    weights = (4, 5, 1, 0.3) if is_scarce(problem) else (2.5, 0.5, 6, 1)
    family = rng.choices(("pattern", "weave", "priority", "model"), weights)[0]
    if family == "weave":
        x = sample_weave(problem, rng)
    else:
        x = sample_model(rng) if family == "model" else sample_plan(problem, rng)
    return Candidate(family, x, in_seconds(problem, sample_rules(family, rng)))


def mutate(problem: Problem, parent: Candidate, rng: Random) -> Candidate:
    """The candidate, changed a little."""
    rules = mutate_rules(parent.family, parent.rules, rng)
    if parent.family in ("pattern", "priority"):
        return Candidate(parent.family, mutate_plan(problem, parent.x, rng), rules)
    if parent.family == "weave":
        return Candidate(parent.family, mutate_weave(problem, parent.x, rng), rules)
    if parent.family == "model":
        return Candidate(parent.family, mutate_model(parent.x, rng), rules)
    return Candidate(parent.family, tuple(max(0.0, v + rng.gauss(0, 0.2)) for v in parent.x), rules)


def in_seconds(problem: Problem, rules: Rules) -> Rules:
    """lead and w_first are drawn, and kept in order_seeds, in periods; the decoder wants seconds."""
    period = max(problem.work) / problem.microbatches
    return replace(rules, lead=rules.lead * period, w_first=rules.w_first * period)


def sample_rules(family: str, rng: Random) -> Rules:
    """Random rules for the family's decoder."""
    rules = Rules(fill=rng.choice((0.05, 0.3, 0.6, 1)), fill_end=rng.choice((0.3, 0.6, 1, 1)))
    if family == "priority":
        return replace(
            rules,
            lead=rng.choice((0, 0, 0.2, 0.5, 1, 99)),
            patience=rng.choice((0, 0.3, 0.6, 1, 2, 9)),
            w_first=rng.choice((-99, 0, 0, 0.5, 99)),
            spare=rng.choice((0, 0, 1, 2, 3)),
        )
    return replace(rules, ahead_f=rng.choice((0, 1, 2)), ahead_b=rng.random() < 0.5, guard=rng.random() < 0.5)


def mutate_rules(family: str, rules: Rules, rng: Random) -> Rules:
    """The rules with some of them moved."""
    if rng.random() < 0.3:
        rules = replace(rules, fill=min(1.2, max(0.0, rules.fill + rng.gauss(0, 0.2))))
    if rng.random() < 0.3:
        rules = replace(rules, fill_end=min(1.2, max(0.0, rules.fill_end + rng.gauss(0, 0.2))))
    if family == "priority" and rng.random() < 0.2:
        rules = replace(rules, spare=rng.choice((0, 0.5, 1, 1.5, 2, 3)))
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


# ---------------------------------------------------------------- known before


def seeds(problem: Problem) -> list[Candidate]:
    """The plans that long searches found for other problems with as many legs."""
    known = known_plans(count_legs(problem))
    return [Candidate(family, x, in_seconds(problem, Rules(*rules))) for family, rules, x in known]


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
    if any(a > b for a, b in pairwise(placement)):
        out += [Candidate("weave", x, Rules(fill, 0.3)) for x in plain_weaves(problem) for fill in (0.05, 0.6)]
    legs, period = count_legs(problem), max(problem.work) / problem.microbatches
    full = max(1.0, min(4.0, stretch_that_fills(problem, period)))
    if is_scarce(problem):
        plan = plain_plan(legs)
        return out + [Candidate("pattern", plan, Rules(fill, end)) for fill in (0.6, 0.9) for end in (0.3, 1.0)]
    for share in (1.0, 0.9):
        plan = plain_plan(legs, full * share)
        for lead, patience in ((0.5, 0.5), (1.0, 1.0), (0.0, 1.0)):
            for fill in (0.1, 0.5):
                out.append(Candidate("priority", plan, Rules(fill, 1.0, lead=lead * period, patience=patience)))
    return out
