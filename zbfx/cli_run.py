"""`zbfx run`: train a target, or a plan folder's programs, on local processes; under torchrun, this process's own rank."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils import _pytree as pytree

from zbfx.cli_options import (
    COMPILE,
    add_compile_options,
    compile_options,
    make_pipeline,
    optimizer_of,
    positive,
    training_options,
    write_file,
)
from zbfx.errors import InputError, PlanError
from zbfx.ir import Timeline
from zbfx.passes.simulate import bubble
from zbfx.pipeline import Pipeline, load
from zbfx.plan import Plan, load_plan
from zbfx.runtime import place, run_processes
from zbfx.target import Batch, Target, load_target
from zbfx.view_trace import timeline_trace
from zbfx.view_training import TrainingBar, format_rate, sparkline

EXAMPLE = "zbfx run plan/ --steps 20"
_EPILOG = """examples:
  zbfx run plan/ --steps 20
  zbfx run examples/gpt2.py:tiny --ranks 2 --stages 4 --steps 20
  torchrun --nproc-per-node 2 -m zbfx.cli run examples/gpt2.py:tiny --stages 4
"""


def add_run(subparsers: Any) -> None:
    """The verb and its options."""
    parser = subparsers.add_parser(
        "run",
        help="train a target or a plan folder on local processes",
        description="Train on N local CPU processes, one per rank. The model comes from the target; for a plan folder, from the "
        "target that `zbfx dump --out` noted in its plan.json, or --target. Batches and optimizer are the Target's own, else the "
        "example inputs every step and AdamW(lr=1e-3). Under torchrun each process runs its rank (on CUDA where there is one).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", metavar="PLAN_OR_TARGET", help="a plan folder, or file.py:function or module:function")
    parser.add_argument("--steps", type=positive, default=10, metavar="K", help="training steps (default: 10)")
    parser.add_argument("--trace", metavar="OUT", help="write the last step as measured, for ui.perfetto.dev or chrome://tracing")
    parser.add_argument("--target", metavar="TARGET", help="for a plan folder: where the model comes from")
    add_compile_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    if args.trace:
        write_file(args.trace, "")  # before anything trains in vain
    job: dict[str, Any] = {"steps": args.steps, "trace": args.trace, "terminal": console.is_terminal}
    job["options"] = compile_options(args)
    job |= _plan_job(Path(args.what), args) if Path(args.what).is_dir() else _target_job(args)
    where = place()
    if where is not None:
        if where.size not in (1, job["ranks"]):
            raise InputError(f"{args.what} runs on {job['ranks']} ranks, but torchrun started {where.size} processes")
        run_rank(None, job)
        return 0
    if str(job["options"].setdefault("device", "cpu")) != "cpu":
        raise InputError(
            f"--device {args.device}: local processes run on the CPU; on GPUs: torchrun --nproc-per-node {job['ranks']} "
            f"-m zbfx.cli run {args.what}"
        )
    console.print(f"{args.what}: {args.steps} steps on {job['ranks']} processes", highlight=False, soft_wrap=True)
    run_processes(run_rank, job["ranks"], (job,))
    return 0


def _target_job(args: argparse.Namespace) -> dict[str, Any]:
    if args.target is not None:
        raise InputError(f"--target goes with a plan folder, and {args.what!r} is none")
    if ":" not in args.what:
        raise InputError(f"{args.what!r} is neither a plan folder nor a target such as file.py:function")
    where = place()
    ranks = args.ranks or (where.size if where is not None else args.stages or 4)
    return {"target": args.what, "ranks": ranks, "options": {**compile_options(args), "ranks": ranks}}


def _plan_job(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What a plan folder fixes must not be given otherwise."""
    plan = load_plan(folder)
    ranks = len(plan.programs)
    given = [name for name in COMPILE if name not in ("ranks", "device", "seed") and getattr(args, name) is not None]
    if given:
        raise InputError(
            f"{folder} is compiled already: --{given[0].replace('_', '-')} has no effect; compile the target anew with it"
        )
    if args.ranks not in (None, ranks):
        raise InputError(f"--ranks {args.ranks}: {folder} is a plan for {ranks} ranks; compile the target anew for others")
    target = args.target or _recorded_target(folder)
    recorded = json.loads((folder / "plan.json").read_text()).get("run_with")
    options = {**(recorded if isinstance(recorded, dict) else {}), **compile_options(args)}
    if plan.weights:
        options["weights"] = plan.weights
    return {"target": target, "ranks": ranks, "plan": str(folder), "options": options}


