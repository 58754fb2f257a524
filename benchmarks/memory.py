"""Peak bytes of activations: what the plan predicts for every rank, and what a step holds, counted by storage.

    python benchmarks/memory.py

Five models (GPT-2, Llama and BERT from transformers, an MLP, a CNN) under every schedule named below, one stage per rank and two.
Exits 1 if any rank's measured peak differs from its prediction, or what it holds at the beginning of any action does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import zbfx
from tests.models import MODELS
from tests.reference import memory_differences
from zbfx.text import format_bytes

STAGES, MICROBATCHES, SAMPLES = 4, 6, 2


def main() -> int:
    """Run every combination and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "zb-h1"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{STAGES} stages, {MICROBATCHES} microbatches of {SAMPLES} samples; peak bytes of activations of each rank")
    wrong = 0
    for name in options.models:
        for ranks in (STAGES, STAGES // 2):
            wrong += sum(_line(name, schedule, ranks) for schedule in options.schedules)
    print(f"{wrong} differ" if wrong else "every measured peak equals its prediction, and so does what is held at every action")
    return 1 if wrong else 0


def _line(name: str, schedule: str, ranks: int) -> bool:
    """One model and schedule; True if anything differs."""
    case = MODELS[name]()
    args, kwargs, target = case.batch(MICROBATCHES * SAMPLES)
    pipe = zbfx.compile(
        case.model,
        STAGES,
        example_inputs=args,
        example_kwargs=kwargs,
        example_target=target,
        loss=case.loss,
        microbatches=MICROBATCHES,
        ranks=ranks,
        schedule=schedule,
    )
    pipe.watch(times=False, memory=True)
    pipe.step(*args, target=target, **kwargs)
    predicted = [p.peak for p in pipe.plan.programs]
    different = memory_differences(pipe.plan, pipe.observed, range(ranks))
    shown = "  ".join(f"{format_bytes(p):>9}" for p in predicted)
    print(
        f"{name:6} {schedule:6} {ranks} ranks: {shown}   {'measured equal' if not different else '; '.join(different)}",
        flush=True,
    )
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
