"""Dropout: masks depend on seed, step, microbatch and operator; not on stages, ranks, schedule or recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbfx
from tests.equal import case, pipe_for, step
from tests.models import Case
from tests.test_models_weights import WIDTH, Chain, mse, vectors

F = nn.functional


class Dropping(Chain):
    """Dropout as a module, as a function, in fused attention, as noise from rand_like."""

    def init(self) -> None:
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.layers[0](x).tanh())
        q = self.layers[1](x).view(-1, 2, 2, 2)
        x = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).flatten(1)
        x = F.dropout(self.layers[2](x), 0.1, self.training) + 0.01 * torch.rand_like(x)
        return self.layers[3](x)


class Recomputed(Chain):
    """Dropout within checkpointed regions, or without them."""

    regions = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def block(x: torch.Tensor, i: int) -> torch.Tensor:
            return F.dropout(self.layers[i](x).tanh(), 0.4)

        for i in range(4):
            x = checkpoint(block, x, i, use_reentrant=False) if self.regions else block(x, i)
        return x


class Plain(Recomputed):
    regions = False


def run(of: Case, stages: int, *, steps: int = 2, seed: int = 7, **options: Any) -> list[torch.Tensor]:
    """Losses and, after the last step, gradients."""
    model, pipe = pipe_for(of, stages, seed=seed, **options)
    losses = [step(of, pipe) for _ in range(steps)]
    return [*losses, *[p.grad.clone() for p in model.parameters()]]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_masks_are_the_same_for_all_stages_ranks_and_schedules() -> None:
    of = case(Dropping, mse, vectors)
    one = run(of, 1, schedule="gpipe")
    for stages, ranks, schedule in ((2, 2, "1f1b"), (4, 2, "zb-h1"), (4, 4, "gpipe")):
        assert same(run(of, stages, ranks=ranks, schedule=schedule), one), (stages, ranks, schedule)
    assert not same(run(of, 2, seed=8), one)


def test_recomputation_draws_the_same_masks() -> None:
    plain, again = case(Plain, mse, vectors), case(Recomputed, mse, vectors)
    one = run(plain, 1)
    assert same(run(again, 1), one) and same(run(again, 3), one)


class Mask(nn.Module):
    """Shows its mask: gives back dropout of ones, times a weight of one."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.gain = rate, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * self.gain, self.rate)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_rate_and_independence_of_steps_and_microbatches(rate: float) -> None:
    """Each microbatch's loss is the mean of its own mask, taken twice over; 4 microbatches of 8192 elements, 3 steps."""
    count = 8192
    model = Mask(rate)
    pipe = zbfx.compile(model, 1, loss=lambda out, target: (out * target).sum(), microbatches=4, reduction="sum", seed=1)
    x = torch.ones(4, count)
    marks = torch.zeros(4, count)
    masks = []
    for _ in range(3):
        for mb in range(4):  # the gradient of gain in a microbatch alone, with the others' losses multiplied by 0
            marks.zero_()[mb] = 1.0
            before = 0.0 if model.gain.grad is None else model.gain.grad.item()
            pipe.step(x, target=marks)
            assert model.gain.grad is not None
            masks.append((model.gain.grad.item() - before) * (1 - rate) / count)
    kept = torch.tensor(masks)
    sigma = (rate * (1 - rate) / count) ** 0.5
    assert ((kept - (1 - rate)).abs() < 4 * sigma).all(), kept
    assert len(set(masks)) > 9  # twelve draws of their own
    assert (kept.std() > 0.3 * sigma) and (kept.std() < 2 * sigma)


def test_without_a_seed_torchs_own_decides_and_torchs_stream_is_left_alone() -> None:
    of = case(Dropping, mse, vectors)
    torch.manual_seed(3)
    a = run(of, 2, seed=None)  # type: ignore[arg-type]
    torch.manual_seed(3)
    b = run(of, 2, seed=None)  # type: ignore[arg-type]
    torch.manual_seed(4)
    c = run(of, 2, seed=None)  # type: ignore[arg-type]
    assert same(a, b) and not same(a, c)
    model, pipe = pipe_for(of, 2, seed=1)
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    step(of, pipe)
    assert torch.equal(torch.rand(3), wanted) and model.layers[0].weight.shape == (WIDTH, WIDTH)
