"""When weights change, over gloo: `python -m tests.distributed.weights_modes RANKS` runs the whole table; here are some rows."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from tests.distributed import weights_models, weights_modes
from zbfx.errors import RankError
from zbfx.runtime import run_processes

STEPS, MICROBATCHES = 19, 4  # two of which must be taken back


def test_two_ranks(tmp_path: Path) -> None:
    """Post-validation rolls back and ends with one process's bits; 2BW is its equation, of two versions at any time. A weight on
    two ranks, looked at within a stream; a rank that has nothing to train; at last one that fails within a stream."""
    rows = [("post-validation", "adamw", "zb-v", 4), ("post-validation", "adamw", "zb-h2", 4), ("2bw", "momentum", "zb-v", 4)]
    weights_modes.write_results(tmp_path, rows, STEPS, MICROBATCHES)
    with pytest.raises(RankError, match="rank 1 failed at 1F2: ValueError: no such token: -1"):
        run_processes(weights_models.everything, 2, (str(tmp_path), rows, STEPS, MICROBATCHES), dead_after=60.0)
    _check_failure(tmp_path)
    results = [json.loads((tmp_path / f"found {r}").read_text()) for r in range(2)]
    found = [r["models"] for r in results]
    assert [(i, key, wrong) for i, r in enumerate(found) for key, wrong in r.items() if wrong] == []
    assert [len(r) for r in found] == [4, 4]
    tables = [r["table"] for r in results]
    assert [(i, key, row["wrong"]) for i, r in enumerate(tables) for key, row in r.items() if row["wrong"]] == []
    late, blocks, stream = ([r[key] for r in tables] for key in tables[0])
    assert all(e["clipped"] and e["skipped"] == 2 and e["repeats"] for each in (late, blocks) for e in each)
    assert [e["rollbacks"] for e in late] == [1, 0] and [e["rollbacks"] for e in blocks] == [2, 0]
    assert [max(e["alive"]) for e in stream] == [2, 2] and [set(e["alive"][2:]) for e in stream] == [{2}, {2}]


def _check_failure(folder: Path) -> None:
    """At once, and for good: the weights of the ranks may be of different steps."""
    first, *rest = (folder / "told 0").read_text().split("|")
    assert first.startswith("rank 1 failed at 1F2") and len(rest) == 3 and all("a step has failed" in text for text in rest)
    assert not multiprocessing.active_children()
