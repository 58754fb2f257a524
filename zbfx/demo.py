"""`make demo`: a GPT-2 from transformers learns the text that ships with Python, in a pipeline of local processes.

Everything is real: the model class is unmodified, the processes talk over gloo, the programs are the generated ones. At the
end the first step's gradients are compared with those of the plain model on one process, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from zbfx.demo_model import batches, build_model, read_text
from zbfx.errors import ZbfxError
from zbfx.ir import CostModel, Timeline
from zbfx.passes.order_fixed import order_fixed
from zbfx.passes.simulate import simulate
from zbfx.pipeline import Pipeline, compile
from zbfx.plan import Plan
from zbfx.runtime import run_processes
from zbfx.text import format_bytes
from zbfx.view_schedule import format_seconds, timeline_grid
from zbfx.view_training import TrainingBar, format_rate, sparkline

OTHERS = ("gpipe", "1f1b", "zb-h1")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code is 1 if a gradient differs, 2 on an error."""
    settings = _read(argv)
    console = _console(settings)
    began = time.perf_counter()
    try:
        _introduce(console, settings)
        results = run_processes(train_rank, settings["ranks"], (settings,))
    except ZbfxError as error:
        sys.stderr.write(f"zbfx demo: {error}\n")
        return 2
    return _conclude(console, settings, results, time.perf_counter() - began)


