"""What is refused, with the reason and the way out; and the bytes that a rank keeps from step to step, as predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zbfx
from tests import modes
from tests.modes import OPTIMIZERS, batch
from zbfx.passes.order_fixed import order_fixed
from zbfx.runtime.versions import Versions
from zbfx.runtime.weights import Weights
from zbfx.training import Resident

SGD = OPTIMIZERS["sgd"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "weights": ({"optimizer": SGD, "weights": "eventually"}, "weights='eventually': choose one of 'synchronous', 'post-valid"),
    "rollback": ({"optimizer": SGD, "rollback": "none"}, "rollback='none': choose one of 'exact', 'inverse'"),
    "max_norm": ({"optimizer": SGD, "max_norm": 0.0}, "max_norm=0.0: give a positive number"),
    "scale": ({"optimizer": SGD, "loss_scale": -2}, "loss_scale=-2: give a positive number"),
    "inverse": ({"optimizer": SGD, "rollback": "inverse"}, "with weights='synchronous' no step is ever taken back"),
    "correction": ({"optimizer": SGD, "correction": "taylor"}, "corrects 2BW's delay; weights='synchronous' has none"),
    "no optimizer": ({"weights": "2bw"}, "optimizer"),
    "norm alone": ({"max_norm": 1.0}, "optimizer"),
    "not callable": ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)}, "give a function of the parameters"),
    "no Optimizer": ({"optimizer": lambda ps: len(ps)}, "optimizer"),
    "closure": ({"optimizer": lambda ps: torch.optim.LBFGS(ps)}, "the optimizer cannot step a single parameter"),
    "no inverse": (
        {"optimizer": lambda ps: torch.optim.Adafactor(ps), "weights": "post-validation", "rollback": "inverse", "max_norm": 1.0},
        "no inverse of Adafactor",
    ),
    "few": ({"optimizer": SGD, "weights": "2bw", "microbatches": 2, "num_stages": 4}, "2bw keeps two versions"),
    "gpipe": ({"optimizer": SGD, "weights": "2bw", "schedule": "gpipe"}, "2bw needs an order that repeats itself every step"),
    "own": ({"optimizer": SGD, "weights": "2bw", "schedule": order_fixed("1f1b", (0, 1), 4)}, "your own is none: take '1f1b'"),
    "searched": ({"optimizer": SGD, "weights": "2bw", "schedule": "auto"}, "'auto' is none: take '1f1b'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_the_reason(what: str) -> None:
    options, reason = REFUSED[what]
    of, (x, y) = nn.Sequential(*[nn.Linear(modes.WIDTH, modes.WIDTH) for _ in range(4)]), batch(0, 4)
    given: dict[str, Any] = {"num_stages": 2, "microbatches": 4, "schedule": "1f1b", **options}
    with pytest.raises((zbfx.InputError, zbfx.ScheduleError)) as caught:
        zbfx.compile(of, example_inputs=(x,), example_target=y, loss=nn.functional.mse_loss, **given)
    assert reason in str(caught.value)


def test_a_parameter_unfrozen_later_is_refused() -> None:
    of = modes.model(dropout=0.0)
    of[1][0].requires_grad_(False)
    pipe = modes.pipeline(of, 2, optimizer=SGD, schedule="1f1b")
    x, y = batch(0, 4)
    pipe.step(x, target=y)
    of[1][0].requires_grad_(True)
    with pytest.raises(zbfx.InputError, match=r"2 parameters get gradients now .*'1.0.weight' first: unfreeze"):
        pipe.step(x, target=y)


def test_inverse_rollback_in_a_pipeline() -> None:
    """Steps taken back by the inverse leave nearly the same weights, and no snapshot; the exact rollback leaves the same."""
    values, progress = {}, {}
    for rollback in ("synchronous", "exact", "inverse"):
        of = modes.model(dropout=0.0)
        options: dict[str, Any] = {"weights": "synchronous"}
        if rollback != "synchronous":
            options = {"weights": "post-validation", "rollback": rollback}
        pipe = modes.pipeline(of, 2, optimizer=OPTIMIZERS["adamw"], schedule="zb-h1", max_norm=modes.MAX_NORM, **options)
        for step in range(20):
            x, y = batch(step, 4)
            pipe.step(x, target=y)
        pipe.flush()
        values[rollback], progress[rollback] = list(of.parameters()), pipe.progress
    assert progress["exact"].rollbacks == progress["inverse"].rollbacks > 0
    for a, b, c in zip(*values.values(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, a, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- bytes


def nbytes(tensors: Any) -> int:
    """Of the storages behind tensors, each once."""
    found = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in pytree.tree_leaves(tensors) if isinstance(t, Tensor)
    }
    return sum(found.values())


def measured(pipe: zbfx.Pipeline, rank: Weights) -> dict[str, int]:
    """What a rank holds between steps, by what Resident calls it."""
    targets = [w.target for w in rank.weights]
    versions = rank._kept if isinstance(rank, Versions) else {}
    kept = [] if rank._snapshot is None else [rank._snapshot._grads, *[v[1:] for v in rank._snapshot._values]]
    return {
        "parameters": nbytes([[w.parameter.data for w in rank.weights], *[[*v.values()] for v in versions.values()]]),
        "masters": nbytes([t for w, t in zip(rank.weights, targets, strict=True) if t is not w.parameter]),
        "state": nbytes([dict(pipe.optimizer.state.get(t, {})) for t in targets]),
        "gradients": nbytes([t.grad for t in targets]) + (nbytes(rank._gradients) if isinstance(rank, Versions) else 0),
        "rollback": nbytes(kept),
    }


CASES: dict[str, dict[str, Any]] = {
    "synchronous": {"optimizer": OPTIMIZERS["momentum"], "masters": True},
    "post-validation": {"optimizer": OPTIMIZERS["adamw"], "max_norm": 1e9, "masters": True},
    "2bw": {"optimizer": lambda ps: torch.optim.Adafactor(ps), "max_norm": 1e9, "masters": True},
}


@pytest.mark.parametrize("weights", CASES)
def test_bytes_from_step_to_step_are_as_predicted(weights: str) -> None:
    """Of bfloat16 weights with masters: two versions, gradients, state and what a rollback keeps; per rank, to the byte."""
    of = modes.model(dropout=0.0).bfloat16()
    of[2].requires_grad_(False)
    x, y = (t.bfloat16() for t in batch(0, 4))
    options: dict[str, Any] = {"loss": nn.functional.mse_loss, "microbatches": 4, "schedule": "1f1b", **CASES[weights]}
    pipe = zbfx.compile(of, 4, example_inputs=(x,), example_target=y, weights=weights, **options)
    predicted: tuple[Resident, ...] = dict(pipe.plan.history)["resident"]
    assert tuple(r.total for r in predicted) == pipe.plan.static_bytes
    for step in range(3):
        x, y = (t.bfloat16() for t in batch(step, 4, quiet=True))
        pipe.step(x, target=y)
    assert pipe._engine is not None and pipe._engine.updating is not None
    for rank, weights_of_rank in pipe._engine.updating.ranks.items():
        found, wanted = measured(pipe, weights_of_rank), predicted[rank]
        if rank == 2:
            assert wanted.total == nbytes(list(of[2].parameters())) == wanted.parameters and not any(found.values())
            continue
        gradients = found.pop("gradients")
        assert found == {name: getattr(wanted, name) for name in found}, rank
        if weights == "post-validation":
            assert gradients == wanted.gradients
        elif weights == "2bw":  # those of a complete step, and of the next that is on its way
            assert 0 < gradients <= wanted.gradients
        else:
            assert gradients == 0 < wanted.gradients
    pipe.flush()
    if weights == "2bw":  # no stream, no second version
        assert all(len(w.alive) == 1 for w in pipe._engine.updating.ranks.values() if isinstance(w, Versions))
