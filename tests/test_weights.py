"""Weights in time, in one process: post-validation is synchronous to the bit, 2BW is its equation; with all that models bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import modes
from tests.modes import MAX_NORM, OPTIMIZERS, Run, differing, double_buffered, same, train

FAULTS = "2.0.weight"  # of a middle stage: the ranks before it in the chain cannot know
STEPS = 19  # two of which must be taken back
CHECKED: dict[str, Any] = {"max_norm": MAX_NORM, "faults": FAULTS}


def bitwise(run: Run, losses: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether a run has a reference's losses and parameters, these in the model's order."""
    ours = list(run.values.values())
    return all(map(same, run.losses, losses)) and len(ours) == len(parameters) and all(map(same, ours, parameters))


# ---------------------------------------------------------------- the modes


def test_post_validation_is_synchronous_to_the_bit() -> None:
    """Clipped steps, infinite gradients, dropout: ranks that could not know roll back, and first forwards run again."""
    wanted = train(modes.model(), OPTIMIZERS["adamw"], STEPS, schedule="zb-h1", **CHECKED)
    assert wanted.progress.rollbacks == wanted.progress.repeats == 0
    assert wanted.progress.clipped and wanted.progress.skipped == 2
    given: dict[str, dict[str, Any]] = {"zb-h1": {}, "zb-v": {"ranks": 2}, "gpipe": {"ranks": 1}}
    rollbacks = {}
    for schedule, options in given.items():
        run = train(modes.model(), OPTIMIZERS["adamw"], STEPS, schedule=schedule, weights="post-validation", **CHECKED, **options)
        assert differing(run, wanted) == [], schedule
        assert (run.progress.clipped, run.progress.skipped) == (wanted.progress.clipped, 2)
        rollbacks[schedule] = run.progress.rollbacks
    # step 2: the fault is in stage 2; step 17: the norm of the last stage exceeds the limit. Other ranks have stepped by then.
    assert rollbacks == {"zb-h1": 2 + 3, "zb-v": 1 + 0, "gpipe": 0}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_2bw_is_its_equation(optimizer: str) -> None:
    """With a B/W split and without, on four ranks, two and one: the same bits as one process, of two versions at any time."""
    of = modes.model(dropout=0.0)
    losses, parameters, _ = double_buffered(of, OPTIMIZERS[optimizer], 12, 4)
    rows: dict[str, tuple[tuple[str, int], ...]] = {
        "sgd": (("1f1b", 4), ("zb-v", 2)),
        "momentum": (("zb-h1", 4), ("1f1b", 2)),
        "adamw": (("zb-h1", 2), ("zb-h1", 1)),
    }
    for schedule, ranks in rows[optimizer]:
        run = train(
            modes.model(dropout=0.0), OPTIMIZERS[optimizer], 12, weights="2bw", schedule=schedule, ranks=ranks, quiet=True
        )
        assert bitwise(run, losses, parameters), (schedule, ranks)
        assert max(run.alive) == 2 and set(run.alive[2:]) == {2}


def test_2bw_clips_and_skips_alike_on_any_ranks() -> None:
    """Clipped and skipped late, as torch would in one process; the scale of the loss halves for all ranks at the same step."""
    options: dict[str, Any] = {"weights": "2bw", **CHECKED}
    wanted = train(modes.model(dropout=0.0), OPTIMIZERS["momentum"], STEPS, schedule="1f1b", **options)
    assert wanted.progress.clipped and wanted.progress.skipped == 2
    for schedule, ranks, scale in (("zb-v", 2, "dynamic"), ("zb-h1", 1, 1024.0)):
        options |= {"schedule": schedule, "ranks": ranks, "loss_scale": scale}
        run = train(modes.model(dropout=0.0), OPTIMIZERS["momentum"], STEPS, **options)
        assert differing(run, wanted) == [], schedule
        assert run.progress.loss_scale == (2.0**14 if scale == "dynamic" else 1024.0)
    _, parameters, _ = double_buffered(modes.model(dropout=0.0), OPTIMIZERS["momentum"], STEPS, 4, **CHECKED)
    for ours, theirs in zip(wanted.values.values(), parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_dynamic_scale_changes_no_bit() -> None:
    """Powers of two: the weights are those of the unscaled run, and the scale has halved with every infinite step."""
    plain = train(modes.model(), OPTIMIZERS["adamw"], 8, faults=FAULTS, loss_scale=1.0, stages=2)
    for weights in ("synchronous", "post-validation"):
        run = train(modes.model(), OPTIMIZERS["adamw"], 8, faults=FAULTS, loss_scale="dynamic", weights=weights, stages=2)
        assert differing(run, plain) == []
        assert run.progress.skipped == 2 and run.progress.loss_scale == 2.0**14


def test_the_correction_of_the_delay_changes_the_weights_where_asked() -> None:
    losses, parameters, _ = double_buffered(modes.model(dropout=0.0), OPTIMIZERS["sgd"], 8, 4)
    options: dict[str, Any] = {"weights": "2bw", "quiet": True, "ranks": 1, "schedule": "1f1b", "correction": "taylor"}
    run = train(modes.model(dropout=0.0), OPTIMIZERS["sgd"], 8, **options)
    assert not any(map(same, run.values.values(), parameters))
    assert all(map(same, run.losses[:3], losses[:3]))  # the weights have not moved before
    assert all(v.isfinite().all() for v in run.values.values())