def _read(argv: Sequence[str] | None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        "python -m zbfx.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = _cores()
    add = parser.add_argument
    add("--steps", type=int, default=100, help="training steps (default: %(default)s)")
    add("--seconds", type=float, default=100.0, help="stop training after so many (default: %(default)s)")
    add("--stages", type=int, default=4, help="stages of the pipeline (default: %(default)s)")
    add("--ranks", type=int, default=4 if cores >= 4 else 2, help="processes (default: 4 on 4 cores or more, else 2)")
    add("--microbatches", type=int, default=8, help="slices of a batch (default: %(default)s)")
    add("--batch", type=int, default=16, help="samples of a batch (default: %(default)s)")
    add("--layers", type=int, default=4, help="layers of the model (default: %(default)s)")
    add("--schedule", default="zb-h1", help="gpipe, 1f1b or zb-h1 (default: %(default)s)")
    return {**vars(parser.parse_args(argv)), "cores": cores, "terminal": sys.stdout.isatty(), "width": os.environ.get("COLUMNS")}


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _console(settings: Mapping[str, Any], *, quiet: bool = False) -> Console:
    """The processes write to the same place as their parent, and must not guess anew whether it is a terminal."""
    width = None if settings["terminal"] or settings["width"] else 80
    return Console(force_terminal=settings["terminal"] or None, width=width, quiet=quiet, highlight=False)


# ---------------------------------------------------------------- in each process


def train_rank(channel: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """One rank's life: compile, train, compare; returns figures as JSON values."""
    console = _console(settings, quiet=channel.index != 0)
    began = time.perf_counter()
    model = build_model(settings["layers"])
    data = batches(settings["batch"])
    first = next(data)
    pipe = compile(
        model,
        num_stages=settings["stages"],
        example_inputs=(first,),
        example_kwargs={"labels": first},
        microbatches=settings["microbatches"],
        schedule=settings["schedule"],
    )
    console.print(f"compiled in {time.perf_counter() - began:.1f} s: {_shares(pipe.plan)}\n", soft_wrap=True)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)

    pipe.watch(memory=True, times=False)  # of the first step, bytes; of all others, times
    losses = [pipe.step(first, labels=first).item()]
    gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    peak = pipe.observed.peak
    optimizer.step()
    optimizer.zero_grad()
    pipe.watch(times=True)

    timelines: list[Timeline] = []
    with TrainingBar(console, settings["steps"], "tokens") as bar:
        bar.advance(losses[0], first.numel())
        training = time.perf_counter()
        for _, ids in zip(range(settings["steps"] - 1), data, strict=False):
            losses.append(pipe.step(ids, labels=ids).item())
            optimizer.step()
            optimizer.zero_grad()
            timelines.append(pipe.observed.timeline)
            bar.advance(losses[-1], ids.numel())
            if max(channel.all_gather(time.perf_counter() - training)) > settings["seconds"]:
                break
    equal = compare_with_one_process(settings, first, losses[0], gradients)
    figures = {"losses": losses, "rate": bar.per_second, "equal": equal, "peak": [[p.peak for p in pipe.plan.programs], peak]}
    if channel.index == 0 and timelines:
        figures |= {"bubbles": bubbles(pipe, timelines)}
        _show_step(console, timelines)
    pipe.close()
    return figures


def compare_with_one_process(
    settings: Mapping[str, Any], ids: torch.Tensor, loss: float, gradients: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Run the plain model on the same microbatches in this process alone; which of this rank's gradients differ from its."""
    model = build_model(settings["layers"])
    parts = ids.chunk(settings["microbatches"])
    total = torch.zeros(())
    for part in parts:
        mean = model(part, labels=part).loss / len(parts)
        mean.backward()
        total = total + mean.detach()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    different = [name for name, grad in gradients.items() if name not in wanted or not torch.equal(grad, wanted[name])]
    return {"loss": total.item() == loss, "gradients": len(gradients), "different": different, "all": len(wanted)}


# ---------------------------------------------------------------- the bubble


def bubbles(pipe: Pipeline, timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The bubble as estimated before training, as predicted from the first half of the steps' own times, and as measured in the
    second half; and what other schedules would make of the same times.
    """
    half = max(1, len(timelines) // 2)
    plan = pipe.plan
    costs = measured_costs(plan.costs, timelines[:half])
    later = timelines[half:] or timelines
    others = {}
    if any(c.W for c in costs.stages):
        names = [n for n in OTHERS if n != plan.schedule.name]
        orders = {name: order_fixed(name, plan.schedule.placement, plan.microbatches) for name in names}
        others = {name: simulate(order, costs).bubble_makespan for name, order in orders.items()}
    predicted = simulate(plan.schedule, costs)
    return {
        "estimated": plan.timeline.bubble_makespan,
        "predicted": predicted.bubble_makespan,
        "measured": statistics.median(t.bubble_makespan for t in later),
        "seconds": [predicted.makespan, statistics.median(t.makespan for t in later)],
        "steps": [half, len(later)],
        "load": _foreign_load(len(plan.programs)),
        "others": others,
    }


def measured_costs(costs: CostModel, timelines: Sequence[Timeline]) -> CostModel:
    """The cost model with each stage's F, B and W replaced by the median of their measured seconds; messages stay estimates."""
    seconds: dict[tuple[int, str], list[float]] = {}
    for timeline in timelines:
        for rank in timeline.spans:
            for s in rank:
                seconds.setdefault((s.action.stage, s.action.kind), []).append(s.end - s.start)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    stages = []
    for k, cost in enumerate(costs.stages):
        both = median.get((k, "BW"))  # schedules that do not split the backward: the simulator adds B and W anyway
        b = both if both is not None else median.get((k, "B"), 0.0)
        stages.append(replace(cost, F=median.get((k, "F"), 0.0), B=b, W=median.get((k, "W"), 0.0)))
    return replace(costs, stages=tuple(stages))


def _foreign_load(ranks: int) -> float:
    """The last minute's load average if it exceeds that of `ranks` busy processes by 1 or more, else 0."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load if load >= ranks + 1 else 0.0


# ---------------------------------------------------------------- what is printed


def _introduce(console: Console, s: Mapping[str, Any]) -> None:
    cores, ranks = s["cores"], s["ranks"]
    console.print(f"[bold]zbfx demo[/]: transformers' own GPT2LMHeadModel, {s['layers']} layers, untied, random weights")
    console.print(f"learns Python's help topics ({len(read_text()):,} bytes, each byte a token)")
    console.print(f"{s['stages']} stages on {ranks} processes over gloo; {s['schedule']}, {s['microbatches']} microbatches")
    if ranks <= cores:
        console.print(f"why {ranks}: there are {cores} cores, and times mean something only if each rank has its own")
    else:
        console.print(f"{ranks} ranks share {cores} core{'s' * (cores > 1)}: the measured times and bubble will say little")
    console.print("starting the processes; each compiles the model and keeps its part ...")


def _shares(plan: Plan) -> str:
    stages = [
        f"stages {' '.join(str(k) for k, r in enumerate(plan.schedule.placement) if r == i)}" for i in range(len(plan.programs))
    ]
    return "; ".join(f"rank {i} has {what}" for i, what in enumerate(stages))


def _show_step(console: Console, timelines: Sequence[Timeline]) -> None:
    """The step whose makespan is the median: its grid."""
    typical = sorted(timelines, key=lambda t: t.makespan)[len(timelines) // 2]
    console.print("\na typical step as it ran:")
    console.print(timeline_grid(typical, width=console.width))


def _figures(first: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, text) lines of rank 0's results."""
    losses, found = first["losses"], first.get("bubbles")
    yield "loss", f"{losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps  {sparkline(losses, 30)}"
    yield "speed", f"{format_rate(first['rate'])} tokens/s"
    if found:
        half, later = found["steps"]
        took = f"in steps of {format_seconds(found['seconds'][1])}"
        yield "bubble", f"{found['measured']:.1%} measured, {took} (medians of the last {later} steps)"
        took = f"in steps of {format_seconds(found['seconds'][0])}"
        yield "", f"{found['predicted']:.1%} predicted, {took} (simulated with the times of the {half} steps before)"
        yield "", f"{found['estimated']:.1%} estimated before anything ran, from FLOPs and bytes"
        if found["others"]:
            others = ", ".join(f"{name} {value:.1%}" for name, value in found["others"].items())
            yield "", f"other schedules, predicted with the same times: {others}"
        if found["load"]:
            yield "", f"other programs kept this machine busy (load {found['load']:.1f}): measured times are theirs too"
    for r, (predicted, measured) in enumerate(zip(*first["peak"], strict=True)):
        same = "exactly as predicted" if predicted == measured else f"predicted {format_bytes(predicted)}"
        yield "memory" if r == 0 else "", f"rank {r}: at most {format_bytes(measured)} of activations, {same}"


def _conclude(console: Console, settings: Mapping[str, Any], results: Sequence[dict[str, Any]], seconds: float) -> int:
    first = results[0]
    for label, text in _figures(first):
        console.print(f"{label:8}{text}", soft_wrap=True)
    compared = sum(r["equal"]["gradients"] for r in results)
    different = [name for r in results for name in r["equal"]["different"]]
    loss_is_equal = all(r["equal"]["loss"] for r in results)
    passed = not different and loss_is_equal and compared == first["equal"]["all"]
    console.print(
        f"\n[bold {'green' if passed else 'red'}]the first step's gradients against one process running the plain model: "
        f"{compared - len(different)} of {first['equal']['all']} equal, bit for bit; "
        f"its loss {'equal' if loss_is_equal else 'different'}[/]",
        soft_wrap=True,
    )
    if different:
        console.print(f"different: {', '.join(different[:5])}{' ...' if len(different) > 5 else ''}", soft_wrap=True)
    console.print(f"took {format_seconds(seconds)}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
