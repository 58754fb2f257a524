"""One process answers for all, whoever asks first; one that never answers is not waited for without end."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from zbfx.errors import RankError
from zbfx.runtime import Channel, agree, run_processes

CPU = torch.device("cpu")


def ask(channel: Channel) -> dict[str, Any]:
    """Two questions in another order on each rank; then one that rank 0 alone was asked before, and does not answer in time."""
    questions = ("left", "right") if channel.index == 0 else ("right", "left")
    answers = {q: agree(q, lambda q=q: f"{q}: rank {channel.index}", device=CPU, timeout=60.0) for q in questions}  # type: ignore[misc]
    if channel.index == 0:
        agree("late", lambda: time.sleep(3) or "done", device=CPU, timeout=60.0)
        return answers
    time.sleep(1)
    with pytest.raises(RankError, match=r"gave no answer in 0\.5 s"):
        agree("late", lambda: "nobody", device=CPU, timeout=0.5)
    return answers


def test_all_processes_get_the_same_answers() -> None:
    first, second = run_processes(ask, 2)
    assert first == second and set(first) == {"left", "right"}
