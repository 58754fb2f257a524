"""What the processes of pipeline tests run: real ranks over gloo, each compared with one process's results from a file.

`python -m tests.distributed.pipelines RANKS` runs the whole table of models, stages, schedules and microbatches (minutes).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import zbfx
from tests.distributed.weights import clipped, tied
from tests.models import MODELS
from tests.passes.schedules import in_parts
from tests.reference import Reference, Result, differences, memory_differences
from zbfx.passes.order_fixed import order_fixed
from zbfx.runtime import Channel, run_processes

SAMPLES = 2
SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def write_results(folder: Path, names: Sequence[str], microbatches: Sequence[int]) -> None:
    """The one-process result of every model and number of microbatches."""
    for name in names:
        reference = Reference(MODELS[name](), SAMPLES)
        for m in microbatches:
            result = reference.step(m)
            torch.save([result.loss, dict(result.grads), dict(result.buffers)], folder / f"{name}-{m}.pt")


def read_result(folder: str, name: str, m: int) -> Result:
    return Result(*torch.load(Path(folder) / f"{name}-{m}.pt", weights_only=True))


def table(channel: Channel, folder: str, rows: Sequence[tuple[str, int]], microbatches: Sequence[int]) -> dict[str, list[str]]:
    """For every (model, stages) of `rows`, all schedules and `microbatches`: what differs on this rank."""
    found: dict[str, list[str]] = {}
    for name, stages in rows:
        case = MODELS[name]()
        model = case.fresh()
        mine = dict(model.named_parameters())
        args, kwargs, target = case.batch(SAMPLES)
        pipe = zbfx.compile(
            model, stages, example_inputs=args, example_kwargs=kwargs, example_target=target, loss=case.loss, microbatches=1
        )
        start = {n: v.clone() for n, v in pipe.state_dict().items()}
        found[f"{name}-{stages} memory released"] = _not_released(pipe, model, mine, channel.index)
        pipe.watch(times=False, memory=True)
        for schedule in SCHEDULES:
            for m in microbatches:
                pipe.load_state_dict(start)
                model.zero_grad(set_to_none=True)
                pipe.reschedule(schedule, microbatches=m)
                args, kwargs, target = case.batch(SAMPLES * m)
                loss = pipe.step(*args, target=target, **kwargs)
                wrong = _wrong_here(pipe, loss, read_result(folder, name, m))
                # every rank has all ranks' records
                wrong += memory_differences(pipe.plan, pipe.observed, range(channel.size))
                found[f"{name}-{stages} {schedule} {m}"] = wrong
        pipe.close()
    return found


class _Held:
    """The part of a model that a rank holds, as `differences` reads a model."""

    def __init__(self, pipe: zbfx.Pipeline) -> None:
        self.pipe = pipe

    def named_parameters(self) -> Any:
        return self.pipe.named_parameters()

    def named_buffers(self) -> Any:
        parameters = dict(self.pipe.named_parameters())
        return [(n, v) for n, v in self.pipe.state_dict().items() if n not in parameters]


def _wrong_here(pipe: zbfx.Pipeline, loss: torch.Tensor, wanted: Result) -> list[str]:
    held = dict(pipe.named_parameters())
    mine = Result(wanted.loss, {n: g for n, g in wanted.grads.items() if n in held}, wanted.buffers)
    return differences(_Held(pipe), loss, mine)  # type: ignore[arg-type]


def _not_released(pipe: zbfx.Pipeline, model: torch.nn.Module, before: dict[str, Any], rank: int) -> list[str]:
    """Parameters of other ranks whose memory is still there, and own ones that are not."""
    place = pipe.plan.schedule.placement
    own = {n for s in pipe.plan.stages for n in s.names if place[s.index] == rank}
    own |= before.keys() - pipe.plan.owners if rank == 0 else set()  # what no stage uses
    held, now = dict(pipe.named_parameters()), dict(model.named_parameters())
    wrong = [f"{n} is held" for n in held if n not in own] + [f"{n} is missing" for n in own if held.get(n) is not before[n]]
    wrong += [f"{n} is not on the meta device" for n in now if n not in own and not now[n].is_meta]
    return wrong + [f"{n} keeps its bytes" for n in before if n not in own and before[n].untyped_storage().nbytes()]


def states(channel: Channel) -> dict[str, Any]:
    """Names that this rank's state dict has after a step of the CNN, and the running mean where it is held."""
    case = MODELS["cnn"]()
    case.model.register_parameter("spare", torch.nn.Parameter(torch.full((2,), 7.0)))
    pipe = zbfx.compile(case.model, 4, loss=case.loss, microbatches=2)
    args, _, target = case.batch(4)
    pipe.step(*args, target=target)
    state = pipe.state_dict()
    eval_loss = pipe.eval_step(*args, target=target).item()
    return {
        "names": sorted(state),
        "parameters": sorted(n for n, _ in pipe.named_parameters()),
        "mean": state["1.running_mean"].tolist() if "1.running_mean" in state else None,
        "spare": state["spare"].tolist() if "spare" in state else None,
        "eval": eval_loss,
    }


