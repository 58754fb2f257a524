"""Measures the scheduler against the published figures: python benchmarks/schedules.py --data DIR [--points 1,2] [--rows 0,3].

Every line gives what was found, what it is held against, the lower bound, and seconds of processor time. Points:
1 the paper's columns, 2 V under memory limits, 3 with a barrier at 1.5p, 4 placement free at 1p, 5 placement free at 0.5p,
6 the peers' schedules, 7 proofs, 8 time and size, 9 unequal stages.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from zbfx.ir import Cost, CostModel, Solution
from zbfx.passes.order_exact import order_exact
from zbfx.passes.order_fixed import order_fixed
from zbfx.passes.order_places import order_anywhere
from zbfx.passes.order_search import order_auto
from zbfx.passes.placements import build_placement
from zbfx.passes.simulate import simulate

V_BARRIER = (5.9, 4.6, 2.4, 5.4, 4.2, 2.2, 5.9, 4.5, 2.3, 6.1, 4.6, 2.4)
ZIGZAG_BARRIER = (3.3, 2.5, 1.4, 2.9, 2.3, 1.2, 3.2, 2.5, 1.3, 3.4, 2.6, 1.4)
FREE_HALF = (27.6, 24.9, 20.5, 22.0, 18.9, 11.6, 23.2, 19.9, 15.3, 22.0, 19.2, 14.2)
PEERS = {"1F1B": "linear", "ZB-H1": "linear", "ZB-H2": "linear", "ZB-heur-1p": "linear", "ZB-heur-2p": "linear"}
PEERS |= {"1F1B-V": "v", "V-Half": "v", "V-Min": "v", "ZB-V": "v"}


class Report:
    """Prints a line per measurement and counts what was reached."""

    def __init__(self) -> None:
        self.kept: dict[str, list[bool]] = {}

    def line(self, point: str, what: str, found: float, target: float, bound: float, seconds: float, note: str = "") -> None:
        """found and target in percent, smaller is better."""
        ok = found <= target + 1e-9
        self.kept.setdefault(point, []).append(ok)
        mark = "ok  " if ok else "MISS"
        print(f"{mark} {point} {what}: {found:.3f} (target {target:.3f}, bound {bound:.3f}) {seconds:.1f} s {note}", flush=True)

    def summary(self) -> None:
        """Reached of all, per point."""
        for point, kept in self.kept.items():
            print(f"{point}: {sum(kept)} of {len(kept)}")


def row_costs(row: dict[str, Any], chunks: int, share: float) -> CostModel:
    """One of the paper's rows, dealt out evenly; the limit is share * p * M_B."""
    p = row["ranks"]
    bytes_f, bytes_w = row["M_B"] // chunks, row["M_W"] // chunks
    cost = Cost(row["T_F"] / chunks, row["T_B"] / chunks, row["T_W"] / chunks, bytes_f, bytes_w - bytes_f, -bytes_w)
    return CostModel((cost,) * (p * chunks), even_links(p, row["T_comm"]), (int(share * p * row["M_B"] + 1e-6),) * p)


def even_links(p: int, seconds: float) -> tuple[tuple[float, ...], ...]:
    """The same time between any two ranks."""
    return tuple(tuple(0.0 if a == b else seconds for b in range(p)) for a in range(p))


def bubbles(solution: Solution, objective: str) -> tuple[float, float]:
    """Bubble found, and that of the lower bound, in percent."""
    found: float = getattr(solution.timeline, objective)
    bound: float = getattr(solution, f"bound_{objective}")
    work = found * (1 - getattr(solution.timeline, f"bubble_{objective}"))
    return 100 * (1 - work / found), 100 * max(0.0, 1 - work / bound)


def timed(call: Callable[[], Solution]) -> tuple[Solution, float]:
    """The answer and the processor seconds it took."""
    begin = time.process_time()
    solution = call()
    return solution, time.process_time() - begin


