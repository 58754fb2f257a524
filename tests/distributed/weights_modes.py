"""When weights change, on real ranks: post-validation against synchronous, 2BW against its equation, all against one process.

`python -m tests.distributed.weights_modes RANKS` runs the whole table: optimizers, schedules, 50 steps (minutes).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests import modes
from zbfx.runtime import Channel, run_processes
from zbfx.runtime.versions import Versions

Row = tuple[str, str, str, int]  # weights, optimizer, schedule, stages


def write_results(folder: Path, rows: Sequence[Row], steps: int, microbatches: int) -> None:
    """What one process gives: a synchronous pipeline of as many stages, or 2BW's equation."""
    for weights, optimizer, _, stages in rows:
        file = _file(folder, weights, optimizer, stages)
        if file.exists():
            continue
        if weights == "2bw":
            of = modes.model(stages, dropout=0.0)
            losses, _, opt = modes.double_buffered(of, modes.OPTIMIZERS[optimizer], steps, microbatches)
            names = {id(p): n for n, p in of.named_parameters()}
            state = {f"{names[id(p)]}:{k}": v for p, kept in opt.state.items() for k, v in kept.items() if v is not None}
            torch.save([losses, {n: p.detach() for n, p in of.named_parameters()}, state], file)
            continue
        run = _run("synchronous", optimizer, "zb-h1", stages, steps, microbatches)
        run.pipe.close()
        torch.save([run.losses, run.values, run.state], file)


def _file(folder: Path, weights: str, optimizer: str, stages: int) -> Path:
    return folder / f"{'2bw' if weights == '2bw' else 'one'}-{optimizer}-{stages}.pt"


def _run(weights: str, optimizer: str, schedule: str, stages: int, steps: int, microbatches: int) -> modes.Run:
    """A block a stage; the fault is in a middle one, of which the ranks before it in the chain cannot know."""
    options: dict[str, Any] = {"weights": weights, "schedule": schedule, "stages": stages, "microbatches": microbatches}
    if weights == "2bw":
        return modes.train(modes.model(stages, dropout=0.0), modes.OPTIMIZERS[optimizer], steps, quiet=True, **options)
    given = {"max_norm": modes.MAX_NORM, "faults": f"{stages // 2}.0.weight"}
    return modes.train(modes.model(stages), modes.OPTIMIZERS[optimizer], steps, **given, **options)


def table(channel: Channel, folder: str, rows: Sequence[Row], steps: int, microbatches: int) -> dict[str, Any]:
    """Per row, on this rank: what differs from one process's result, rollbacks, repeats, versions alive."""
    found = {}
    for weights, optimizer, schedule, stages in rows:
        begun = time.process_time()
        losses, values, state = torch.load(_file(Path(folder), weights, optimizer, stages), weights_only=True)
        run = _run(weights, optimizer, schedule, stages, steps, microbatches)
        held = run.values
        wrong = [f"loss {i}" for i, (a, b) in enumerate(zip(run.losses, losses, strict=True)) if not modes.same(a, b)]
        wrong += modes.unlike(held, {n: v for n, v in values.items() if n in held})
        wrong += modes.unlike(run.state, {n: v for n, v in state.items() if n.split(":")[0] in held})
        wrong += [] if 0 < len(held) < len(values) else [f"this rank holds {len(held)} of {len(values)} tensors"]
        assert run.pipe._engine is not None and run.pipe._engine.updating is not None
        (mine,) = run.pipe._engine.updating.ranks.values()
        found[" ".join(map(str, (weights, optimizer, schedule, stages)))] = {
            "wrong": wrong,
            "rollbacks": run.progress.rollbacks,
            "repeats": run.progress.repeats,
            "clipped": run.progress.clipped,
            "skipped": run.progress.skipped,
            "alive": [*run.alive] if isinstance(mine, Versions) else [],
            "seconds": time.process_time() - begun,
        }
        run.pipe.close()
    return found


def all_rows(ranks: int) -> list[Row]:
    """Every optimizer and schedule; a V has two stages a rank."""
    late = [("post-validation", o, s, 4) for o in ("momentum", "adamw") for s in ("zb-h1", "zb-h2")]
    late += [("post-validation", o, "zb-v", 2 * ranks) for o in ("momentum", "adamw")]
    bw = [("2bw", o, s, 4) for o in modes.OPTIMIZERS for s in ("1f1b", "zb-h1")]
    return [*late, *bw, *[("2bw", o, "zb-v", 2 * ranks) for o in modes.OPTIMIZERS]]


def main(ranks: int) -> int:
    """The whole table of points 1 and 2."""
    rows, steps, microbatches = all_rows(ranks), 50, 8
    with tempfile.TemporaryDirectory() as folder:
        write_results(Path(folder), rows, steps, microbatches)
        results = run_processes(table, ranks, (folder, rows, steps, microbatches), dead_after=60.0)
    failed = 0
    for key in results[0]:
        each = [r[key] for r in results]
        wrong = [f"rank {i}: {', '.join(e['wrong'][:4])}" for i, e in enumerate(each) if e["wrong"]]
        failed += bool(wrong)
        alive = {max(e["alive"]) for e in each if e["alive"]}
        print(
            f"{ranks} ranks, {key} stages: {'; '.join(wrong) or 'bitwise equal'} after {steps} steps; "
            f"clipped {each[0]['clipped']}, "
            f"skipped {each[0]['skipped']}, rollbacks {sum(e['rollbacks'] for e in each)}, repeats {each[0]['repeats']}"
            + (f", versions alive {alive}" if alive else "")
        )
    print(f"{len(rows) - failed} of {len(rows)} rows equal one process")
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(int(sys.argv[1])))
