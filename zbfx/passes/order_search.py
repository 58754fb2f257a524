"""The automatic scheduler: the order of F, B and W with the smallest bubble that keeps every rank within its limit.

Candidates of several families (order_patterns) are decoded: first those known to do well elsewhere (order_seeds), then some at
random; the best are varied. Where decoding in full is dear, a shorter problem of 3 microbatches a rank stands for it: what a
pattern loses at its start and end does not depend on how long it goes on, and what it loses in between is read off its pace.
The search stops at the lower bound or when its budget of work (counted, not timed) is spent: the same input gives the same
schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from random import Random
from time import perf_counter

from zbfx.errors import InputError, MemoryBudgetError, ScheduleError
from zbfx.ir import CostModel, Schedule, Solution
from zbfx.passes.order_blocks import merge_blocks, split_blocks
from zbfx.passes.order_bounds import Bounds, lower_bounds
from zbfx.passes.order_decode import Cutoff, Outcome, Rules
from zbfx.passes.order_dispatch import dispatch
from zbfx.passes.order_fixed import order_fixed
from zbfx.passes.order_patterns import Candidate, decode, effort, fixed_candidates, mutate, sample, seeds
from zbfx.passes.order_plan import count_legs, plain_plan, plan_keys
from zbfx.passes.order_problem import INF, Problem, build_problem, check_placement, to_schedule, without_reserves
from zbfx.passes.simulate import refuse_over_budget, simulate
from zbfx.verify import verify_schedule

OBJECTIVES = ("span", "makespan")
_POPULATION = 8
# Shares of the budget up to which known candidates are tried, others are drawn at random, and the best are varied; then come
# the best in full.
_KNOWN, _FRESH, _VARIED = 0.8, 0.15, 0.92
_MANY_RANKS = 32
_DECODINGS, _LETTER = 500, 2.5  # where the budget is for so many decodings, of so many microseconds a letter, all are in full
_SPLIT = ("zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min")  # fixed schedules that split every backward
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
    check_placement(placement, microbatches, costs, w_parts)
    merged, merged_costs, size = merge_blocks(placement, costs)
    problem = build_problem(merged, microbatches, merged_costs, parts=w_parts)
    free = without_reserves(merged, merged_costs)
    bounds = lower_bounds(problem if free == merged_costs else build_problem(merged, microbatches, free, parts=w_parts))
    search = Search(problem, objective, bounds, seed, 1e6 * (default_seconds(problem.num_ranks) if seconds is None else seconds))
    family, outcome = search.run()
    schedule = verify_schedule(split_blocks(to_schedule(problem, outcome.words, "auto"), placement, size))
    refuse_over_budget(schedule, costs)
    found = solution_of(schedule, costs, bounds, objective, w_parts, 0.0, f"by {family}: {search.story()}")
    return replace(_or_as_defined(found), seconds=perf_counter() - begin)


def _or_as_defined(found: Solution) -> Solution:
    """The solution, or a fixed schedule that fits the limits and is better as it stands: no search shall lose to a formula.

    Whole backwards are left out: they never hold what B leaves to W, so neither search nor bound speaks of them.
    """
    objective, placement, costs = found.objective, found.schedule.placement, found.costs
    best = found
    for name in _SPLIT if found.gap > _CLOSE and found.w_parts == 1 else ():
        try:
            schedule = verify_schedule(order_fixed(name, placement, found.schedule.microbatches, costs=costs))
            refuse_over_budget(schedule, costs)
        except (InputError, ScheduleError, MemoryBudgetError):  # not for this placement, or too large
            continue
        timeline = simulate(schedule, costs)
        if getattr(timeline, objective) < getattr(best.timeline, objective):
            best = replace(
                found,
                schedule=replace(schedule, name="auto"),
                timeline=timeline,
                why=f"by {name} as defined, after {found.why[3:]}",
            )
    return best


def solution_of(
    schedule: Schedule, costs: CostModel, bounds: Bounds, objective: str, parts: int, seconds: float, why: str
) -> Solution:
    """Puts a schedule, its simulated figures and its bounds together."""
    return Solution(schedule, costs, simulate(schedule, costs), bounds.span, bounds.makespan, objective, parts, why, seconds)


def default_seconds(ranks: int) -> float:
    """2 seconds up to 8 ranks, 6 for 16, 18 for 32, never more than 25."""
    return min(25.0, 2.0 * max(1.0, ranks / 8) ** 1.6)


def _shorten(problem: Problem, objective: str, bounds: Bounds) -> Problem:
    """The problem with fewer microbatches: 3 a rank (9/4 for many ranks), or as many more as it takes to lose no more than
    in full. Up to 4 a rank there is little to save.

    A limit above what so few microbatches can fill would ask for another start and end than the full problem does.
    """
    m, p = problem.microbatches, problem.num_ranks
    if p <= _MANY_RANKS and m <= 4 * p:
        return problem
    lost = bounds.of(objective) - max(problem.work)
    short = max(4, 3 * p if p <= _MANY_RANKS else -(-9 * p // 4))
    while short < m:
        shorter = replace(problem, microbatches=short)
        work = max(shorter.work)
        if lower_bounds(shorter).of(objective) - work <= lost + 1e-3 * work / short:
            return shorter
        short += max(1, p // 2)
    return problem


def _in_turn(first: Sequence[Candidate], second: Sequence[Candidate]) -> list[Candidate]:
    """One of each, then the next of each: a small budget sees the best of both."""
    pairs = zip_longest(first, second)
    return [candidate for pair in pairs for candidate in pair if candidate is not None]


class Search:
    """State of one search: the short and the full problem, the budget left, the population (best first), the best in full."""

    def __init__(self, problem: Problem, objective: str, bounds: Bounds, seed: int, budget: float) -> None:
        self.full, self.objective, self.rng, self.budget = problem, objective, Random(seed), budget
        enough = len(problem.rank) * problem.microbatches * _DECODINGS * _LETTER <= budget
        self.short = problem if enough else _shorten(problem, objective, bounds)
        self.more = problem.microbatches - self.short.microbatches
        self.period = max(problem.work) / problem.microbatches
        self.bound = lower_bounds(self.short).of(objective) + self.more * self.period
        self.full_bound = bounds.of(objective)
        self.spent, self.tried = 0.0, 0
        self.population: list[Scored] = []
        self.best: Scored | None = None

    def run(self) -> tuple[str, Outcome]:
        """(family that won, its outcome on the full problem with words)."""
        for candidate in _in_turn(seeds(self.short), fixed_candidates(self.short)):
            if not self.reached() and (self.spent < _KNOWN * self.budget or not self.population):
                self.try_one(candidate)
        while self.spent < _FRESH * self.budget and not self.reached():
            self.try_one(sample(self.short, self.rng))
        while self.spent < _VARIED * self.budget and not self.reached():
            self.try_one(self.vary())
        for _, candidate in self.population:
            if not self.reached():
                self.try_in_full(candidate)
        return self.finish()

    def story(self) -> str:
        """What the search did, for the user."""
        return f"{self.tried} orders tried at {self.short.microbatches} microbatches"

    def reached(self) -> bool:
        """Whether the best schedule in full meets its bound."""
        return self.best is not None and self.best[0][0] <= self.full_bound * (1 + _CLOSE)

    def try_one(self, candidate: Candidate) -> None:
        """Decodes and keeps the candidate if it is among the best; the best so far is tried in full at once.

        Its cost is what the full problem would cost if all further microbatches came at the pace of the short one's middle.
        """
        full = len(self.population) == _POPULATION
        most = self.population[-1][0][0] - self.more * self.period if full else INF
        outcome = decode(self.short, candidate, cutoff=Cutoff(most, self.objective == "makespan"))
        self.spent += effort(self.short, candidate, outcome.letters)
        self.tried += 1
        longer = self.more * max(self.period, outcome.period)
        first, second = outcome.cost(self.objective)
        cost = (first + longer, second + longer)
        if first == INF or any(cost == known for known, _ in self.population):
            return
        if not self.more or cost[0] <= self.bound * (1 + _CLOSE):
            self.try_in_full(candidate)
        self.population.append((cost, candidate))
        self.population.sort(key=lambda scored: scored[0])
        del self.population[_POPULATION:]

    def try_in_full(self, candidate: Candidate) -> None:
        """Decodes on the full problem, and keeps the best."""
        cutoff = Cutoff(INF if self.best is None else self.best[0][0], self.objective == "makespan")
        outcome = decode(self.full, candidate, cutoff=cutoff)
        self.spent += effort(self.full, candidate, outcome.letters)
        cost = outcome.cost(self.objective)
        if cost[0] < INF and (self.best is None or cost < self.best[0]):
            self.best = (cost, candidate)

    def vary(self) -> Candidate:
        """One of the best, changed a little; now and then a new one."""
        if not self.population or self.rng.random() < 0.05:
            return sample(self.short, self.rng)
        index = 0 if self.rng.random() < 0.5 else self.rng.randrange(len(self.population))
        return mutate(self.short, self.population[index][1], self.rng)

    def finish(self) -> tuple[str, Outcome]:
        """The best schedule with its words; a plain dispatch, which always fits, where there is none."""
        if self.best is not None:
            return self.best[1].family, decode(self.full, self.best[1], keep=True)
        keys = plan_keys(self.full, plain_plan(count_legs(self.full)))
        return "priority", dispatch(self.full, keys, Rules(fill=0.5), keep=True)
