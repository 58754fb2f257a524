"""2BW whose versions run ahead by the last step's change: its equation, to the bit, and what a user gets to see of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests import modes
from tests.modes import OPTIMIZERS, MakeOptimizer, batch, pipeline, put

STEPS, MICROBATCHES = 8, 4


def reference(of: nn.Module, optimizer: MakeOptimizer) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Step t runs on 2 W(t-1) - W(t-2) and changes W(t): its loss, and the weights after it."""
    parameters = list(of.parameters())
    opt = optimizer(parameters)
    older = old = [p.detach().clone() for p in parameters]
    for step in range(STEPS):
        new = [p.detach().clone() for p in parameters]
        put(parameters, [b.clone().mul_(-1.0).add_(a, alpha=2.0) for a, b in zip(old, older, strict=True)])
        total = torch.zeros(())
        for x, y in zip(*(t.chunk(MICROBATCHES) for t in batch(step, MICROBATCHES, quiet=True)), strict=True):
            loss = nn.functional.mse_loss(of(x), y) / MICROBATCHES
            loss.backward()
            total = total + loss.detach()
        put(parameters, new)
        opt.step()
        opt.zero_grad()
        older, old = old, new
        yield total, [p.detach().clone() for p in parameters]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_it_is_its_equation(optimizer: str) -> None:
    wanted = list(reference(modes.model(dropout=0.0), OPTIMIZERS[optimizer]))
    of = modes.model(dropout=0.0)
    pipe = pipeline(of, weights="2bw", schedule="zb-h1", optimizer=OPTIMIZERS[optimizer], correction="predict")
    losses = []
    for step in range(STEPS):
        x, y = batch(step, MICROBATCHES, quiet=True)
        losses.append(pipe.step(x, target=y))
    losses = [*losses[1:], pipe.flush()]
    assert losses[3] is not None and all(torch.equal(a, b) for a, (b, _) in zip(losses, wanted, strict=True))
    assert all(torch.equal(p, w) for p, w in zip(of.parameters(), wanted[-1][1], strict=True))


def test_its_copy_of_the_weights_is_counted() -> None:
    plain, ahead = (
        dict(pipeline(modes.model(), weights="2bw", optimizer=OPTIMIZERS["sgd"], correction=correction).plan.history)["resident"][
            0
        ]
        for correction in (None, "predict")
    )
    assert ahead.masters == plain.gradients and ahead.total == plain.total + ahead.masters


def test_a_half_precision_parameter_is_refused() -> None:
    with pytest.raises(zbfx.InputError, match=r"correction='predict' needs parameters .*0\.0\.weight is torch\.bfloat16"):
        x, y = (t.bfloat16() for t in batch(0, MICROBATCHES))
        of = modes.model().bfloat16()
        zbfx.compile(
            of, 2, example_inputs=(x,), example_target=y, loss=nn.functional.mse_loss, microbatches=4,
            weights="2bw", optimizer=OPTIMIZERS["sgd"], correction="predict",
        )  # fmt: skip
