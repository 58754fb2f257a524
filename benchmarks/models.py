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
from tests.equal import eager, exported, largest, pipe_for, step
from tests.families import FAMILIES
from tests.models import Case
from tests.reference import Result, differences
from tests.test_models_state import VISION

ROUNDING = 1e-6  # relative; a sum of few float32 numbers in another order
DOC = Path(__file__).parent.parent / "docs" / "models.md"
HEAD = """# Models

Written by `python -m benchmarks.models --write` on torch {torch}, transformers {transformers}, CPU, one thread. \
Small configurations
of the real classes with random weights; one step of 2 microbatches; pipelines of {stages} stages, schedule zb-h1,
against one process that runs the unsplit exported module over the same microbatches.

| model | parameters | traced nodes | stages | \
loss, gradients and buffers that are bitwise equal | largest relative difference | exported from eager |
|---|---:|---:|---|---|---|---|
"""
TAIL = """
A gradient's relative difference is the largest difference of an element over the largest element. \
Where a weight serves two stages
(tied embeddings), each stage sums its own part over the microbatches and the parts are added at the step's end, while one process
adds both parts microbatch by microbatch: the same numbers in another order. Everything else is equal bit for bit.

*Exported from eager* is the same figure for the two references: the module that torch.export gives, from the model as Python runs
it. It is not 0 where a model takes another path while it is traced, as Transformers does in the attention of some. Pipelines are
compared with the exported module.

## What is not predicted to the byte

The bytes that a program holds are predicted from shapes and agree with what is measured for every model above, helper tensors
of embedding bags and the workspaces of recurrent kernels included. Some kernels allocate for themselves, as long as they run,
what no shape function tells: `F.grid_sample` does, for example. A rank's peak can then be larger than predicted, by that much.
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
    eager: float  # the exported module's largest relative difference from the eager model

    def __str__(self) -> str:
        equal = f"all {self.compared}" if not self.differ else f"{self.compared - len(self.differ)} of {self.compared}"
        why = figure(self.worst[0]) + (f", `{self.worst[1]}`, used in two stages" if self.worst[0] else "")
        stages = ", ".join(map(str, self.stages))
        cells = (self.name, f"{self.parameters:,}", f"{self.nodes:,}", stages, equal, why, figure(self.eager))
        return f"| {' | '.join(cells)} |"


def figure(difference: float) -> str:
    """A relative difference as text."""
    return f"{difference:.1e}" if difference else "0"


def main() -> int:
    """Measure every model; print or write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true", help=f"write {DOC.name} in docs/")
    options.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8], help="numbers of stages to try")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    import transformers

    rows = []
    for name, make in {**FAMILIES, **VISION}.items():
        rows.append(measure(name, make, chosen.stages))
        print(rows[-1], flush=True)
    head = HEAD.format(torch=torch.__version__, transformers=transformers.__version__, stages=", ".join(map(str, chosen.stages)))
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
    wanted, plain = exported(case, 2), eager(case, 2)
    compared = 1 + len(wanted.grads) + len(wanted.buffers)
    differ: set[str] = set()
    worst, nodes = (0.0, ""), 0
    fits = []
    for stages in tried:
        try:
            model, pipe = pipe_for(case, stages)
        except zbfx.PartitionError:  # the graph gives fewer
            continue
        fits.append(stages)
        loss = step(case, pipe)
        differ |= {d.split(",")[0] for d in differences(model, loss, wanted)}
        worst = max(worst, shared_by_stages(pipe, model, largest(model, wanted)))
        nodes = len(dict(pipe.plan.history)["capture"].graph.nodes)
    size = sum(p.numel() for p in case.model.parameters())
    return Row(name, tuple(fits), size, nodes, compared, tuple(sorted(differ)), worst, apart(wanted, plain))


def apart(one: Result, other: Result) -> float:
    """The largest difference of a gradient between two results, relative to that gradient's largest element."""
    pairs = [(one.grads[n], grad) for n, grad in other.grads.items()]
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in pairs)


def shared_by_stages(pipe: zbfx.Pipeline, model: torch.nn.Module, found: tuple[float, str]) -> tuple[float, str]:
    """The same, after a check that the parameter named is one that several stages use; else infinity, to be seen."""
    if not found[0]:
        return found
    weight = model.get_parameter(found[1])
    users = [s for s in pipe.plan.stages if any(model.get_parameter(n) is weight for n in s.names)]
    return found if len(users) > 1 else (float("inf"), found[1])


if __name__ == "__main__":
    sys.exit(main())