def _recorded_target(folder: Path) -> str:
    spec = json.loads((folder / "plan.json").read_text()).get("target")
    if not isinstance(spec, str):
        raise InputError(f"{folder / 'plan.json'} names no target (`zbfx dump --out` writes one): give it with --target")
    path, _, name = spec.rpartition(":")
    return f"{folder / path}:{name}" if path.endswith(".py") else spec


# ---------------------------------------------------------------- in each process


def run_rank(channel: Any, job: dict[str, Any]) -> None:
    """Build the model, keep this rank's part, and train it; rank 0 prints."""
    where = place()
    first = where is None or where.rank == 0
    console = Console(force_terminal=job["terminal"] or None, width=None if sys.stdout.isatty() else 100, quiet=not first)
    options = job["options"]
    began = time.perf_counter()
    torch.manual_seed(options.get("seed", 0))
    target = load_target(job["target"])
    pipe = _pipeline(target, job)
    optimizer = None if pipe.plan.weights else optimizer_of(target)(list(pipe.parameters()))
    console.print(f"{pipe.plan} ({time.perf_counter() - began:.1f} s to build)", highlight=False, soft_wrap=True)
    timeline = _train(console, pipe, optimizer, target, job["steps"])
    if first and job["trace"] and timeline is not None:
        write_file(job["trace"], timeline_trace(timeline, name=f"{job['target']}, step {job['steps']}, measured"))
    pipe.close()


def _train(
    console: Console, pipe: Pipeline, optimizer: torch.optim.Optimizer | None, target: Target, steps: int
) -> Timeline | None:
    """The timeline of the last step. optimizer: None where the programs step it."""
    losses: list[float] = []
    bubbles: list[float] = []
    timeline = None
    pipe.watch(times=True)
    with TrainingBar(console, steps, _unit(target.example)) as bar:
        for _, batch in zip(range(steps), target.steps(), strict=False):
            args, kwargs, wanted = batch
            losses.append(pipe.step(*args, target=wanted, **kwargs).item())
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            timeline = pipe.observed.timeline
            bubbles.append(timeline.bubble_span if pipe.plan.has_no_barrier else timeline.bubble_makespan)
            bar.advance(losses[-1], _count(batch))
    last = pipe.flush()
    if last is not None:  # a stream reports each loss one step later
        losses = [*losses[1:], last.item()]
    if losses:
        console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}  {sparkline(losses)}", highlight=False)
    if bar.per_second:
        console.print(
            f"{format_rate(bar.per_second)} {bar.unit}/s; bubble measured {statistics.median(bubbles[1:]):.1%} (median), "
            f"predicted from estimated costs {_predicted(pipe.plan):.1%}",
            highlight=False,
        )
    return timeline


def _predicted(plan: Plan) -> float:
    """The bubble of a step as it follows another."""
    if not plan.has_no_barrier:
        return plan.timeline.bubble_makespan
    return bubble(plan.period, max(sum(s.end - s.start for s in rank) for rank in plan.timeline.spans))


def _pipeline(target: Target, job: dict[str, Any]) -> Pipeline:
    if "plan" not in job:
        return make_pipeline(target, job["options"])
    device = job["options"].get("device")
    pipe = load(
        job["plan"],
        target.model,
        loss=target.loss,
        device=device,
        init=target.init,
        shared=target.shared,
        **training_options(target, job["options"]),
    )
    args, kwargs, wanted = target.example
    if not pipe.plan_for(*args, target=wanted, **kwargs).programs[0].path:
        raise PlanError(f"{job['plan']} is for inputs of other shapes than {job['target']} gives: compile it anew")
    return pipe


def _tensor(batch: Batch) -> torch.Tensor | None:
    return next((t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()), None)


def _unit(batch: Batch) -> str:
    """Whole numbers in two dimensions are taken for tokens [samples, positions]; anything else is counted by the sample."""
    tensor = _tensor(batch)
    return "tokens" if tensor is not None and tensor.dim() == 2 and not tensor.is_floating_point() else "samples"


def _count(batch: Batch) -> int:
    tensor = _tensor(batch)
    if tensor is None:
        return 0
    return tensor.numel() if _unit(batch) == "tokens" else tensor.shape[0]
