"""The automatic scheduler: the order of F, B and W with the smallest bubble that keeps every rank within its limit.

Candidates of five families (order_patterns) are decoded on a shorter problem of 2.25 microbatches a rank, for what a pattern
loses at its start and end does not depend on how long it goes on. The best are varied, those that remain are decoded in full, and
single letters are moved next to idle gaps. The search stops at the lower bound or when its budget of work (counted, not timed) is spent: the same
input gives the same schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from time import perf_counter

from zbfx.errors import InputError
from zbfx.ir import CostModel, Schedule, Solution
from zbfx.passes.order_bounds import Bounds, lower_bounds
from zbfx.passes.order_decode import Outcome, Rules, dispatch
from zbfx.passes.order_patterns import (
    Candidate,
    decode,
    effort,
    fixed_candidates,
    mutate_model,
    mutate_plan,
    mutate_rules,
    plan_keys,
    sample_model,
    sample_plan,
    sample_rules,
)
from zbfx.passes.order_problem import INF, Problem, build_problem, to_schedule
from zbfx.passes.simulate import refuse_over_budget, simulate
from zbfx.verify import verify_schedule

OBJECTIVES = ("span", "makespan")
_POPULATION = 10
_FINALISTS = 6
_CLOSE = 1e-9  # relative distance to the bound that counts as reaching it

Scored = tuple[tuple[float, float], Candidate]


def order_auto(
    placement: Sequence[int],
    microbatches: int,
    costs: CostModel,
    *,
    objective: str = "span",
    w_parts: int = 1,
    seconds: float | None = None,
    seed: int = 0,
) -> Solution:
    """The best schedule found for the placement within `costs.limit`, with its lower bound.

    `seconds` scales the search: about that long on a 2 GHz core, but counted in work, not in time (default: 2 to 25, by size).
    """
    if objective not in OBJECTIVES:
        raise InputError(f"{objective=} must be one of {', '.join(OBJECTIVES)}")
    begin = perf_counter()
    problem = build_problem(placement, microbatches, costs, parts=w_parts)
    bounds = lower_bounds(problem)
    search = _Search(problem, objective, bounds, seed, 1e6 * (default_seconds(problem) if seconds is None else seconds))
    family, outcome = search.run()
    schedule = verify_schedule(to_schedule(problem, outcome.words, "auto"))
    refuse_over_budget(schedule, costs)
    return solution_of(schedule, costs, bounds, objective, w_parts, perf_counter() - begin, f"{family}: {search.story()}")


def solution_of(
    schedule: Schedule, costs: CostModel, bounds: Bounds, objective: str, parts: int, seconds: float, why: str
) -> Solution:
    """Puts a schedule, its simulated figures and its bounds together."""
    return Solution(schedule, costs, simulate(schedule, costs), bounds.span, bounds.makespan, objective, parts, why, seconds)


def default_seconds(problem: Problem) -> float:
    """2 seconds up to 8 ranks, 6.5 for 16, 20 for 32, never more than 25."""
    return min(25.0, 2.0 * max(1.0, problem.num_ranks / 8) ** 1.65)


class _Search:
    """State of one search: the short and the full problem, the budget left, the population (best first)."""

    def __init__(self, problem: Problem, objective: str, bounds: Bounds, seed: int, budget: float) -> None:
        self.full, self.objective, self.rng, self.budget = problem, objective, Random(seed), budget
        short = min(problem.microbatches, max(4, -(-9 * problem.num_ranks // 4)))
        self.short = replace(problem, microbatches=short)
        self.bound = lower_bounds(self.short).of(objective)
        self.full_bound = bounds.of(objective)
        self.spent, self.tried = 0.0, 0
        self.population: list[Scored] = []

    def run(self) -> tuple[str, Outcome]:
        """(family that won, its outcome on the full problem with words)."""
        for candidate in fixed_candidates(self.short):
            self.try_one(candidate)
        while self.spent < 0.35 * self.budget and not self.reached():
            self.try_one(self.sample())
        while self.spent < 0.9 * self.budget and not self.reached():
            self.try_one(self.vary())
        return self.finish()

    def story(self) -> str:
        """What the search did, for the user."""
        return f"{self.tried} orders tried at {self.short.microbatches} microbatches"

    def reached(self) -> bool:
        """Whether the best candidate meets the bound of the short problem."""
        return bool(self.population) and self.population[0][0][0] <= self.bound * (1 + _CLOSE)

    def try_one(self, candidate: Candidate) -> None:
        """Decodes and keeps the candidate if it is among the best; two with the same figures count as one."""
        self.spent += effort(self.short, candidate)
        self.tried += 1
        cost = decode(self.short, candidate).cost(self.objective)
        if cost[0] == INF or any(cost == known for known, _ in self.population):
            return
        self.population.append((cost, candidate))
        self.population.sort(key=lambda scored: scored[0])
        del self.population[_POPULATION:]

    def sample(self) -> Candidate:
        """A candidate drawn at random."""
        family = self.rng.choices(("pattern", "priority", "model"), (5, 4, 1))[0]
        x = sample_model(self.rng) if family == "model" else sample_plan(self.short, self.rng)
        return Candidate(family, x, self.scaled(sample_rules(family, self.rng)))

    def vary(self) -> Candidate:
        """One of the best, changed a little; now and then a new one."""
        if not self.population or self.rng.random() < 0.05:
            return self.sample()
        index = 0 if self.rng.random() < 0.5 else self.rng.randrange(len(self.population))
        parent = self.population[index][1]
        rules = mutate_rules(parent.family, parent.rules, self.rng)
        if parent.family in ("pattern", "priority"):
            return Candidate(parent.family, mutate_plan(self.short, parent.x, self.rng), rules)
        if parent.family == "model":
            return Candidate(parent.family, mutate_model(parent.x, self.rng), rules)
        return Candidate(parent.family, tuple(max(0.0, v + self.rng.gauss(0, 0.2)) for v in parent.x), rules)

    def scaled(self, rules: Rules) -> Rules:
        """lead and w_first are drawn in periods; the decoder wants seconds."""
        period = max(self.full.work) / self.full.microbatches
        return replace(rules, lead=rules.lead * period, w_first=rules.w_first * period)

    def finish(self) -> tuple[str, Outcome]:
        """The best of the population on the full problem; a plain dispatch, which always fits, where there is none."""
        best: tuple[tuple[float, float], str, Outcome] | None = None
        for _, candidate in self.population[:_FINALISTS]:
            outcome = decode(self.full, candidate, keep=True)
            cost = outcome.cost(self.objective)
            if cost[0] < INF and (best is None or cost < best[0]):
                best = (cost, candidate.family, outcome)
            if best is not None and best[0][0] <= self.full_bound * (1 + _CLOSE):
                break
        if best is None:
            legs = max(2, round(len(self.full.rank) / self.full.num_ranks))
            keys = plan_keys(self.full, (1.0,) + (1.0,) * legs + (0.0,) * (legs - 1) + (0.0, 0.5, 0.0, 0.5))
            return "priority", dispatch(self.full, keys, Rules(fill=0.5), keep=True)
        return best[1], best[2]
