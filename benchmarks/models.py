"""Which models go in, and whether the numbers are those of one process: writes the table of docs/models.md.

    python -m benchmarks.models                  # prints it
    python -m benchmarks.models --write          # docs/models.md

Every model (small configurations, random weights, train mode) takes one step of 2 microbatches in one process, as the module
that torch.export gives, and through pipelines with the zb-h1 schedule. Compared are the loss, every gradient
and every buffer, bit for bit. Exits 1 if a difference is larger than rounding explains.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import zbfx
from tests.equal import exported, largest, pipe_for, step
from tests.families import FAMILIES
from tests.models import Case
from tests.reference import differences
from tests.test_models_state import VISION

ROUNDING = 1e-6  # relative; a sum of few float32 numbers in another order
DOC = Path(__file__).parent.parent / "docs" / "models.md"
HEAD = """# Models

Written by `python -m benchmarks.models --write` on torch {torch}, transformers {transformers}, CPU, one thread. \
Small configurations
of the real classes with random weights; one step of 2 microbatches; pipelines of {stages} stages, schedule zb-h1,
against one process that runs the unsplit exported module over the same microbatches.

| model | parameters | traced nodes | stages | \
loss, gradients and buffers that are bitwise equal | largest relative difference |
|---|---:|---:|---|---|---|
"""
TAIL = """
A gradient's relative difference is the largest difference of an element over the largest element. \
Where a weight serves two stages
(tied embeddings), each stage sums its own part over the microbatches and the parts are added at the step's end, while one process
adds both parts microbatch by microbatch: the same numbers in another order. Everything else is equal bit for bit.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """What one model gave."""

    name: str
    stages: tuple[int, ...]
    parameters: int
    nodes: int
    compared: int
    differ: tuple[str, ...]
    worst: tuple[float, str]

    def __str__(self) -> str:
        equal = f"all {self.compared}" if not self.differ else f"{self.compared - len(self.differ)} of {self.compared}"
        why = "0" if not self.worst[0] else f"{self.worst[0]:.1e}, `{self.worst[1]}`, used in two stages"
        return f"| {self.name} | {self.parameters:,} | {self.nodes:,} | {', '.join(map(str, self.stages))} | {equal} | {why} |"


def main() -> int:
    """Measure every model; print or write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true", help=f"write {DOC.name} in docs/")
    options.add_argument("--stages", type=int, nargs="+", default=[4], help="numbers of stages to try")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    import transformers

    rows = []
    for name, make in {**FAMILIES, **VISION}.items():
        rows.append(measure(name, make, chosen.stages))
        print(rows[-1], flush=True)
    head = HEAD.format(
        torch=torch.__version__, transformers=transformers.__version__, stages=" and ".join(map(str, chosen.stages))
    )
    if chosen.write:
        DOC.parent.mkdir(exist_ok=True)
        DOC.write_text(head + "\n".join(map(str, rows)) + "\n" + TAIL)
    wrong = [r for r in rows if not r.worst[0] <= ROUNDING or (r.differ and not r.worst[0])]
    for row in wrong:
        print(f"{row.name} is wrong: {row.differ[:3]}", file=sys.stderr)
    return 1 if wrong else 0


def measure(name: str, make: Callable[[], Case], tried: Sequence[int]) -> Row:
    """Compile, run and compare one model."""
    case = make()
    wanted = exported(case, 2)
    compared = 1 + len(wanted.grads) + len(wanted.buffers)
    differ: set[str] = set()
    worst, nodes = (0.0, ""), 0
    for stages in tried:
        model, pipe = pipe_for(case, stages)
        loss = step(case, pipe)
        differ |= {d.split(",")[0] for d in differences(model, loss, wanted)}
        worst = max(worst, shared_by_stages(pipe, model, largest(model, wanted)))
        nodes = len(dict(pipe.plan.history)["capture"].graph.nodes)
    return Row(name, tuple(tried), sum(p.numel() for p in case.model.parameters()), nodes, compared, tuple(sorted(differ)), worst)


def shared_by_stages(pipe: zbfx.Pipeline, model: torch.nn.Module, found: tuple[float, str]) -> tuple[float, str]:
    """The same, after a check that the parameter named is one that several stages use; else infinity, to be seen."""
    if not found[0]:
        return found
    weight = model.get_parameter(found[1])
    users = [s for s in pipe.plan.stages if any(model.get_parameter(n) is weight for n in s.names)]
    return found if len(users) > 1 else (float("inf"), found[1])


if __name__ == "__main__":
    sys.exit(main())
