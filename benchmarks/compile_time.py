"""Seconds and memory that compiling takes against depth, up to the 96 layers of a GPT with 175 billion parameters.

    python benchmarks/compile_time.py

Width 12,288, 96 heads, sequence 2,048, microbatch 1, 16 stages on 16 ranks, on the meta device: no weight exists. Each depth is
compiled in a fresh process, whose peak resident memory is reported with the seconds of each phase (the CPU's, on one thread, so
that other work on the machine counts little). "fixed" and "per layer" are the straight line through the depths by least squares.

Exits 1 if a depth's seconds lie more than 25 % off that line, or the deepest takes 4 GiB or more.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

DEPTHS, STAGES, MICROBATCHES = (12, 24, 48, 96), 16, 16
MOST_BYTES, MOST_OFF = 4 * 2**30, 0.25
# Phase -> the functions of zbfx.compile whose seconds count to it.
PHASES = {
    "capture": ("capture",),
    "partition": ("_cut",),
    "differentiate, split": ("_split",),
    "estimate": ("estimate_costs",),
    "order to allocate": ("_scheduled",),
    "codegen": ("_with_source",),
}


def main() -> int:
    """Compile at every depth and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_compile(options.one)))
        return 0
    rows = []
    print(f"{'layers':>6} {'params':>7} " + " ".join(f"{name:>{len(name)}}" for name in PHASES) + "    all   wall   peak memory")
    for depth in options.depths:
        rows.append(_row(depth))
        _print_row(rows[-1])
    return _verdict(rows)


def _compile(depth: int) -> dict[str, Any]:
    """Compile one depth here; what it took."""
    import torch
    from gpt import GPT, next_token_loss

    torch.set_num_threads(1)
    compiler = importlib.import_module("zbfx.compile")
    imported = _peak()
    with torch.device("meta"):
        model = GPT(layers=depth, width=12288, heads=96, vocab=50257, length=2048)
        ids = torch.zeros(1, 2048, dtype=torch.int64)
    seconds: dict[str, float] = defaultdict(float)
    for phase, functions in PHASES.items():
        for name in functions:
            setattr(compiler, name, _timed(getattr(compiler, name), phase, seconds))
    options = compiler.Options(STAGES, MICROBATCHES, STAGES)
    begun, wall = time.thread_time(), time.perf_counter()
    plan = compiler.build_plan(model, (ids,), {}, ids, loss=next_token_loss, options=options)
    seconds["all"], seconds["wall"] = time.thread_time() - begun, time.perf_counter() - wall
    params = sum(p.numel() for p in model.parameters())
    if len(plan.programs) != STAGES or any(not p.is_meta for p in model.parameters()):
        sys.exit("the plan is not what was asked for")
    return {"depth": depth, "params": params, "seconds": seconds, "peak": _peak(), "imported": imported}


def _timed(function: Callable[..., Any], phase: str, seconds: dict[str, float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[phase] += time.thread_time() - begun

    return timed


def _peak() -> int:
    """Peak resident bytes of this process. The kernel reports KiB; macOS reports bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _row(depth: int) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--one", str(depth)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"compiling {depth} layers failed")
    return json.loads(done.stdout.splitlines()[-1])


def _print_row(row: dict[str, Any]) -> None:
    seconds = row["seconds"]
    phases = " ".join(f"{seconds[name]:{len(name)}.1f}" for name in PHASES)
    print(
        f"{row['depth']:6} {row['params'] / 1e9:6.1f}B {phases} {seconds['all']:6.1f} {seconds['wall']:6.1f}"
        f"   {row['peak'] / 2**30:.2f} GiB ({row['imported'] / 2**30:.2f} once torch is imported)",
        flush=True,
    )


def _verdict(rows: list[dict[str, Any]]) -> int:
    """The line through the depths, and what misses the bounds."""
    xs, ys = [r["depth"] for r in rows], [r["seconds"]["all"] for r in rows]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
    fixed = mean_y - slope * mean_x
    off = {x: y / (fixed + slope * x) - 1 for x, y in zip(xs, ys, strict=True)}
    print(f"seconds = {fixed:.1f} fixed + {slope:.3f} per layer; off the line: {', '.join(f'{v:+.0%}' for v in off.values())}")
    missed = [f"{x} layers are {v:+.0%} off the line" for x, v in off.items() if abs(v) > MOST_OFF]
    missed += [f"{r['depth']} layers take {r['peak']} bytes" for r in rows if r["peak"] >= MOST_BYTES]
    print("missed: " + "; ".join(missed) if missed else "compile time grows in a line with depth; memory stays below 4 GiB")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
