"""Proof of optimality: the whole schedule as one constraint problem for OR-Tools' CP-SAT (`pip install zbfx[exact]`).

Variables are the starts of F, B and W. Per rank they do not overlap; per stage each kind runs in microbatch order; F, B
and W follow
their dependencies with hops between ranks. Memory is a cumulative resource: an activation is held from the start of its F to
the end of its B, what W keeps until the end of W. Seconds become whole ticks rounded down, so that the proven bound holds for
the real costs; the order found is simulated with the real costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd, lcm
from time import perf_counter
from typing import Any

from zbfx.errors import InputError, MemoryBudgetError
from zbfx.ir import Action, CostModel, Schedule, Solution
from zbfx.passes.order_bounds import Bounds, lower_bounds
from zbfx.passes.order_problem import INF, Problem, build_problem
from zbfx.passes.order_search import order_auto, solution_of
from zbfx.passes.simulate import refuse_over_budget
from zbfx.verify import verify_schedule

_TICKS = 20_000  # the longest schedule in ticks, where the seconds have no small common unit


def order_exact(
    placement: Sequence[int],
    microbatches: int,
    costs: CostModel,
    *,
    objective: str = "span",
    seconds: float = 30.0,
    seed: int = 0,
    workers: int = 2,
) -> Solution:
    """The optimum, or the best found within `seconds` with its proven bound; starts from `order_auto`'s answer."""
    begin = perf_counter()
    cp_model = _import_cp_sat()
    start = order_auto(placement, microbatches, costs, objective=objective, seconds=min(2.0, seconds / 4), seed=seed)
    problem = build_problem(placement, microbatches, costs)
    if start.gap <= 1e-9:
        return _result(start.schedule, start, perf_counter() - begin, start.bound_span, "the search met the lower bound: optimal")
    model = _Model(cp_model, problem, costs, objective, start)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.1, seconds - (perf_counter() - begin))
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    status = solver.Solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return _result(start.schedule, start, perf_counter() - begin, None, "no better order found in time: auto's answer")
    schedule = verify_schedule(model.read(solver))
    proven = solver.BestObjectiveBound() * model.tick
    try:
        refuse_over_budget(schedule, costs)
    except MemoryBudgetError:  # the solver leaves open in which order actions of no length stand, and so what is held between
        return _result(start.schedule, start, perf_counter() - begin, proven, "auto's answer, with the bound proven for it")
    why = "proven optimal" if status == cp_model.OPTIMAL else f"best found in {seconds:g} s, with its proven bound"
    return _result(schedule, start, perf_counter() - begin, proven, why)


def _result(schedule: Schedule, start: Solution, took: float, proven: float | None, why: str) -> Solution:
    bounds = Bounds(start.bound_span, start.bound_makespan)
    if proven is not None:
        bounds = replace(bounds, **{start.objective: max(bounds.of(start.objective), proven)})
    new = solution_of(replace(schedule, name="exact"), start.costs, bounds, start.objective, 1, took, why)
    kept = replace(start, schedule=replace(start.schedule, name="exact"), seconds=took, why=why)
    better = getattr(new.timeline, start.objective) <= getattr(start.timeline, start.objective)
    return new if better else replace(kept, bound_span=bounds.span, bound_makespan=bounds.makespan)


def _import_cp_sat() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as e:
        raise InputError("schedule='exact' needs OR-Tools: pip install 'zbfx[exact]'") from e
    return cp_model


def _tick(problem: Problem, horizon: float) -> float:
    """Seconds of one tick: the common unit of all times where it is not too small, else the horizon in `_TICKS`."""
    times = [Fraction(x).limit_denominator(10_000) for x in (*problem.seconds, *problem.w_seconds, *problem.hop) if x > 0]
    exact = all(
        abs(float(f) - x) < 1e-12 * max(1.0, x)
        for f, x in zip(times, (x for x in (*problem.seconds, *problem.w_seconds, *problem.hop) if x > 0), strict=True)
    )
    if not times:
        return 1.0
    scale = lcm(*(f.denominator for f in times))
    unit = Fraction(gcd(*(int(f * scale) for f in times)), scale)
    return float(unit) if exact and horizon / float(unit) < 10 * _TICKS else horizon / _TICKS


