"""`zbfx schedule` and `zbfx simulate`: schedules from costs alone, no model needed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from zbfx.cli_options import write_file
from zbfx.errors import InputError, MemoryBudgetError, ZbfxError
from zbfx.ir import WEIGHTS, Cost, CostModel, Schedule, Solution, Timeline
from zbfx.passes.order_any import METHODS, order_any, share_limits
from zbfx.passes.order_fixed import FIXED
from zbfx.passes.placements import NAMES, build_placement, name_placement
from zbfx.passes.simulate import memory_curve, refuse_over_budget, simulate, steady_period
from zbfx.text import (
    costs_from_json,
    format_bytes,
    parse_fields,
    parse_size,
    schedule_from_csv,
    schedule_from_json,
    solution_to_json,
)
from zbfx.verify import verify_schedule
from zbfx.view_schedule import format_seconds, memory_table, summary_table, timeline_grid
from zbfx.view_trace import timeline_trace
from zbfx.view_weights import weights_view

SCHEDULE_EXAMPLE = (
    "zbfx schedule --ranks 8 --microbatches 24 --times 18.522,18.086,9.337 --comm 0.601 --bytes 201216,-127488,-73728"
    " --limit 1.0p --placement v --method auto"
)
SIMULATE_EXAMPLE = "zbfx simulate schedule.json"
_COMPARED = (
    ("linear", ("gpipe", "1f1b", "zb-h1", "zb-h2", "auto")),
    ("interleaved", ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "auto")),
    ("v", ("zb-v", "v-half", "v-min", "dualpipe-v", "auto")),
    ("zigzag", ("auto",)),
)


_TRACE_HELP = "write the timeline and the bytes held, for ui.perfetto.dev or chrome://tracing"


def add_verbs(subparsers: Any) -> None:
    """Both verbs and their options."""
    parser = subparsers.add_parser(
        "schedule",
        help="find the order of F, B and W for given costs and memory limits",
        description="Order F, B and W of all microbatches on all ranks, within the limit; print the grid, the bubble, how far the"
        " result can be from the optimum, and the peak.",
        epilog=f"example: {SCHEDULE_EXAMPLE}",
    )
    _add_problem(parser)
    _add_search(parser)
    _add_weights(parser)
    parser.set_defaults(run=run_schedule)
    parser = subparsers.add_parser(
        "simulate",
        help="simulate a schedule from a JSON or CSV file",
        description="Verify a schedule (zbfx JSON, or the CSV of torch.distributed.pipelining), simulate it with its own costs or"
        " those of --costs, and print the grid, the figures and the memory of each rank.",
        epilog=f"example: {SIMULATE_EXAMPLE}",
    )
    parser.add_argument("schedule", metavar="SCHEDULE", help="a .json or .csv file")
    parser.add_argument("--costs", metavar="FILE", help="JSON with costs, bytes and limit (default: those in the schedule)")
    parser.add_argument("--serialize-links", action="store_true", help="a link carries one message at a time")
    parser.add_argument("--trace", metavar="OUT", help=_TRACE_HELP)
    _add_weights(parser)
    parser.set_defaults(run=run_simulate)


def _add_problem(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the problem")
    group.add_argument("--ranks", type=int, metavar="N", help="workers (default: those of --costs)")
    group.add_argument("--microbatches", type=int, required=True, metavar="N", help="microbatches of a step")
    group.add_argument(
        "--times", metavar="F,B,W", help="seconds (any unit) of a rank's whole part, divided evenly over its stages"
    )
    group.add_argument("--bytes", metavar="F,B,W", help="bytes that F, B and W of a rank's whole part add (B, W: negative)")
    group.add_argument("--comm", type=float, default=0.0, metavar="T", help="seconds of a message between two ranks (default: 0)")
    group.add_argument("--costs", metavar="FILE", help="per-stage costs, bytes, links and limits as JSON, instead of the above")
    group.add_argument(
        "--limit", metavar="SIZE", help="bytes per rank: 100000, 24GiB, or 1.5p = 1.5 * ranks * bytes of F of a rank"
    )
    group.add_argument("--placement", default="linear", metavar="NAME", help=f"{', '.join(NAMES)}, auto, or ranks as 0,1,1,0")
    group.add_argument("--chunks", type=int, metavar="V", help="stages a rank (default: linear 1, interleaved 2, v 2, zigzag 4)")


def _add_search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the search")
    group.add_argument("--method", default="auto", metavar="NAME", help=f"one of {', '.join(METHODS)} (default: auto)")
    group.add_argument("--objective", default="span", choices=("span", "makespan"), help="makespan: with an optimizer barrier")
    group.add_argument("--w-parts", type=int, default=1, metavar="N", help="parts of each W, as finer filler (default: 1)")
    group.add_argument("--seconds", type=float, metavar="S", help="budget of the search (default: by size; exact: 30)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (default: 0)")
    group.add_argument("--compare", action="store_true", help="all methods and placements in one table")
    group.add_argument("--json", metavar="OUT", help="write the schedule with its costs and figures")
    group.add_argument("--trace", metavar="OUT", help=_TRACE_HELP)


def _add_weights(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("weights in time")
    group.add_argument("--weights", choices=WEIGHTS, help="show steps one after another, with updates and validations")
    group.add_argument(
        "--checked", action="store_true", help="steps are clipped or scaled: ranks pass the state of all gradients around"
    )


def run_schedule(args: argparse.Namespace, console: Console) -> int:
    """The verb `schedule`."""
    if args.compare:
        console.print(_compare(args))
        return 0
    placement, costs = _problem(args, args.placement)
    solution = _solved(args, args.method, placement, costs)
    _print_solution(solution, args, console)
    if args.json:
        write_file(args.json, solution_to_json(solution))
    if args.trace:
        _write_trace(args.trace, solution.schedule, solution.timeline, solution.costs)
    return 0


def run_simulate(args: argparse.Namespace, console: Console) -> int:
    """The verb `simulate`."""
    text = _read(args.schedule)
    is_csv = args.schedule.endswith(".csv")
    schedule = verify_schedule(schedule_from_csv(text, args.schedule) if is_csv else schedule_from_json(text, args.schedule))
    costs = (
        costs_from_json(_read(args.costs), args.costs) if args.costs else None if is_csv else costs_from_json(text, args.schedule)
    )
    if costs is None:
        raise InputError(f"{args.schedule} has no costs: give them with --costs FILE")
    refuse_over_budget(schedule, costs)
    timeline = simulate(schedule, costs, serialize_links=args.serialize_links)
    _print_grid(schedule, timeline, costs, args, console)
    console.print(summary_table([(schedule.name, timeline, costs)]))
    period = steady_period(schedule, costs, serialize_links=args.serialize_links)
    console.print(f"period without a barrier between steps: {format_seconds(period)}")
    console.print(memory_table(timeline, costs))
    if args.trace:
        _write_trace(args.trace, schedule, timeline, costs)
    return 0


def _write_trace(path: str, schedule: Schedule, timeline: Timeline, costs: CostModel) -> None:
    curves = [memory_curve(schedule, costs, r) for r in range(len(schedule.ranks))]
    write_file(path, timeline_trace(timeline, curves, name=schedule.name))


def _print_grid(schedule: Schedule, timeline: Timeline, costs: CostModel, args: argparse.Namespace, console: Console) -> None:
    """One step, or, with --weights, several."""
    if args.weights is None:
        if args.checked:
            raise InputError("--checked goes with --weights: synchronous, post-validation or 2bw")
        console.print(timeline_grid(timeline, width=console.width))
        return
    for part in weights_view(args.weights, schedule, costs, checked=args.checked, width=console.width):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))


def _print_solution(solution: Solution, args: argparse.Namespace, console: Console) -> None:
    timeline, schedule = solution.timeline, solution.schedule
    _print_grid(schedule, timeline, solution.costs, args, console)
    name = f"{args.method}, {name_placement(schedule.placement)}"
    console.print(summary_table([(name, timeline, solution.costs)]))
    bounds = {"span": solution.bound_span, "makespan": solution.bound_makespan}
    bound = bounds[solution.objective]
    console.print(
        f"{solution.objective} {getattr(timeline, solution.objective):.6g}, lower bound {bound:.6g}:"
        f" at most {solution.gap:.2%} above the optimum; bubble {timeline.bubble_span:.2%}"
        f" (with a barrier {timeline.bubble_makespan:.2%}); peak {format_bytes(max(timeline.peak))}"
    )
    console.print(f"found in {solution.seconds:.2f} s, {solution.why}")


def _compare(args: argparse.Namespace) -> Table:
    table = Table(title=None, pad_edge=False)
    for column in ("placement", "method"):
        table.add_column(column)
    for column in ("bubble", "with barrier", "gap", "peak", "note"):
        table.add_column(column, justify="left" if column == "note" else "right")
    for place, methods in _COMPARED:
        for method in methods:
            table.add_row(place, method, *_compared(args, place, method))
    return table


def _compared(args: argparse.Namespace, place: str, method: str) -> tuple[str, ...]:
    """A row of the comparison; a method that does not fit says what it needs instead."""
    try:
        placement, costs = _problem(args, place)
        solution = _solved(args, method, placement, costs)
    except MemoryBudgetError:
        if method not in FIXED:
            return "", "", "", "", "no order fits the limit"
        free = _solved(args, method, placement, replace(costs, limit=(None,) * len(costs.limit)))
        return "", "", "", format_bytes(max(free.timeline.peak)), "over the limit"
    except ZbfxError as e:
        return "", "", "", "", str(e).splitlines()[0]
    t = solution.timeline
    return f"{t.bubble_span:.2%}", f"{t.bubble_makespan:.2%}", f"{solution.gap:.2%}", format_bytes(max(t.peak)), ""


def _solved(args: argparse.Namespace, method: str, placement: tuple[int, ...] | None, costs: CostModel) -> Solution:
    return order_any(
        method,
        placement,
        args.microbatches,
        costs,
        objective=args.objective,
        w_parts=args.w_parts,
        seconds=args.seconds,
        seed=args.seed,
    )


# ---------------------------------------------------------------- the problem from the arguments


def _problem(args: argparse.Namespace, place: str) -> tuple[tuple[int, ...] | None, CostModel]:
    """(placement or None for a searched one, costs with limits)."""
    given = None
    if args.costs:
        given = costs_from_json(_costs_text(args), args.costs)
        if given is None:
            raise InputError(f"{args.costs} has no field 'costs'")
    ranks = args.ranks or (len(given.limit) if given else None)
    if ranks is None or ranks < 1:
        raise InputError("how many ranks? Give --ranks N, at least 1, or --costs FILE")
    placement = _placement(place, ranks, args.chunks, len(given.stages) if given else None)
    costs = given if given else _even_costs(args, placement or build_placement("zigzag", ranks), ranks)
    if len(costs.limit) != ranks:
        raise InputError(f"--ranks {ranks}, but the costs are for {len(costs.limit)} ranks")
    return placement, costs if args.limit is None else replace(costs, limit=_limits(args.limit, placement, costs))


def _costs_text(args: argparse.Namespace) -> str:
    """The costs file; --ranks says how many ranks there are where the file does not."""
    text = _read(args.costs)
    fields = parse_fields(text, args.costs)
    if args.ranks and not {"placement", "num_ranks"} & fields.keys():
        return text.rstrip().removesuffix("}") + f', "num_ranks": {args.ranks}}}'
    return text


def _placement(place: str, ranks: int, chunks: int | None, stages: int | None) -> tuple[int, ...] | None:
    if place == "auto":
        return None
    if place in NAMES:
        if chunks is None and stages is not None and stages % ranks == 0:
            chunks = stages // ranks
        return build_placement(place, ranks, chunks)
    parts = place.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise InputError(f"--placement {place}: expected {', '.join(NAMES)}, auto, or the rank of each stage as 0,1,1,0")
    return tuple(map(int, parts))


def _even_costs(args: argparse.Namespace, placement: tuple[int, ...], ranks: int) -> CostModel:
    """--times and --bytes of a rank's whole part, dealt out evenly to its stages."""
    if args.times is None:
        raise InputError("what do F, B and W cost? Give --times F,B,W or --costs FILE")
    (f, b, w), sizes = _three(args.times, "--times"), _three(args.bytes or "0,0,0", "--bytes")
    stages = []
    for s, r in enumerate(placement):
        n, before = placement.count(r), placement[:s].count(r)
        stages.append(Cost(f / n, b / n, w / n, *_dealt(sizes, before, n)))
    comm = tuple(tuple(0.0 if a == b else args.comm for b in range(ranks)) for a in range(ranks))
    return CostModel(tuple(stages), comm, (None,) * ranks)


