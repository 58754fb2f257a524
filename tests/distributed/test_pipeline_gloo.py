"""Pipelines on real processes over gloo: the same bits, the same bytes, the user's names; and failures that end in seconds."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import failing, pipelines
from tests.models import MODELS
from zbfx.errors import RankError
from zbfx.runtime import run_processes

MICROBATCHES = (1, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results")
    pipelines.write_results(path, list(MODELS), MICROBATCHES)
    return path


def wrong(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"rank {r}: {k}": v for r, result in enumerate(results) for k, v in result.items() if v}


def test_two_ranks_all_models(folder: Path) -> None:
    """One stage a rank, the CNN two: loss, gradients, buffers, bytes, released memory, state dicts; parts, clipping, ties."""
    rows = [(name, 4 if name == "cnn" else 2) for name in MODELS]
    results = run_processes(pipelines.several, 2, (str(folder), rows, MICROBATCHES))
    tables = [r["table"] for r in results]
    assert wrong(tables) == {}
    assert [len(t) for t in tables] == [len(MODELS) * (3 * len(MICROBATCHES) + 1)] * 2
    _check_states([r["states"] for r in results])
    assert wrong([r["parts"] for r in results]) == {}
    first, second = (r["searched"] for r in results)
    assert first == second, "one process searches for all"
    assert first["wrong"] == [] and "no schedule fits" in first["error"]
    assert wrong([r["weights"] for r in results]) == {}


def test_four_ranks(folder: Path) -> None:
    results = run_processes(pipelines.table, 4, (str(folder), [("mlp", 8), ("cnn", 4)], MICROBATCHES))
    assert wrong(results) == {}
    assert [len(t) for t in results] == [2 * (3 * len(MICROBATCHES) + 1)] * 4


def _check_states(states: list[dict[str, Any]]) -> None:
    """Each name is in exactly one rank's state dict; what nobody uses is not lost."""
    case = MODELS["cnn"]()
    names = [n for s in states for n in s["names"]]
    assert sorted(names) == sorted([*case.model.state_dict(), "spare"])
    assert all(set(s["parameters"]) <= set(s["names"]) for s in states)
    assert [s["spare"] for s in states if s["spare"]] == [[7.0, 7.0]]
    (mean,) = [s["mean"] for s in states if s["mean"]]
    args, _, _ = case.batch(4)
    for part in args[0].chunk(2):
        case.model(part)
    assert mean == pytest.approx(case.model[1].running_mean.tolist(), rel=1e-5)
    assert states[0]["eval"] == states[1]["eval"]


@pytest.mark.parametrize("how, cause", [("raise", "ValueError: no such token: -1"), ("SIGKILL", "killed by SIGKILL")])
def test_a_rank_that_fails_takes_the_others_down(how: str, cause: str, tmp_path: Path) -> None:
    """At once: nobody waits the 60 seconds after which a silent rank counts as dead."""
    with pytest.raises(RankError) as caught:
        run_processes(failing.train, 2, (how, str(tmp_path)), dead_after=60.0)
    assert str(caught.value) == f"rank 1 failed at 1F2: {cause}"
    seconds, text = (tmp_path / "told 0").read_text().split("|")
    assert text.startswith(f"rank 1 failed at 1F2: {cause} (rank 0 stopped at ")
    assert float(seconds) < 15
    assert not multiprocessing.active_children()


SCRIPT = """
import sys

import torch
import torch.distributed as dist
import zbfx

torch.manual_seed(0)
model = torch.nn.Sequential(*[part for _ in range(4) for part in (torch.nn.Linear(16, 16), torch.nn.Tanh())])
optimizer_before = torch.optim.SGD(model.parameters(), lr=0.1)
pipe = zbfx.compile(model, num_stages=4, loss=torch.nn.functional.mse_loss, microbatches=4)
x, y = torch.randn(8, 16), torch.randn(8, 16)
try:
    list(pipe.parameters())
    raise SystemExit("parameters before compiling")
except zbfx.InputError as error:
    assert "known once compiled" in str(error)
losses = []
for _ in range(3):
    loss = pipe.step(x, target=y)
    optimizer_before.step()
    optimizer_before.zero_grad()
    losses.append(loss.item())
assert list(pipe.parameters()), "a rank without parameters"
torch.save([losses, pipe.state_dict()], f"{sys.argv[1]}/{dist.get_rank()}.pt")
pipe.close()
"""


def test_a_users_script_under_torchrun(tmp_path: Path) -> None:
    """Four stages on two ranks; the optimizer was made before compiling. The same script alone is the reference."""
    import torch

    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "train.py")]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run([*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (losses, state), (others, state_1) = (torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in (0, 1))
    assert losses == others and losses[2] < losses[0]
    assert not state.keys() & state_1.keys()
    wanted_losses, wanted = alone()
    assert losses == wanted_losses
    merged = {**state, **state_1}
    assert merged.keys() == wanted.keys()
    assert all(torch.equal(merged[n], v) for n, v in wanted.items())


def alone() -> tuple[list[float], dict[str, Any]]:
    """What the script does, on one process without zbfx: the exported model, microbatch by microbatch."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[part for _ in range(4) for part in (torch.nn.Linear(16, 16), torch.nn.Tanh())])
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    unsplit = torch.export.export(model, (x[:2],), strict=False).module()
    optimizer = torch.optim.SGD(unsplit.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        total = torch.zeros(())
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = torch.nn.functional.mse_loss(unsplit(a), b) / 4
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, dict(unsplit.state_dict())


def test_a_failing_script_ends_all_of_torchruns_processes(tmp_path: Path) -> None:
    script = "import sys\nfrom tests.distributed.failing import train\ntrain(None, 'raise', sys.argv[1])\n"
    (tmp_path / "fails.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command.append(str(tmp_path / "fails.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0 and "rank 1 failed at 1F2: ValueError: no such token: -1" in done.stderr
    assert float((tmp_path / "told 0").read_text().split("|")[0]) < 15
