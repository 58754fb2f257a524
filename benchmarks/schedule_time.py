"""Seconds that the search takes by size: python benchmarks/schedule_time.py [--sizes 8x64] [--limit 1.0] [--objective span].

For ranks x microbatches, linear and V: a fresh process searches with an empty cache, then asks again. "cold": seconds of the
search (the CPU's, so that other work on the machine counts little, and the clock's); "again": of the answer from the disk;
"bubble" and "gap" say what the seconds bought. Costs are those of the paper's 1.5B row, in milliseconds, divided evenly over
the stages; the limit is a share of ranks * bytes of F of a rank.

Exits 1 if a size that has a bound takes more seconds of the CPU, or the answer from the disk is another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

# (ranks, microbatches) -> seconds that the search may take; None: it has to come to an end.
SIZES: dict[tuple[int, int], float | None] = {
    (8, 24): 3.0,
    (8, 64): 3.0,
    (16, 128): 10.0,
    (32, 256): 30.0,
    (32, 1024): None,
    (128, 512): None,
}
PLACEMENTS = ("linear", "v")
TIMES, HOP, BYTES = (18.522, 18.086, 9.337), 0.601, (201216, -127488, -73728)  # of F, B and W of a rank's whole part


def main() -> int:
    """Measure every size and placement, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", help="such as 8x64,16x128 (default: all)")
    parser.add_argument("--limit", type=float, default=1.0, help="share of ranks * bytes of F of a rank (default: 1.0)")
    parser.add_argument("--objective", choices=("span", "makespan"), default="span")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # ranks, microbatches, placement: this process's own task
    args = parser.parse_args()
    if args.one:
        print(json.dumps(search_twice(int(args.one[0]), int(args.one[1]), args.one[2], args.limit, args.objective)))
        return 0
    sizes = SIZES
    if args.sizes:
        asked = [tuple(map(int, size.split("x"))) for size in args.sizes.split(",")]
        sizes = {(p, m): SIZES.get((p, m)) for p, m in asked}
    print("ranks  microbatches  placement   cold CPU   clock    bound   again    bubble     gap")
    missed = 0
    for (p, m), bound in sizes.items():
        for placement in PLACEMENTS:
            found = fresh(p, m, placement, args)
            kept = found["same"] and (bound is None or found["cpu"] <= bound)
            missed += not kept
            print(
                f"{p:5}  {m:12}  {placement:9}  {found['cpu']:7.2f} s  {found['clock']:6.2f} s  {bound or '-':>5}  "
                f"{found['again']:6.2f} s  {found['bubble']:7.2%}  {found['gap']:6.2%}{'' if kept else '  MISSED'}",
                flush=True,
            )
    return 1 if missed else 0


def fresh(p: int, m: int, placement: str, args: argparse.Namespace) -> dict[str, Any]:
    """One size in a process of its own, with a cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--limit", str(args.limit), "--objective", args.objective]
        done = subprocess.run(
            [*command, "--one", str(p), str(m), placement],
            env={**os.environ, "ZBFX_CACHE": cache, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def search_twice(p: int, m: int, name: str, share: float, objective: str) -> dict[str, Any]:
    """Search, then ask again."""
    from zbfx.ir import Cost, CostModel
    from zbfx.passes.order_any import order_any
    from zbfx.passes.placements import build_placement

    placement = build_placement(name, p)
    chunks = len(placement) // p
    cost = Cost(*(t / chunks for t in TIMES), *(b // chunks for b in BYTES))
    comm = tuple(tuple(0.0 if a == b else HOP for b in range(p)) for a in range(p))
    costs = CostModel((cost,) * len(placement), comm, (int(share * p * BYTES[0]),) * p)
    cpu, clock = time.process_time(), time.perf_counter()
    first = order_any("auto", placement, m, costs, objective=objective)
    cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    begin = time.process_time()
    second = order_any("auto", placement, m, costs, objective=objective)
    return {
        "cpu": cpu,
        "clock": clock,
        "again": time.process_time() - begin,
        "same": second.schedule == first.schedule,
        "bubble": getattr(first.timeline, f"bubble_{objective}"),
        "gap": first.gap,
    }


if __name__ == "__main__":
    sys.exit(main())