def w_in_parts(channel: Channel, folder: str, microbatches: int) -> dict[str, list[str]]:
    """A V of four stages with every W in three parts, one right after the other: what differs on this rank."""
    found = {}
    for name in ("gpt2", "cnn"):
        case = MODELS[name]()
        args, kwargs, target = case.batch(SAMPLES * microbatches)
        given = in_parts(order_fixed("zb-v", (0, 1, 1, 0), microbatches), 3)
        pipe = zbfx.compile(
            case.fresh(), 4, example_inputs=args, example_kwargs=kwargs, example_target=target, loss=case.loss,
            microbatches=microbatches, schedule=given,
        )  # fmt: skip
        pipe.watch(times=False, memory=True)
        loss = pipe.step(*args, target=target, **kwargs)
        wrong = _wrong_here(pipe, loss, read_result(folder, name, microbatches))
        found[name] = wrong + memory_differences(pipe.plan, pipe.observed, range(channel.size))
        if "stage_1.GRADIENTS[1])" not in pipe.plan.programs[1].source:
            found[name].append("stage 1 has no parts")
        pipe.close()
    return found


def searched(channel: Channel, folder: str, microbatches: int) -> dict[str, Any]:
    """A schedule whose search ends by the clock, and one that does not fit: what this rank was told."""
    case = MODELS["mlp"]()
    args, kwargs, target = case.batch(SAMPLES * microbatches)
    options: dict[str, Any] = {
        "example_inputs": args, "example_kwargs": kwargs, "example_target": target, "loss": case.loss,
        "microbatches": microbatches,
    }  # fmt: skip
    pipe = zbfx.compile(case.fresh(), 4, schedule="exact", placement="v", seconds=1.0, **options)
    loss = pipe.step(*args, target=target, **kwargs)
    told = {"wrong": _wrong_here(pipe, loss, read_result(folder, "mlp", microbatches)), "solution": str(pipe.plan.solution)}
    pipe.close()
    try:
        zbfx.compile(case.fresh(), 4, schedule="auto", memory=max(pipe.plan.static_bytes) + 1, **options)
    except zbfx.MemoryBudgetError as error:
        told["error"] = str(error)
    return told


def several(channel: Channel, folder: str, rows: Sequence[tuple[str, int]], microbatches: Sequence[int]) -> dict[str, Any]:
    """Checks that share the processes."""
    return {
        "table": table(channel, folder, rows, microbatches),
        "states": states(channel),
        "parts": w_in_parts(channel, folder, 5),
        "searched": searched(channel, folder, 5),
        "weights": {"clipped": clipped(2.0), "tied": tied()},
    }


def main(ranks: int) -> int:
    """The whole table: every model, 2, 3, 4 and 8 stages (not fewer than ranks), schedules, 1, 2, 5 and 8 microbatches."""
    rows = [(name, s) for name in MODELS for s in (2, 3, 4, 8) if s >= ranks]
    microbatches = (1, 2, 5, 8)
    with tempfile.TemporaryDirectory() as folder:
        write_results(Path(folder), list(MODELS), microbatches)
        results = run_processes(table, ranks, (folder, rows, microbatches), dead_after=60.0)
    wrong = {(r, k): v for r, result in enumerate(results) for k, v in result.items() if v}
    count = len(results[0])
    print(f"{ranks} ranks: {count - len({k for _, k in wrong})} of {count} combinations equal one process and the prediction")
    for (r, k), v in wrong.items():
        print(f"  rank {r}, {k}: {'; '.join(v)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(int(sys.argv[1])))
