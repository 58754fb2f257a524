"""`zbfx dump`: compile a target and show everything: stages, ranks, schedule, programs, graphs; write the plan folder."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from zbfx.cli_options import TRAINING, add_compile_options, compile_options, make_pipeline
from zbfx.errors import InputError
from zbfx.ir import Solution, Stage
from zbfx.plan import Plan
from zbfx.target import load_target
from zbfx.text import schedule_to_json, solution_facts
from zbfx.view import folded, graphs_text, print_code, rank_rows, rank_table, stage_rows, stage_table
from zbfx.view_schedule import format_seconds, timeline_grid
from zbfx.view_weights import programs_line, resident_table, weights_view

EXAMPLE = "zbfx dump examples/gpt2.py:tiny --stages 4 --microbatches 8 --schedule zb-h1 --out plan/"
_WHAT = ("schedule", "program", "graphs")


def add_dump(subparsers: Any) -> None:
    """The verb and its options."""
    parser = subparsers.add_parser(
        "dump",
        help="compile a target and print its stages, schedule and programs",
        description="Compile a target (file.py:function or module:function) and print its stages, every rank's schedule as a "
        "grid, and every rank's program. --what shows one of them in full.",
        epilog=f"example: {EXAMPLE}",
    )
    parser.add_argument("target", metavar="TARGET", help="file.py:function or module:function; returns (model, example_inputs)")
    add_compile_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--out", metavar="DIR", help="write the plan folder, which `zbfx run` and zbfx.load read")
    group.add_argument("--rank", type=int, metavar="R", help="only this rank")
    group.add_argument("--what", choices=_WHAT, help="only this, in full (default: all, the programs' stage functions folded)")
    group.add_argument("--json", action="store_true", help="print figures, schedule (and with --what program, sources) as JSON")
    parser.set_defaults(run=dump)


def dump(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    with Console(stderr=True).status(f"compiling {args.target} ..."):
        torch.manual_seed(args.seed or 0)
        target = load_target(args.target)
        inputs, kwargs, wanted = target.example
        plan = make_pipeline(target, compile_options(args), prepare=False).plan_for(*inputs, target=wanted, **kwargs)
    ranks = _ranks(plan, args.rank)
    if args.out:
        record_target(plan.save(args.out), args.target, {n: v for n, v in compile_options(args).items() if n in TRAINING})
    if args.json:
        print(json.dumps(_as_json(plan, ranks, args.what), indent=1), file=console.file)
        return 0
    if args.what in (None, "schedule"):
        _print_overview(console, plan, ranks, args.max_norm is not None or args.loss_scale is not None)
    for r in ranks:
        if args.what in (None, "program"):
            _print_program(console, plan, r, whole=args.what == "program")
        if args.what == "graphs":
            for stage in _running(plan):
                if plan.schedule.placement[stage.index] == r:
                    print_code(console, graphs_text(stage) + "\n")
    if args.out:
        console.print(
            f"wrote {args.out}: plan.json, schedule.json, schedule.csv, {len(plan.programs)} rank files", highlight=False
        )
        console.print(f"run it with: zbfx run {args.out}", highlight=False, soft_wrap=True)
    return 0


def record_target(folder: Path, spec: str, run_with: dict[str, Any] | None = None) -> None:
    """Note in plan.json where the model comes from, a file relative to the folder, and what its weights are updated with, so that
    `zbfx run FOLDER` finds both again."""
    path, _, name = spec.rpartition(":")
    if path.endswith(".py"):
        path = Path(os.path.relpath(path, folder)).as_posix()
    manifest = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(
        json.dumps({**manifest, "target": f"{path}:{name}", "run_with": run_with or {}}, indent=1) + "\n"
    )


def _ranks(plan: Plan, rank: int | None) -> list[int]:
    count = len(plan.programs)
    if rank is not None and not 0 <= rank < count:
        raise InputError(f"--rank {rank}: the plan has ranks 0 to {count - 1}")
    return list(range(count)) if rank is None else [rank]


def _stages(plan: Plan) -> list[Stage]:
    return [s for s in plan.stages if isinstance(s, Stage)]


def _running(plan: Plan) -> list[Stage]:
    """The stages with W as the schedule has it: in parts, or whole."""
    return [*dict(plan.history).get("w_parts", _stages(plan))]


def _print_overview(console: Console, plan: Plan, ranks: list[int], checked: bool) -> None:
    timeline = plan.timeline
    weights = f", {plan.weights} weights" if plan.weights else ""
    console.print(
        f"{len(plan.stages)} stages on {len(plan.programs)} ranks, {plan.schedule.name}, {plan.microbatches} microbatches, "
        f"{plan.device.type}{weights}\npredicted from estimated costs: step {format_seconds(timeline.makespan)}, bubble "
        f"{timeline.bubble_makespan:.1%}, without a barrier {timeline.bubble_span:.1%}",
        soft_wrap=True,
        highlight=False,
    )
    if plan.solution is not None:
        console.print(_searched(plan.solution), soft_wrap=True, highlight=False)
    rows = _rows(plan)
    console.print(stage_table([r for r in rows["stages"] if r["rank"] in ranks]))
    console.print("per microbatch: estimated F, B, W; bytes sent on and returned as gradients", style="dim")
    console.print(rank_table([rows["ranks"][r] for r in ranks]))
    console.print("static: parameters, gradients, buffers; activations: the most at once, exact\n", style="dim")
    if not plan.weights:
        console.print(timeline_grid(timeline, width=console.width))
        return
    _print_weights(console, plan, ranks, checked)


def _print_weights(console: Console, plan: Plan, ranks: list[int], checked: bool) -> None:
    """What changes with the weights' mode: what is resident, steps one after another, the programs' parts."""
    console.print(resident_table({r: resident_rows(plan)[r] for r in ranks}, 2 if plan.weights == "2bw" else 1))
    console.print("resident: what static is made of; the optimizer's state is that of its first step\n", style="dim")
    tied = tied_ranks(plan)
    for part in weights_view(plan.weights, plan.schedule, plan.costs, checked=checked, width=console.width, tied=tied):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))
    console.print(programs_line(plan.programs), highlight=False, soft_wrap=True)


def resident_rows(plan: Plan) -> list[dict[str, int]]:
    """Bytes by name that each rank holds from step to step."""
    return [asdict(r) for r in dict(plan.history)["resident"]]


def tied_ranks(plan: Plan) -> list[list[int]]:
    """For each parameter that several ranks use, those ranks."""
    users: dict[str, set[int]] = {}
    for stage in plan.stages:
        for i in stage.gparams:
            users.setdefault(stage.names[i], set()).add(plan.schedule.placement[stage.index])
    return [sorted(ranks) for ranks in users.values() if len(ranks) > 1]


def _searched(solution: Solution) -> str:
    found, bound = getattr(solution.timeline, solution.objective), getattr(solution, f"bound_{solution.objective}")
    return (
        f"searched in {solution.seconds:.2f} s: {solution.objective} {format_seconds(found)}, no schedule for this placement is "
        f"below {format_seconds(bound)}, so within {solution.gap:.2%} of the optimum\n{solution.why}"
    )


def _print_program(console: Console, plan: Plan, rank: int, *, whole: bool) -> None:
    source = plan.programs[rank].source
    if whole:
        print_code(console, source)
        return
    lines = len(source.splitlines())
    console.rule(f"rank_{rank}.py, {lines} lines; stage functions folded: --what program shows all", style="dim", align="left")
    print_code(console, folded(source) + "\n")


def _rows(plan: Plan) -> dict[str, list[dict[str, Any]]]:
    return {
        "stages": stage_rows(_stages(plan), plan.costs.stages, plan.schedule.placement),
        "ranks": rank_rows(plan.schedule, plan.timeline, plan.programs, plan.static_bytes, plan.costs.limit),
    }


def _as_json(plan: Plan, ranks: list[int], what: str | None) -> dict[str, Any]:
    """Figures in seconds and bytes; the schedule in the format of schedule.json."""
    rows = _rows(plan)
    found: dict[str, Any] = {
        "microbatches": plan.microbatches,
        "device": plan.device.type,
        "stages": [r for r in rows["stages"] if r["rank"] in ranks],
        "ranks": [rows["ranks"][r] for r in ranks],
        "predicted": {
            "span": plan.timeline.span,
            "makespan": plan.timeline.makespan,
            "bubble_span": plan.timeline.bubble_span,
            "bubble_makespan": plan.timeline.bubble_makespan,
        },
        "schedule": json.loads(schedule_to_json(plan.schedule, plan.costs)),
    }
    if plan.weights:
        found["weights"] = {"mode": plan.weights, "period": plan.period, "resident": [resident_rows(plan)[r] for r in ranks]}
    if plan.solution is not None:
        found["search"] = {**solution_facts(plan.solution), "gap": plan.solution.gap}
    if what == "program":
        found["programs"] = {str(r): plan.programs[r].source for r in ranks}
    if what == "graphs":
        found["graphs"] = {str(s.index): graphs_text(s) for s in _running(plan) if plan.schedule.placement[s.index] in ranks}
    return found