def auto(row: dict[str, Any], place: str, share: float, objective: str, args: argparse.Namespace) -> tuple[float, float, float]:
    """(bubble, bound, seconds) of the search on a row, in percent."""
    chunks = {"linear": 1, "v": 2, "zigzag": 4}[place]
    costs = row_costs(row, chunks, share)
    placement = build_placement(place, row["ranks"])
    found, seconds = timed(
        lambda: order_auto(placement, row["microbatches"], costs, objective=objective, w_parts=args.w_parts, seconds=args.seconds)
    )
    return *bubbles(found, objective), seconds


def point1(rows: Iterable[tuple[int, dict[str, Any]]], args: argparse.Namespace, report: Report) -> None:
    """The fixed schedules and the search on a linear placement against the paper."""
    for i, row in rows:
        p, m, paper = row["ranks"], row["microbatches"], row["paper_bubble"]
        for name, column in (("1f1b", "1F1B"), ("zb-h1", "ZB-H1"), ("zb-h2", "ZB-H2")):
            found = simulate(order_fixed(name, build_placement("linear", p), m), replace(row_costs(row, 1, 1), limit=(None,) * p))
            report.line("1", f"row {i} {name} distance", 100 * abs(round(found.bubble_span, 4) - paper[column]), 0.0001, 0, 0)
        v = row["interleaved_chunks"]
        costs = replace(row_costs(row, v, 1), limit=(None,) * p)
        found = simulate(order_fixed("interleaved-1f1b", build_placement("interleaved", p, v), m), costs)
        report.line("1", f"row {i} interleaved distance", 100 * abs(found.bubble_span - paper["1F1B-I"]), 0.4, 0, 0)
        for share, column in ((1, "ZB-1p"), (2, "ZB-2p")):
            bubble, bound, seconds = auto(row, "linear", share, "span", args)
            report.line("1", f"row {i} linear {share}p", round(bubble, 2), 100 * paper[column], bound, seconds)


def point2(rows: Iterable[tuple[int, dict[str, Any]]], args: argparse.Namespace, report: Report) -> None:
    """V under four limits against the peers and against zero."""
    for i, row in rows:
        peer, p = row["peer_measured"], row["ranks"]
        wanted = [(1.0, 100 * peer["ZB-V-1p"]["span_bubble"] + 0.0005), (1.5, 0.5), (2.0, 0.05)]
        wanted += [((p / 2 + 1) / p, 100 * peer["V-Half"]["span_bubble"])] if "V-Half" in peer else []
        for share, target in wanted:
            bubble, bound, seconds = auto(row, "v", share, "span", args)
            report.line("2", f"row {i} V {share:.4g}p", bubble, target, bound, seconds)


def point3(rows: Iterable[tuple[int, dict[str, Any]]], args: argparse.Namespace, report: Report) -> None:
    """Makespan at 1.5p."""
    for i, row in rows:
        for place, targets in (("v", V_BARRIER), ("zigzag", ZIGZAG_BARRIER)):
            bubble, bound, seconds = auto(row, place, 1.5, "makespan", args)
            report.line("3", f"row {i} {place} 1.5p with barrier", round(bubble, 1), targets[i], bound, seconds, f"{bubble:.3f}")


def point4(rows: Iterable[tuple[int, dict[str, Any]]], args: argparse.Namespace, report: Report) -> None:
    """Placement searched at 1p."""
    for i, row in rows:
        target = 100 * row["peer_measured"]["ZB-V-1p"]["span_bubble"]
        free(i, row, 1.0, "4 (never above ZB-V)", target + 0.0005, args, report, 0.8 * target)


def point5(rows: Iterable[tuple[int, dict[str, Any]]], args: argparse.Namespace, report: Report) -> None:
    """Placement searched at half of p: with whole Ws, and where that is not enough with Ws in two parts."""
    for i, row in rows:
        if not free(i, row, 0.5, "5", FREE_HALF[i] + 0.05, args, report):
            free(i, row, 0.5, "5 (W in 2 parts)", FREE_HALF[i] + 0.05, args, report, parts=2)


