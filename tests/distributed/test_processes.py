"""Real processes over gloo. Processes are slow to start, so the checks that can share them do."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import workers
from zbfx.errors import RankError
from zbfx.runtime import run_processes

DEAD_AFTER = 3.0


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_processes(workers.everything, 2, dead_after=DEAD_AFTER)


def test_every_kind_of_tensor_travels(results: list[dict[str, Any]]) -> None:
    assert [r["kinds"] for r in results] == [[], []]


def test_order_of_messages_does_not_matter(results: list[dict[str, Any]]) -> None:
    assert [r["order"] for r in results] == [[1.0, 2.0, 0.0]] * 2


def test_gradients_losses_and_records(results: list[dict[str, Any]]) -> None:
    for r in results:
        assert r["step"]["error"] < 1e-5
    assert results[0]["step"]["held"] == [["0F0", 0], ["0F1", 1024], ["0W0", 2048], ["0W1", 1024]]
    assert results[1]["step"]["spans"] == ["1F0", "1B0", "1F1", "1B1", "1W0", "1W1"]
    assert [r["step"]["peak"] for r in results] == [3648, 3648]


def test_small_values_reach_everybody(results: list[dict[str, Any]]) -> None:
    assert [r["gather"] for r in results] == [[{"rank": 0, "text": "é"}, {"rank": 1, "text": "éé"}]] * 2
    assert [r["broadcast"] for r in results] == [[10.0, 11.0, 12.0]] * 2


def test_a_slow_rank_is_waited_for(results: list[dict[str, Any]]) -> None:
    assert results[1]["slow"] > 1.5 * DEAD_AFTER


def test_four_ranks_in_a_ring() -> None:
    got = run_processes(workers.ring, 4, dead_after=DEAD_AFTER)
    assert got == [[float(10 * mb + (rank - 1) % 4) for mb in (0, 1)] for rank in range(4)]


@pytest.mark.parametrize(
    "how, cause",
    [
        ("raise", "rank 1 failed at 1F1: ValueError: no such token: 7"),
        ("SIGKILL", "rank 1 failed at 1F1: killed by SIGKILL"),
        ("SIGSTOP", "rank 1 failed at 1F1: no sign of life for 3 s: the process is gone, or frozen"),
    ],
)
def test_a_rank_that_fails_takes_the_others_down(how: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_processes(workers.stop_at, 3, (how, str(tmp_path)), dead_after=DEAD_AFTER)
    ended = time.monotonic()
    assert str(caught.value) == cause
    for rank in (0, 2):
        seconds, text, again = (tmp_path / str(rank)).read_text().split("|")
        assert text == f"{cause} (rank {rank} stopped at {rank}F1)"
        assert again.startswith(cause)
        assert float(seconds) < 2 * DEAD_AFTER + 4
    assert not multiprocessing.active_children()
    assert time.monotonic() - ended < 1
    if how == "raise":
        assert "raise ValueError" in "".join(caught.value.__notes__)


def test_torchrun(tmp_path: Path) -> None:
    """torchrun starts the processes and its variables alone say who they are."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["tests.distributed.workers", str(tmp_path)]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [
        "Place(rank=0, size=2, local_rank=0) [1.0, 11.0]",
        "Place(rank=1, size=2, local_rank=1) [0.0, 10.0]",
    ]
