"""Plans to start the search from (order_seeds.json): what long searches found on profiled costs of 8, 16 and 32 ranks.

They hold no schedule (a compiled copy of the search, not kept here, found them; benchmarks/find_plans.py looks for more). A plan
has no unit (hops in multiples of the problem's own or in cells, waits in periods), and each is decoded with the costs and limits
at hand like any other candidate; on other costs it is a start that the search varies.

One plan a line. legs: 2 per stage of a rank; rules: the arguments of Rules, times in periods; plan: as in order_plan or, for
"weave", order_weave. found_for: the placement, the limit in p*M_B (w: with W in parts, mk: for the makespan), the profile (its
number among the 12 of benchmarks/schedules.py), and the bubble there in percent. Kept are those that matter for one of the 12, or
for one of 40 problems with other ranks, times, links and unequal stages, the most useful first.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

Seed = tuple[str, tuple[Any, ...], tuple[float, ...]]  # (family, rules, plan)


@cache
def known_plans(legs: int) -> tuple[Seed, ...]:
    """The plans for placements with so many legs."""
    rows = json.loads(files("zbfx.passes").joinpath("order_seeds.json").read_text())
    return tuple((row["family"], tuple(row["rules"]), tuple(row["plan"])) for row in rows if row["legs"] == legs)