def free(
    i: int,
    row: dict[str, Any],
    share: float,
    point: str,
    target: float,
    args: argparse.Namespace,
    report: Report,
    stretch: float | None = None,
    parts: int | None = None,
) -> bool:
    """Placement searched over four stages a rank; `stretch` is a second, harder target. Whether the first was reached."""
    costs = row_costs(row, 4, share)
    found, seconds = timed(
        lambda: order_anywhere(row["microbatches"], costs, w_parts=parts or args.w_parts, seconds=args.seconds)
    )
    bubble, bound = bubbles(found, "span")
    report.line(point, f"row {i} {share}p free", bubble, target, bound, seconds, found.why.split(";")[0])
    if stretch is not None:
        report.line("4 (0.8 of ZB-V)", f"row {i}", bubble, stretch, bound, 0)
    return bubble <= target


def point6(args: argparse.Namespace, report: Report) -> None:
    """Every line of the peers' CSV, with the same placement and limit."""
    with (Path(args.data) / "peer_schedules.csv").open() as file:
        peers = list(csv.DictReader(file))
    answers: dict[tuple[Any, ...], tuple[float, float]] = {}
    for n, peer in enumerate(peers):
        if args.peers and not args.peers[0] <= n < args.peers[1]:
            continue
        question = peer_question(peer)
        if question not in answers:
            answers[question] = peer_answer(*question, args)
        span, seconds = answers[question]
        target = 100 * float(peer["span"]) * 1.001
        name = f"{n} {peer['grid']} p={peer['p']} m={peer['m']} {peer['method']} {peer['limit_in_p_M_B']}"
        report.line("6", name, 100 * span, target, 0, seconds, f"{100 * (span / float(peer['span']) - 1):+.2f}%")


def peer_question(peer: dict[str, str]) -> tuple[Any, ...]:
    """(placement, chunks, ranks, microbatches, times, comm, bytes, limit) that gives the search what the peer had."""
    method, p = peer["method"], int(peer["p"])
    chunks = int(method.split("v=")[1].rstrip(")")) if "v=" in method else 2 if PEERS[method] == "v" else 1
    place = "interleaved" if "v=" in method else PEERS[method]
    sizes = tuple(12 * int(peer[f"mem_{k}"]) for k in "FBW")
    share = float(peer["limit_in_p_M_B"] or peer["peak_in_p_M_B"])
    unit = sizes[0] // chunks
    limit = share * p * sizes[0]
    limit = round(limit / unit) * unit if abs(limit / unit - round(limit / unit)) < 0.01 * chunks else int(limit * 1.0001) + 1
    times = tuple(float(peer[f"T_{k}"]) for k in "FBW")
    return place, chunks, p, int(peer["m"]), times, float(peer["T_comm"]), sizes, limit


