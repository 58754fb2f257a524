"""Searches long for plans to add to zbfx/passes/order_seeds.json: python benchmarks/find_plans.py --data DIR --seconds 600.

For each placement, limit and profile asked for, the search of `order_auto` runs with the given budget; where its best is a plan
that beats every known one, it is printed as a line for the table. The plans there now were found by a compiled copy of the same
search, which is not kept here.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

from schedules import row_costs

from zbfx.passes.order_bounds import lower_bounds
from zbfx.passes.order_patterns import Candidate, decode, seeds
from zbfx.passes.order_plan import count_legs
from zbfx.passes.order_problem import INF, Problem, build_problem
from zbfx.passes.order_search import Search
from zbfx.passes.placements import build_placement


def main() -> None:
    """Goes through the settings and the profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data", help="folder with zero_bubble_rows.json")
    parser.add_argument("--rows", default=",".join(map(str, range(12))))
    settings = "linear:2,v:0.55,v:0.75,v:1,v:1.5,zigzag:0.5,zigzag:0.75,zigzag:1"
    parser.add_argument("--settings", default=settings, help="placement:share of p*M_B")
    parser.add_argument("--objective", default="span", choices=("span", "makespan"))
    parser.add_argument("--w-parts", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0)
    args = parser.parse_args()
    data = json.loads((Path(args.data) / "zero_bubble_rows.json").read_text())["rows"]
    for setting in args.settings.split(","):
        for i in map(int, args.rows.split(",")):
            look(setting, i, data[i], args)


def look(setting: str, i: int, row: dict[str, Any], args: argparse.Namespace) -> None:
    """One search; prints what it improved."""
    place, share = setting.split(":")
    costs = row_costs(row, {"linear": 1, "v": 2, "zigzag": 4}[place], float(share))
    problem = build_problem(build_placement(place, row["ranks"]), row["microbatches"], costs, parts=args.w_parts)
    known = min((decode(problem, candidate).cost(args.objective)[0] for candidate in seeds(problem)), default=INF)
    search = Search(problem, args.objective, lower_bounds(problem), 0, 1e6 * args.seconds)
    search.run()
    cost, winner = search.best or ((INF, INF), None)
    work = max(problem.work)
    print(f"# {setting}, profile {i}: {100 * (1 - work / known):.2f} known, {100 * (1 - work / cost[0]):.2f} now", flush=True)
    if winner is not None and winner.family in ("pattern", "weave", "priority") and cost[0] < known:
        bubble = 100 * (1 - work / cost[0])
        mark = ("w" if args.w_parts > 1 else "") + ("mk" if args.objective == "makespan" else "")
        print(as_line(problem, winner, f"{setting}{mark}, profile {i}: {bubble:.2f}"), flush=True)


def as_line(problem: Problem, candidate: Candidate, found_for: str) -> str:
    """The candidate as a line of the file, times of its rules in periods."""
    period = max(problem.work) / problem.microbatches
    fill, fill_end, ahead_f, ahead_b, guard, lead, patience, w_first, spare = astuple(candidate.rules)
    rules = (fill, fill_end, ahead_f, ahead_b, guard, lead / period, patience, w_first / period, spare)
    fields = {"legs": count_legs(problem), "found_for": found_for, "family": candidate.family}
    return json.dumps({**fields, "rules": [_short(v) for v in rules], "plan": [_short(v) for v in candidate.x]})


def _short(value: float) -> float:
    return value if isinstance(value, (bool, int)) else round(value, 5)


if __name__ == "__main__":
    main()