def _dealt(sizes: tuple[float, float, float], place: int, count: int) -> tuple[int, int, int]:
    """One of `count` stages' whole bytes of F, B and W. A stage gives back what it took wherever the whole rank does."""
    added, kept, left = (
        int(total) * (place + 1) // count - int(total) * place // count for total in (sizes[0], sizes[0] + sizes[1], sum(sizes))
    )
    return added, kept - added, left - kept


def _three(text: str, option: str) -> tuple[float, float, float]:
    try:
        f, b, w = (float(part) for part in text.split(","))
    except ValueError as e:
        raise InputError(f"{option} {text}: expected three numbers as F,B,W") from e
    return f, b, w


def _limits(text: str, placement: tuple[int, ...] | None, costs: CostModel) -> tuple[int, ...]:
    if not text.endswith("p"):
        return (parse_size(text),) * len(costs.limit)
    try:
        share = float(text[:-1])
    except ValueError as e:
        raise InputError(f"--limit {text}: expected bytes, a size such as 24GiB, or a number and p such as 1.5p") from e
    ranks = len(costs.limit)
    if placement is not None:
        return share_limits(placement, costs, share)
    return (int(share * sum(cost.bytes_F for cost in costs.stages) + 1e-6),) * ranks


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"cannot read {path}: {e}") from e