def peer_answer(
    place: str, chunks: int, p: int, m: int, times: Any, comm: float, sizes: Any, limit: int, args: Any
) -> tuple[float, float]:
    """(span, seconds) of the search."""
    cost = Cost(*(t / chunks for t in times), *(s // chunks for s in sizes))
    costs = CostModel((cost,) * (p * chunks), even_links(p, comm), (limit,) * p)
    found, seconds = timed(lambda: order_auto(build_placement(place, p, chunks), m, costs, seconds=args.seconds))
    return found.timeline.span, seconds


def point7(args: argparse.Namespace, report: Report) -> None:
    """Known optima, proven."""

    def solve(place: str, share: float, m: int) -> tuple[Solution, float]:
        chunks = 2 if place == "v" else 1
        cost = Cost(20 / chunks, 20 / chunks, 20 / chunks, 4 // chunks, 0, -4 // chunks)
        costs = CostModel((cost,) * (4 * chunks), even_links(4, 2.0), (int(share * 16),) * 4)
        begin = time.perf_counter()
        return order_exact(build_placement(place, 4), m, costs, seconds=120), time.perf_counter() - begin

    linear = {1: (312, 444, 564, 804), 2: (312, 392, 484, 724)}
    cases = [("linear", share, m, best) for share, spans in linear.items() for m, best in zip((4, 6, 8, 12), spans, strict=True)]
    for place, share, m, best in [*cases, ("v", 0.5, 4, 386)]:
        solution, seconds = solve(place, share, m)
        report.line("7", f"{place} {share}p m={m}", solution.timeline.span, best, solution.bound_span, seconds, solution.why)


def point8(args: argparse.Namespace, report: Report) -> None:
    """Processor time of cold searches."""
    for p, m, most in ((8, 64, 3), (16, 128, 10), (32, 256, 30), (8, 1024, 60), (128, 256, 120)):
        row = {"ranks": p, "microbatches": m, "T_F": 10.4, "T_B": 10.2, "T_W": 7.7, "T_comm": 0.4, "M_B": 454656, "M_W": 196608}
        bubble, bound, seconds = auto(row, "v", 0.8, "span", args)
        report.line("8", f"p={p} m={m} V 0.8p seconds", seconds, most, bound, seconds, f"bubble {bubble:.2f}")


def point9(args: argparse.Namespace, report: Report) -> None:
    """Unequal stages: the search with the real costs against the search with the median cost, both simulated with the real
    ones."""
    rng = random.Random(0)
    for n in range(12):
        p, place = rng.choice((4, 8)), rng.choice(("linear", "v"))
        placement = build_placement(place, p)
        costs = unequal_costs(rng, placement, p)
        median = tuple(statistics.median(getattr(c, k) for c in costs.stages) for k in ("F", "B", "W"))
        links = statistics.median(x for a, row in enumerate(costs.comm) for b, x in enumerate(row) if a != b)
        flat = replace(
            costs,
            stages=tuple(replace(c, F=median[0], B=median[1], W=median[2]) for c in costs.stages),
            comm=even_links(p, links),
        )
        begin = time.process_time()
        real = order_auto(placement, 3 * p, costs, seconds=args.seconds)
        seconds = time.process_time() - begin
        blind = simulate(order_auto(placement, 3 * p, flat, seconds=args.seconds).schedule, costs)
        note = f"{100 * (real.timeline.span / blind.span - 1):+.2f}%"
        report.line("9", f"case {n} {place} p={p}", real.timeline.span, blind.span, real.bound_span, seconds, note)


def unequal_costs(rng: random.Random, placement: tuple[int, ...], p: int) -> CostModel:
    """First and last stage 10 to 30% heavier, one slow rank, one slow link."""
    slow, a, b = rng.randrange(p), *rng.sample(range(p), 2)
    stages = []
    for s, home in enumerate(placement):
        heavy = 1 + (rng.uniform(0.1, 0.3) if s in (0, len(placement) - 1) else 0) + (0.15 if home == slow else 0)
        stages.append(Cost(10 * heavy, 10 * heavy, 7 * heavy, 100, -60, -40))
    comm = tuple(tuple(0.0 if x == y else 4.0 if {x, y} == {a, b} else 0.5 for y in range(p)) for x in range(p))
    held = len(placement) // p * 100
    return CostModel(tuple(stages), comm, (int(rng.choice((1.0, 1.5)) * p * held),) * p)


def main() -> None:
    """Runs the points asked for and sums up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data", help="folder with zero_bubble_rows.json and peer_schedules.csv")
    parser.add_argument("--points", default="1,2,3,4,5,6,7,8,9")
    parser.add_argument("--rows", default=",".join(map(str, range(12))))
    parser.add_argument("--peers", type=lambda t: tuple(map(int, t.split(":"))), help="only these lines of the CSV, as 0:100")
    parser.add_argument("--seconds", type=float, help="search budget (default: by size)")
    parser.add_argument("--w-parts", type=int, default=1)
    args = parser.parse_args()
    report = Report()
    data = json.loads((Path(args.data) / "zero_bubble_rows.json").read_text())["rows"]
    rows = [(int(i), data[int(i)]) for i in args.rows.split(",")]
    by_rows = {"1": point1, "2": point2, "3": point3, "4": point4, "5": point5}
    alone = {"6": point6, "7": point7, "8": point8, "9": point9}
    for point in args.points.split(","):
        if point in by_rows:
            by_rows[point](rows, args, report)
        else:
            alone[point](args, report)
    report.summary()


if __name__ == "__main__":
    main()