class _Model:
    """The CP-SAT model and its variables by (stage, kind, microbatch)."""

    def __init__(self, cp_model: Any, problem: Problem, costs: CostModel, objective: str, start: Solution) -> None:
        self.problem, self.objective = problem, objective
        horizon = start.timeline.makespan
        self.tick = _tick(problem, horizon)
        self.model = cp_model.CpModel()
        self.limit = int(horizon / self.tick) + 1
        self.starts: dict[tuple[int, str, int], Any] = {}
        self.ends: dict[tuple[int, str, int], Any] = {}
        self.intervals: list[list[Any]] = [[] for _ in range(problem.num_ranks)]
        self._add_actions()
        self._add_dependencies()
        for rank in range(problem.num_ranks):
            self.model.AddNoOverlap(self.intervals[rank])
            self._add_memory(rank)
        self._add_objective(lower_bounds(problem).of(objective), getattr(start.timeline, objective))
        self._add_hints(start)

    def ticks(self, seconds: float) -> int:
        """Whole ticks, rounded down (a hair of rounding error forgiven)."""
        return int(seconds / self.tick + 1e-6)

    def length(self, stage: int, kind: str) -> int:
        """Ticks of an action."""
        problem = self.problem
        if kind == "W":
            return self.ticks(problem.w_seconds[stage])
        return self.ticks(problem.seconds[stage if kind == "F" else 2 * problem.num_stages - 1 - stage])

    def _add_actions(self) -> None:
        for stage, rank in enumerate(self.problem.placement):
            for kind in "FBW":
                length = self.length(stage, kind)
                for mb in range(self.problem.microbatches):
                    key = (stage, kind, mb)
                    start = self.model.NewIntVar(0, self.limit, f"{stage}{kind}{mb}")
                    self.starts[key], self.ends[key] = start, start + length
                    self.intervals[rank].append(self.model.NewFixedSizeIntervalVar(start, length, ""))
                    if mb:
                        self.model.Add(start >= self.ends[stage, kind, mb - 1])

    def _add_dependencies(self) -> None:
        problem, stages = self.problem, self.problem.num_stages
        for mb in range(problem.microbatches):
            for stage in range(stages):
                if stage:
                    self.model.Add(
                        self.starts[stage, "F", mb] >= self.ends[stage - 1, "F", mb] + self.ticks(problem.hop[stage - 1])
                    )
                    hop = self.ticks(problem.hop[2 * stages - 1 - stage])
                    self.model.Add(self.starts[stage - 1, "B", mb] >= self.ends[stage, "B", mb] + hop)
                self.model.Add(self.starts[stage, "W", mb] >= self.ends[stage, "B", mb])
            self.model.Add(self.starts[stages - 1, "B", mb] >= self.ends[stages - 1, "F", mb])

    def _add_memory(self, rank: int) -> None:
        problem = self.problem
        if problem.room[rank] == INF:
            return
        intervals, demands = [], []
        for stage in (s for s, home in enumerate(problem.placement) if home == rank):
            whole = int(problem.memory[stage])
            kept = whole + int(problem.memory[2 * problem.num_stages - 1 - stage])
            for mb in range(problem.microbatches):
                f, b, w = self.starts[stage, "F", mb], self.ends[stage, "B", mb], self.ends[stage, "W", mb]
                for first, end, demand in ((f, b, whole), (b, w, kept)):
                    size = self.model.NewIntVar(0, self.limit, "")
                    intervals.append(self.model.NewIntervalVar(first, size, end, ""))
                    demands.append(demand)
        self.model.AddCumulative(intervals, demands, int(problem.room[rank]))

    def _add_objective(self, bound: float, found: float) -> None:
        problem, last = self.problem, self.problem.microbatches - 1
        cost = self.model.NewIntVar(int(bound / self.tick - 1e-6), int(found / self.tick + 1), "cost")
        for stage, rank in enumerate(problem.placement):
            first = min(s for s, home in enumerate(problem.placement) if home == rank)
            begin = self.starts[first, "F", 0] if self.objective == "span" else 0
            self.model.Add(cost >= self.ends[stage, "W", last] - begin)
        self.model.Minimize(cost)

    def _add_hints(self, start: Solution) -> None:
        origin = min(rank[0].start for rank in start.timeline.spans)
        for rank in start.timeline.spans:
            for span in rank:
                a = span.action
                self.model.AddHint(self.starts[a.stage, a.kind, a.mb], int((span.start - origin) / self.tick + 1e-6))

    def read(self, solver: Any) -> Schedule:
        """The order of the solution; actions of no length keep their dependencies' order."""
        ranks = []
        for rank in range(self.problem.num_ranks):
            own = [key for key in self.starts if self.problem.placement[key[0]] == rank]
            own.sort(
                key=lambda key: (
                    solver.Value(self.starts[key]),
                    solver.Value(self.ends[key]),
                    "FBW".index(key[1]),
                    key[2],
                    _depth(key),
                )
            )
            ranks.append(tuple(Action(stage, kind, mb) for stage, kind, mb in own))  # type: ignore[arg-type]
        return Schedule(self.problem.placement, tuple(ranks), "exact")


def _depth(key: tuple[int, str, int]) -> int:
    return key[0] if key[1] == "F" else -key[0]
