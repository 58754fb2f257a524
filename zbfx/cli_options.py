"""What dump and run share on the command line: the options of compilation, and a pipeline made from them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from zbfx.errors import InputError
from zbfx.ir import WEIGHTS, Schedule
from zbfx.passes.order_search import OBJECTIVES
from zbfx.pipeline import Pipeline, compile
from zbfx.runtime.versions import CORRECTIONS, PREDICT
from zbfx.target import Target
from zbfx.text import schedule_from_csv, schedule_from_json
from zbfx.training import ROLLBACKS, MakeOptimizer

COMPILE = (
    *("stages", "ranks", "microbatches", "schedule", "placement", "objective", "w_parts", "seconds", "memory", "cut"),
    *("device", "seed", "weights"),
)
TRAINING = ("max_norm", "loss_scale", "rollback", "masters", "correction")  # what a plan with weights is run with


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """--stages, --ranks and the rest; None where the user said nothing."""
    group = parser.add_argument_group("compilation")
    group.add_argument("--stages", type=positive, metavar="N", help="stages of the pipeline (default: --ranks, or 4)")
    group.add_argument("--ranks", type=positive, metavar="N", help="workers (default: one per stage)")
    group.add_argument("--microbatches", type=positive, metavar="N", help="slices of a batch (default: twice the stages)")
    group.add_argument("--schedule", metavar="NAME|FILE", help="a schedule's name, or a .json or .csv file (default: zb-h1)")
    group.add_argument("--placement", metavar="NAME|LIST", help="the rank of each stage: v, 0,1,1,0, or auto to search it, ...")
    group.add_argument("--objective", choices=OBJECTIVES, help="of auto and exact: span where steps need no barrier, or makespan")
    group.add_argument("--w-parts", type=positive, metavar="N", help="of auto: divide each W into parts (default: 1)")
    group.add_argument("--seconds", type=float, metavar="S", help="of auto and exact: budget (default: by size; exact: 30)")
    group.add_argument("--memory", metavar="SIZE", help="limit per rank, parameters included, such as 24GiB (default: none)")
    group.add_argument("--cut", action="append", metavar="MODULE", help="begin a stage at this module; may be given again")
    group.add_argument("--device", metavar="DEVICE", help="cpu or cuda (default: where the parameters lie)")
    group.add_argument("--seed", type=int, metavar="N", help="set before the model is made (default: 0)")
    group = parser.add_argument_group("weights in time (the optimizer steps in the programs)")
    group.add_argument("--weights", choices=WEIGHTS, help="when they change (default: after the programs, as your own loop does)")
    group.add_argument("--max-norm", type=float, metavar="X", help="clip the joint norm of all gradients")
    group.add_argument("--loss-scale", type=_scale, metavar="X", help="a number, or dynamic; steps that overflow are skipped")
    group.add_argument("--rollback", choices=tuple(ROLLBACKS), help="of post-validation: exact (default) or inverse")
    group.add_argument("--masters", action="store_true", default=None, help="step float32 copies of half-precision parameters")
    group.add_argument("--correction", choices=(*CORRECTIONS, PREDICT), help="of the step by which 2bw is late")


def _scale(text: str) -> float | str:
    if text == "dynamic":
        return text
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor dynamic") from error


def positive(text: str) -> int:
    """A whole number, 1 or more, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def compile_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given, as JSON values, so that it can be sent to other processes."""
    return {name: getattr(args, name) for name in (*COMPILE, *TRAINING) if getattr(args, name) is not None}


def training_options(target: Target, options: dict[str, Any]) -> dict[str, Any]:
    """Keywords of compile and load: none, unless the programs step the optimizer. Raises InputError where they must."""
    given = {name: options[name] for name in TRAINING if name in options}
    if "weights" not in options:
        if given:
            raise InputError(f"--{next(iter(given)).replace('_', '-')} goes with --weights: {', '.join(WEIGHTS)}")
        return {}
    return {**given, "optimizer": optimizer_of(target)}


def optimizer_of(target: Target) -> MakeOptimizer:
    """The target's, or AdamW."""
    return target.optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))


def make_pipeline(target: Target, options: dict[str, Any], *, prepare: bool = True) -> Pipeline:
    """A pipeline for the target. prepare: compile for the example, and take hold of the parameters."""
    schedule = read_schedule(options.get("schedule", "zb-h1"))
    fixed = schedule if isinstance(schedule, Schedule) else None
    stages = options.get("stages") or (fixed.num_stages if fixed else options.get("ranks", 4))
    args, kwargs, wanted = target.example
    if not args and not kwargs:
        raise InputError("the target has no example inputs: return (model, example_inputs), or a Target with example_inputs")
    example: dict[str, Any] = {"example_inputs": args, "example_kwargs": kwargs, "example_target": wanted}
    return compile(
        target.model,
        stages,
        loss=target.loss,
        shared=target.shared,
        init=target.init,
        microbatches=options.get("microbatches") or (fixed.microbatches if fixed else None),
        ranks=options.get("ranks"),
        schedule=schedule,
        placement=read_placement(options.get("placement")),
        objective=options.get("objective"),
        w_parts=options.get("w_parts", 1),
        seconds=options.get("seconds"),
        memory=options.get("memory"),
        cuts=options.get("cut", ()),
        device=options.get("device"),
        weights=options.get("weights", "synchronous"),
        **training_options(target, options),
        **(example if prepare else {}),
    )


def read_placement(text: str | None) -> str | tuple[int, ...] | None:
    """A placement's name, or the rank of each stage written 0,1,1,0."""
    if text is None or not text[:1].isdigit():
        return text
    ranks = text.split(",")
    if not all(rank.strip().isdigit() for rank in ranks):
        raise InputError(f"--placement {text}: write the rank of each stage as 0,1,1,0")
    return tuple(map(int, ranks))


def read_schedule(name: str) -> str | Schedule:
    """A schedule from a .json or .csv file; any other text is a schedule's name."""
    path = Path(name)
    if path.suffix not in (".json", ".csv"):
        return name
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--schedule {name}: cannot be read: {error}") from error
    return schedule_from_json(text, name) if path.suffix == ".json" else schedule_from_csv(text, name)


def write_file(path: str, text: str) -> None:
    """Writes the file a user named; InputError where it cannot be written."""
    try:
        Path(path).write_text(text)
    except OSError as e:
        raise InputError(f"cannot write {path}: {e}") from e
