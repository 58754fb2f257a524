"""What the optimizer's barrier costs, and what is left of it: python benchmarks/barrier.py [--ranks 4,8] [--seconds 0.06].

Real processes, real messages over gloo, real optimizer steps; only the stages' compute is a timed sleep, so that more ranks
than cores run without disturbing one another. T_F = T_B = T_W, 4 microbatches a rank. For each schedule and way of changing
weights: seconds from step to step (median, after warm-up) beside the simulator's period for the same costs.

Exits 1 unless post-validation and 2bw are within 3 % of the simulator's period, and below the synchronous step of the same
schedule by what the simulator predicts, give or take 3 % of the step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

import zbfx
from zbfx.runtime import Channel, run_processes
from zbfx.trace.estimate import DEVICES

BOUND = 0.03
# (schedule, weights): the synchronous rows are what the others of the same schedule are compared with.
ROWS = (
    ("zb-h2", "synchronous"),
    ("zb-h2", "post-validation"),
    ("zb-h1", "synchronous"),
    ("zb-h1", "2bw"),
    ("1f1b", "synchronous"),
    ("1f1b", "2bw"),
)
WIDTH = 64


# ---------------------------------------------------------------- y = x * w, whose three halves sleep


# Defined at the dispatcher, not with torch.library.custom_op, whose wrapper alone takes half a millisecond a call here.
_ops = torch.library.Library("zbfx_barrier", "DEF")


def _define(name: str, run: Callable[..., Tensor], fake: Callable[..., Tensor], arguments: str) -> None:
    def slow(a: Tensor, b: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds)
        return run(a, b)

    _ops.define(f"{name}({arguments}, float seconds) -> Tensor")
    _ops.impl(name, slow, "CPU")
    torch.library.register_fake(f"zbfx_barrier::{name}", lambda a, b, seconds: fake(a, b), lib=_ops)


_define("forward", torch.mul, lambda x, w: torch.empty_like(x), "Tensor x, Tensor w")
_define("grad_input", torch.mul, lambda g, w: torch.empty_like(g), "Tensor g, Tensor w")
_define("grad_weight", lambda g, x: (g * x).sum(0), lambda g, x: g.new_empty(g.shape[1:]), "Tensor g, Tensor x")
slow = torch.ops.zbfx_barrier


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, ctx.seconds = inputs
    ctx.save_for_backward(x, w)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor, None]:
    x, w = ctx.saved_tensors
    g = g.contiguous()
    return slow.grad_input(g, w, ctx.seconds), slow.grad_weight(g, x, ctx.seconds), None


torch.library.register_autograd("zbfx_barrier::forward", _backward, setup_context=_keep, lib=_ops)


def _flops(*args: Any, **_: Any) -> float:
    """What the compiler's estimate divides by the device's speed to get the seconds slept."""
    return float(args[2] * DEVICES["cpu"].flops)


for _op in (slow.forward, slow.grad_input, slow.grad_weight):
    if _op not in flop_registry:
        register_flop_formula(_op, get_raw=True)(_flops)


class Layer(nn.Module):
    """One stage's work."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return slow.forward(x, self.weight, self.seconds)


class First(nn.Module):
    """Makes the first layer's input need a gradient, so that its stage has as much to do as any other."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


# ---------------------------------------------------------------- measure


def measure_rows(channel: Channel, rows: list[tuple[str, str]], seconds: float, steps: int) -> list[dict[str, Any]]:
    """In each process: all rows, one after another."""
    return [measure(channel, *row, seconds, steps) for row in rows]


def measure(channel: Channel, schedule: str, weights: str, seconds: float, steps: int) -> dict[str, Any]:
    """Train, and note when each step returned."""
    ranks = channel.size
    torch.manual_seed(0)
    model = nn.Sequential(First(), *(Layer(seconds) for _ in range(ranks)))
    m = 4 * ranks
    batch, target = torch.randn(m, WIDTH), torch.randn(m, WIDTH)
    pipe = zbfx.compile(
        model,
        ranks,
        example_inputs=(batch,),
        example_target=target,
        loss=nn.functional.mse_loss,
        microbatches=m,
        schedule=schedule,
        cuts=[str(i) for i in range(2, ranks + 1)],
        optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9),
        weights=weights,
        max_norm=1e6,  # checked at every step, never reached
    )
    give_precedence(os.SCHED_RR, 1)
    ends = []
    for _ in range(steps):
        pipe.step(batch, target=target)
        ends.append(time.perf_counter())
    pipe.flush()
    give_precedence(os.SCHED_OTHER, 0)
    progress = pipe.progress
    found = {
        "period": statistics.median(b - a for a, b in pairwise(ends[2:])),
        "predicted": pipe.plan.period,
        "costs": [[c.F, c.B, c.W] for c in pipe.plan.costs.stages],
        "steps": progress.steps,
        "clipped": progress.clipped + progress.skipped + progress.rollbacks,
    }
    pipe.close()
    return found


def give_precedence(policy: int, priority: int) -> None:
    """How all threads of this process are scheduled, where the system allows it. With SCHED_RR they run before other work on
    the machine: they sleep most of the time, and what is measured is how late they are."""
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ():
        with suppress(OSError):
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


def main() -> int:
    """Measure every row, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4,8", help="numbers of processes (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.06, help="T of F, of B and of W (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run, two of them warm-up (default: %(default)s)")
    parser.add_argument("--only", help="rows with one of these schedules or weights, such as zb-h2,2bw")
    args = parser.parse_args()
    missed = 0
    print("ranks  schedule  weights           measured  simulated    off   below synchronous: measured  simulated")
    for ranks in map(int, args.ranks.split(",")):
        base: dict[str, tuple[float, float]] = {}
        rows = [row for row in ROWS if not args.only or set(args.only.split(",")) & set(row)]
        results = run_processes(measure_rows, ranks, (rows, args.seconds, args.steps))
        for (schedule, weights), *found in zip(rows, *results, strict=True):
            missed += report(ranks, schedule, weights, found, base)
    return 1 if missed else 0


def report(ranks: int, schedule: str, weights: str, results: list[dict[str, Any]], base: dict[str, tuple[float, float]]) -> bool:
    """Print a row; True if it misses a bound."""
    first = results[0]
    measured, predicted = max(r["period"] for r in results), first["predicted"]
    if first["clipped"]:
        raise SystemExit("a step was clipped, skipped or taken back: there is nothing to measure")
    off = measured / predicted - 1
    row = f"{ranks:5}  {schedule:8}  {weights:15}  {measured:7.3f} s  {predicted:7.3f} s  {off:+6.1%}"
    if weights == "synchronous":
        base[schedule] = measured, predicted
        print(row, flush=True)
        return False
    miss = abs(off) > BOUND
    if schedule in base:
        saved, expected = base[schedule][0] - measured, base[schedule][1] - predicted
        miss |= abs(saved - expected) > BOUND * predicted
        row += f"   {saved:26.3f} s  {expected:7.3f} s"
    print(row + ("  MISSED" if miss else ""), flush=True)
    return miss


if __name__ == "__main__":
    sys.exit(main())
