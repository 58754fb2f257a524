"""One door to all schedulers: a fixed name, `auto` or `exact`, on a placement by name, by list, or searched.

zb-1p and zb-2p are `auto` with the limit set to p, or 2p, times the bytes of F of the rank's whole part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from zbfx.errors import InputError
from zbfx.ir import CostModel, Solution
from zbfx.passes.order_bounds import lower_bounds
from zbfx.passes.order_cache import cached
from zbfx.passes.order_exact import order_exact
from zbfx.passes.order_fixed import FIXED, order_fixed
from zbfx.passes.order_places import order_anywhere
from zbfx.passes.order_problem import build_problem, without_reserves
from zbfx.passes.order_search import OBJECTIVES, order_auto, solution_of
from zbfx.passes.simulate import refuse_over_budget

METHODS = (*FIXED, "auto", "exact", "zb-1p", "zb-2p")


def order_any(
    method: str,
    placement: Sequence[int] | None,
    microbatches: int,
    costs: CostModel,
    *,
    objective: str = "span",
    w_parts: int = 1,
    seconds: float | None = None,
    seed: int = 0,
) -> Solution:
    """The schedule that `method` gives within the limits. placement None: searched, for auto and exact.

    seconds: the search's budget (auto: by size; exact: 30). Searches are cached on disk by their whole input.
    """
    if method not in METHODS:
        raise InputError(f"{method!r} is no scheduling method; there are {', '.join(METHODS)}")
    if objective not in OBJECTIVES:
        raise InputError(f"{objective=} must be one of {', '.join(OBJECTIVES)}")
    if method in FIXED:
        if placement is None:
            raise InputError(f"{method} needs a placement: name one, or search it with method auto")
        return _fixed(method, placement, microbatches, costs, objective)
    if method in ("zb-1p", "zb-2p"):
        if placement is None:
            raise InputError(f"{method} needs a placement, for its limit is per rank")
        costs, method = replace(costs, limit=share_limits(placement, costs, float(method[3]))), "auto"
    question = {
        "method": method,
        "placement": None if placement is None else list(placement),
        "microbatches": microbatches,
        "objective": objective,
        "w_parts": w_parts,
        "seconds": seconds,
        "seed": seed,
    }

    def search() -> Solution:
        if placement is None:
            found = order_anywhere(microbatches, costs, objective=objective, w_parts=w_parts, seconds=seconds, seed=seed)
            if method == "auto":
                return found
            proven = order_exact(
                found.schedule.placement, microbatches, costs, objective=objective, seconds=seconds or 30.0, seed=seed
            )
            return replace(proven, why=f"{proven.why}; {found.why}")
        if method == "auto":
            return order_auto(placement, microbatches, costs, objective=objective, w_parts=w_parts, seconds=seconds, seed=seed)
        return order_exact(placement, microbatches, costs, objective=objective, seconds=seconds or 30.0, seed=seed)

    return cached(question, costs, search)


def share_limits(placement: Sequence[int], costs: CostModel, share: float) -> tuple[int, ...]:
    """share * p * bytes of F of the largest rank's whole part, the same for every rank."""
    ranks = 1 + max(placement)
    held = [sum(costs.stages[s].bytes_F for s, home in enumerate(placement) if home == r) for r in range(ranks)]
    return (int(share * ranks * max(held) + 1e-6),) * ranks


def _fixed(method: str, placement: Sequence[int], microbatches: int, costs: CostModel, objective: str) -> Solution:
    begin = perf_counter()
    schedule = order_fixed(method, placement, microbatches, costs=costs)
    refuse_over_budget(schedule, costs)
    bounds = lower_bounds(build_problem(placement, microbatches, without_reserves(placement, costs)))
    return solution_of(schedule, costs, bounds, objective, 1, perf_counter() - begin, "as defined")
