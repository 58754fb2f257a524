"""What weights in time do to the loss: python benchmarks/convergence.py [--steps 300] [--out docs] [--redraw].

The demo's GPT-2 (2 layers, 2 stages on 2 in-process ranks) on the demo's text, from the same seed, with the same batches,
learning rate and clipping: synchronous, post-validation, and 2bw as it is and with each of its corrections; SGD with momentum
and AdamW. Writes convergence.svg, convergence.md (a table) and convergence.json (all losses); --redraw only draws them again.
The picture needs matplotlib: pip install 'zbfx[plot]'.

Exits 1 if a loss of post-validation is not bit for bit the synchronous one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import zbfx
from zbfx.demo_model import build_model, read_text

LENGTH, SAMPLES, MICROBATCHES, STAGES = 64, 8, 4, 2
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"schedule": "zb-h1"},
    "post-validation": {"schedule": "zb-h2", "weights": "post-validation"},
    "2bw": {"schedule": "zb-h1", "weights": "2bw"},
    "2bw, predict": {"schedule": "zb-h1", "weights": "2bw", "correction": "predict"},
    "2bw, taylor": {"schedule": "zb-h1", "weights": "2bw", "correction": "taylor"},
}
# Chosen by the synchronous loss alone: AdamW does better with 1e-3 than with 3e-3, SGD alike with 0.03, 0.1 and 0.2.
OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.03, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
}
WINDOW = 25  # steps that a point of a curve is the mean of
COLOURS = {"synchronous": "black", "post-validation": "tab:orange", "2bw": "tab:red", "2bw, predict": "tab:blue"}
COLOURS |= {"2bw, taylor": "tab:green"}


def batches(seed: int) -> Iterator[torch.Tensor]:
    """Random windows of the text, i64[SAMPLES, LENGTH]."""
    text, generator = read_text(), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (SAMPLES,), generator=generator)
        yield torch.stack([text[s : s + LENGTH] for s in starts.tolist()])


def train(mode: str, optimizer: str, steps: int) -> dict[str, Any]:
    """Losses of all steps, and the loss of the final weights on other windows of the text."""
    model, data = build_model(2), batches(0)
    first = next(data)
    pipe = zbfx.compile(
        model,
        STAGES,
        example_inputs=(first,),
        example_kwargs={"labels": first},
        microbatches=MICROBATCHES,
        optimizer=OPTIMIZERS[optimizer],
        max_norm=1.0,
        **MODES[mode],
    )
    losses = [pipe.step(first, labels=first).item()]
    losses += [pipe.step(ids, labels=ids).item() for _, ids in zip(range(steps - 1), data, strict=False)]
    last = pipe.flush()
    if last is not None:  # a stream reports each loss one step later
        losses = [*losses[1:], last.item()]
    unseen = [pipe.eval_step(ids, labels=ids).item() for _, ids in zip(range(10), batches(1), strict=False)]
    progress = pipe.progress
    counts = {"clipped": progress.clipped, "rollbacks": progress.rollbacks, "repeats": progress.repeats}
    return {"losses": losses, "unseen": sum(unseen) / len(unseen), **counts}


def main() -> int:
    """Train all, then draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the three files (default: %(default)s)")
    parser.add_argument("--redraw", action="store_true", help="from convergence.json, without training")
    args = parser.parse_args()
    torch.set_num_threads(1)
    file = args.out / "convergence.json"
    if args.redraw:
        found = json.loads(file.read_text())
    else:
        found = {}
        for optimizer in OPTIMIZERS:
            for mode in MODES:
                found.setdefault(optimizer, {})[mode] = run = train(mode, optimizer, args.steps)
                print(f"{optimizer:6} {mode:16} last {WINDOW} steps {mean(run['losses'][-WINDOW:]):.3f}", flush=True)
        file.write_text(json.dumps(rounded(found)) + "\n")
    text = table(found)
    (args.out / "convergence.md").write_text(text)
    print(text)
    draw(found, args.out / "convergence.svg")
    different = [o for o, runs in found.items() if runs["synchronous"]["losses"] != runs["post-validation"]["losses"]]
    if different:
        print(f"post-validation is not synchronous: {', '.join(different)}")
    return 1 if different else 0


def rounded(found: dict[str, Any]) -> dict[str, Any]:
    """Losses with as many digits as float32 has."""
    return {
        o: {m: {**run, "losses": [round(x, 7) if math.isfinite(x) else None for x in run["losses"]]} for m, run in runs.items()}
        for o, runs in found.items()
    }


def mean(values: list[float]) -> float:
    """NaN counts: a run that has diverged says so."""
    return sum(math.nan if v is None else v for v in values) / len(values)


def table(found: dict[str, Any]) -> str:
    """Per optimizer and mode: the mean loss up to some steps, and the final weights' loss; steps clipped and taken back."""
    count = len(next(iter(found.values()))["synchronous"]["losses"])
    at = [count // 6, count // 3, 2 * count // 3, count]
    head = ["optimizer", "weights", *[f"loss, step {n}" for n in at], "other windows", "clipped", "rolled back"]
    rows = [head, ["---"] * len(head)]
    for optimizer, runs in found.items():
        for mode, run in runs.items():
            losses = [f"{mean(run['losses'][n - WINDOW : n]):.3f}" for n in at]
            counts = [str(run["clipped"]), f"{run['rollbacks']}, forwards again {run['repeats']}" if run["rollbacks"] else "0"]
            rows.append([optimizer, mode, *losses, f"{run['unseen']:.3f}", *counts])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def draw(found: dict[str, Any], file: Path) -> None:
    """A panel per optimizer, a curve per mode."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("the picture needs matplotlib: pip install 'zbfx[plot]'")
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "zbfx"  # the same file for the same losses
    figure, panels = plt.subplots(1, len(found), figsize=(11, 4.2), sharey=True, layout="constrained")
    for panel, (optimizer, runs) in zip(panels, found.items(), strict=True):
        for mode, run in runs.items():
            means = [mean(run["losses"][n - WINDOW : n]) for n in range(WINDOW, len(run["losses"]) + 1)]
            style = {"linestyle": (0, (2, 3)), "linewidth": 3.0} if mode == "post-validation" else {"linewidth": 1.6}
            panel.plot(range(WINDOW, len(run["losses"]) + 1), means, label=mode, color=COLOURS[mode], **style)
        panel.set_title(optimizer)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(f"loss, mean of {WINDOW} steps")
    panels[-1].legend(frameon=False)
    figure.savefig(file, dpi=110, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
