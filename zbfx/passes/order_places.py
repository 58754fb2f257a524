"""Placement search: which placement, among those that suit the stages, gives the smallest cost, and why.

Stages are dealt out in consecutive blocks: linear (one block a rank), V and interleaved (two), zigzag and interleaved
(four), as far as there are stages enough. Every one is searched briefly, the best two again with the full budget.
"""

from __future__ import annotations

from dataclasses import replace

from zbfx.errors import InputError, MemoryBudgetError
from zbfx.ir import CostModel, Solution
from zbfx.passes.order_search import default_seconds, order_auto
from zbfx.passes.placements import build_placement

_SHAPES = (("linear", 1), ("v", 2), ("zigzag", 4), ("interleaved", 2), ("interleaved", 4))
_BRIEF = 0.3  # share of the budget for the first look: known plans, and a few drawn at random
_FULL = 2  # placements that get the whole budget


def candidate_placements(num_stages: int, ranks: int) -> dict[str, tuple[int, ...]]:
    """name -> placement[stage]; blocks as even as can be."""
    out = {}
    for name, chunks in _SHAPES:
        shape = build_placement(name, ranks, chunks)
        if len(shape) <= num_stages:
            label = f"{name}-{chunks}" if name == "interleaved" else name
            out[label] = tuple(shape[stage * len(shape) // num_stages] for stage in range(num_stages))
    return out


def order_anywhere(
    microbatches: int,
    costs: CostModel,
    *,
    objective: str = "span",
    w_parts: int = 1,
    seconds: float | None = None,
    seed: int = 0,
) -> Solution:
    """The best schedule over the candidate placements; `why` lists what each of them gave. Links and limits are those of
    `costs`. seconds: the budget of one placement's search (default: by the number of ranks); all take up to four times it."""
    ranks = len(costs.limit)
    places = candidate_placements(len(costs.stages), ranks)
    if not places:
        raise InputError(f"{len(costs.stages)} stages cannot fill {ranks} ranks: use at most as many ranks as stages")
    whole = default_seconds(ranks) if seconds is None else seconds
    found: dict[str, Solution] = {}
    refused: dict[str, MemoryBudgetError] = {}

    def look(name: str, budget: float) -> None:
        try:
            solution = order_auto(
                places[name], microbatches, costs, objective=objective, w_parts=w_parts, seconds=budget, seed=seed
            )
        except MemoryBudgetError as e:
            refused[name] = e
            return
        if name not in found or _cost(solution) < _cost(found[name]):
            found[name] = solution

    for name in places:
        look(name, whole * _BRIEF)
    if not found:
        raise next(iter(refused.values()))
    for name in sorted(found, key=lambda n: _cost(found[n]))[:_FULL]:
        if found[name].gap > 0:
            look(name, whole)
    best = min(found, key=lambda n: _cost(found[n]))
    ranking = ", ".join(f"{n} {_bubble(found[n]):.2%}" for n in sorted(found, key=lambda n: _cost(found[n])))
    over = f"; over the limit: {', '.join(refused)}" if refused else ""
    return replace(found[best], why=f"placement {best}: bubbles {ranking}{over}; {found[best].why}")


def _cost(solution: Solution) -> float:
    value: float = getattr(solution.timeline, solution.objective)
    return value


def _bubble(solution: Solution) -> float:
    value: float = getattr(solution.timeline, f"bubble_{solution.objective}")
    return value
