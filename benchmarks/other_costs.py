"""What the known plans bring on costs that they were not found for: python benchmarks/other_costs.py [--count 24].

Random problems, seeded: 4 to 16 ranks, V or zigzag, 0.5 to 1 of p*M_B, times and links up to 40 % and a factor of 4 from the 12
profiles, a third with heavier ends, a third with a slow rank. Each is searched twice with the default budget: with the plans of
zbfx/passes/order_seeds.json, and without. Beside them the best fixed schedule that fits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from schedules import row_costs

import zbfx.passes.order_search as search
from zbfx.errors import ZbfxError
from zbfx.ir import Cost, CostModel
from zbfx.passes.order_fixed import FIXED, order_fixed
from zbfx.passes.placements import build_placement
from zbfx.passes.simulate import refuse_over_budget, simulate

Problem = tuple[str, tuple[int, ...], int, CostModel]  # (name, placement, microbatches, costs)


def main() -> None:
    """Prints a line per problem, then the medians; exit code 1 where the known plans lose on average."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data", help="folder with zero_bubble_rows.json")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows = json.loads((Path(args.data) / "zero_bubble_rows.json").read_text())["rows"]
    gains = []
    for name, placement, microbatches, costs in problems(rows, args.count, random.Random(args.seed)):
        known = search.order_auto(placement, microbatches, costs).timeline.bubble_span
        unaided = without_known_plans(placement, microbatches, costs)
        fixed = best_fixed(placement, microbatches, costs)
        gains.append(unaided - known)
        print(f"{name}: known plans {known:.2%}, without {unaided:.2%}, fixed {fixed}", flush=True)
    middle, mean = 100 * statistics.median(gains), 100 * statistics.mean(gains)
    print(f"points gained: median {middle:.2f}, mean {mean:.2f}, least {100 * min(gains):.2f}")
    sys.exit(statistics.mean(gains) < 0)


def problems(rows: list[dict[str, Any]], count: int, rng: random.Random) -> Iterator[Problem]:
    """Random problems."""
    for _ in range(count):
        p, (place, chunks) = rng.choice((4, 6, 8, 10, 12, 16)), rng.choice((("v", 2), ("zigzag", 4)))
        row = {**rng.choice(rows), "ranks": p}
        row |= {key: row[key] * rng.uniform(low, high) for key, low, high in (("T_B", 0.85, 1.4), ("T_W", 0.6, 1.3))}
        row["T_comm"] = row["T_F"] * rng.uniform(0.005, 0.08)
        share, m, kind = rng.choice((0.5, 0.6, 0.7, 0.8, 1.0)), p * rng.randint(2, 5), rng.choice(("even", "ends", "slow"))
        placement, costs = build_placement(place, p), row_costs(row, chunks, share)
        slow = rng.randrange(p)
        heavy = {"even": (), "ends": (0, len(placement) - 1), "slow": [s for s, r in enumerate(placement) if r == slow]}[kind]
        by = rng.uniform(1.1, 1.3)
        stages = tuple(heavier(cost, by) if s in heavy else cost for s, cost in enumerate(costs.stages))
        yield f"{place} p={p} m={m} {share}p {kind}", placement, m, replace(costs, stages=stages)


def heavier(cost: Cost, by: float) -> Cost:
    """The stage, slower."""
    return replace(cost, F=cost.F * by, B=cost.B * by, W=cost.W * by)


def without_known_plans(placement: tuple[int, ...], microbatches: int, costs: CostModel) -> float:
    """The bubble that the search finds from formulas and random plans alone."""
    kept, search.seeds = search.seeds, lambda problem: []
    try:
        return search.order_auto(placement, microbatches, costs).timeline.bubble_span
    finally:
        search.seeds = kept


def best_fixed(placement: tuple[int, ...], microbatches: int, costs: CostModel) -> str:
    """The smallest bubble of a fixed schedule for the placement within the limits."""
    found = []
    for name in FIXED:
        try:
            schedule = order_fixed(name, placement, microbatches)
            refuse_over_budget(schedule, costs)
        except ZbfxError:
            continue
        found.append((simulate(schedule, costs).bubble_span, name))
    return "{1} {0:.2%}".format(*min(found)) if found else "none fits"


if __name__ == "__main__":
    main()
