"""Weights that are shared, used several times, frozen, unused, or made of others: the gradients of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zbfx
from tests.equal import SAMPLES, case, eager, largest, part, pipe_for, step, wrong
from tests.models import Case
from tests.reference import differences

WIDTH = 8
mse = nn.functional.mse_loss


def layers(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.init()

    def init(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class ThreeTimes(Chain):
    """One parameter three times in one stage; x @ w @ w."""

    def init(self) -> None:
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x @ self.w @ self.w).tanh() @ self.w)


class TwoNames(Chain):
    """A parameter under two names, used through both in the first stage."""

    def init(self) -> None:
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.b = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x @ self.a).tanh() @ self.b)


class FrozenMiddle(Chain):
    def init(self) -> None:
        self.layers[1].requires_grad_(False)
        self.layers[2].requires_grad_(False)


class Adapters(Chain):
    """All layers frozen, low-rank adapters on the last two."""

    def init(self) -> None:
        self.layers.requires_grad_(False)
        self.down = nn.ParameterList(torch.randn(2, WIDTH) for _ in range(2))
        self.up = nn.ParameterList(torch.randn(WIDTH, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            extra = x @ self.down[i - 2].t() @ self.up[i - 2].t() if i >= 2 else 0.0
            x = (layer(x) + extra).tanh()
        return x


class Unused(Chain):
    """A module that nobody calls, a parameter that is detached, one that only a branch without gradient reads."""

    def init(self) -> None:
        self.never, self.cut = nn.Linear(3, 3), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            quiet = self.layers[1](x)
        return super().forward(x * self.cut.detach() + quiet)


class Normed(Chain):
    def init(self) -> None:
        self.layers[1] = nn.utils.parametrizations.weight_norm(self.layers[1])
        self.layers[2] = nn.utils.parametrizations.spectral_norm(self.layers[2])
        self.layers[3] = nn.utils.parametrizations.orthogonal(self.layers[3])


class SpectralInAHook(Chain):
    """The old spectral norm: no cut falls between the uses of a parameter that one module makes its weight of."""

    def init(self) -> None:
        self.layers[1], self.layers[3] = nn.utils.spectral_norm(self.layers[1]), nn.utils.spectral_norm(self.layers[3])


class Views(Chain):
    """Weights that are views of one flat parameter, in one stage."""

    def init(self) -> None:
        self.flat = nn.Parameter(torch.randn(2 * WIDTH * WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.flat.view(2, WIDTH, WIDTH).unbind(0)
        return super().forward(nn.functional.linear(nn.functional.linear(x, a).tanh(), b))


class Expanded(Chain):
    """A value broadcast by expand, used before and after the cuts: the sum over copies is taken once, where it was expanded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.layers[0](x)[:, :1].expand(-1, WIDTH)
        h = self.layers[1](wide.tanh())
        return self.layers[3](self.layers[2](h).tanh() + wide)


class Mapped(Chain):
    """Parameters in a dict, one of them 0-dim, and a plain tensor attribute."""

    def init(self) -> None:
        self.table = nn.ParameterDict({"shift": torch.randn(WIDTH), "gain": torch.rand(())})
        self.plain = torch.randn(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.plain) * self.table["gain"] + self.table["shift"]


class Tied(Chain):
    """First and last layer share their weight: on two ranks unless all is one stage."""

    def init(self) -> None:
        self.layers[3].weight = self.layers[0].weight


def vectors(n: int, g: torch.Generator) -> Any:
    return (torch.randn(n, WIDTH, generator=g),), {}, torch.randn(n, WIDTH, generator=g)


@pytest.mark.parametrize(
    "model", [ThreeTimes, TwoNames, FrozenMiddle, Adapters, Unused, Normed, SpectralInAHook, Views, Expanded, Mapped]
)
def test_bitwise_one_process(model: type[nn.Module]) -> None:
    of = case(model, mse, vectors)
    assert wrong(of, eager(of, 2), stages=(3,)) == {}


def test_old_weight_norm() -> None:
    """It cannot be copied once it has run, so three equal models are built."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)))

    with pytest.warns(FutureWarning), torch.random.fork_rng():
        ours, theirs = build(), build()
    of = Case(ours, mse, case(Chain, mse, vectors).batch)
    _, pipe = pipe_for(of, 2, model=ours)
    assert differences(ours, step(of, pipe), eager(of, 2, theirs)) == []


def test_parameters_without_gradient_get_none() -> None:
    of = case(Unused, mse, vectors)
    model, pipe = pipe_for(of, 2)
    step(of, pipe)
    assert {n for n, p in model.named_parameters() if p.grad is None} == {"never.weight", "never.bias", "cut"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_tied_weights_stay_in_step_over_twenty_optimizer_steps(ranks: int) -> None:
    """Two stages sum their parts first, so not bitwise: 1e-6 of the largest element after 20 steps."""
    of = case(Tied, mse, vectors)
    model, pipe = pipe_for(of, 2, ranks=ranks)
    twin = of.fresh()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9) for m in (model, twin))
    losses = []
    for _ in range(20):
        wanted = eager(of, 2, twin)
        losses.append(step(of, pipe))
        torch.testing.assert_close(losses[-1], wanted.loss, rtol=1e-6, atol=0)
        assert largest(model, wanted)[0] < 2e-6
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert model.layers[0].weight is model.layers[3].weight
    assert losses[-1] < 0.8 * losses[0]
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_freezing_and_thawing_between_steps() -> None:
    of = case(Chain, mse, vectors)
    model, pipe = pipe_for(of, 2)
    twin = of.fresh()
    for frozen in ((), (0,), (3,), ()):
        for m in (model, twin):
            for i, layer in enumerate(m.layers):
                layer.requires_grad_(i not in frozen)
            m.zero_grad()
        wanted = eager(of, 2, twin)
        assert differences(model, step(of, pipe), wanted) == []
        assert {n.split(".")[1] for n, p in model.named_parameters() if p.grad is None} == {str(i) for i in frozen}


def test_the_optimizers_state_and_a_changing_rate() -> None:
    """AdamW with a scheduler, gradients of two steps in each of its own: bitwise the parameters of one process."""
    of = case(Chain, mse, vectors)
    model, pipe = pipe_for(of, 4)
    twin = of.fresh()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, twin)]
    rates = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    for i in range(8):
        step(of, pipe)
        eager(of, 2, twin)
        if i % 2:
            for each in (*optimizers, *rates):
                each.step()
            for o in optimizers:
                o.zero_grad()
    assert optimizers[0].param_groups[0]["lr"] == 0.0125
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_state_dict_into_the_original_and_back() -> None:
    of = case(Normed, mse, vectors)
    model, pipe = pipe_for(of, 2)
    original = of.fresh()
    with torch.no_grad():
        for p in pipe.parameters():
            p.add_(0.1)
    original.load_state_dict(pipe.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(original.parameters(), model.parameters(), strict=True))
    pipe.load_state_dict(of.model.state_dict())
    assert differences(model, step(of, pipe), eager(of, 2)) == []


def test_a_parameter_from_outside_the_model_is_refused() -> None:
    """A trace would take it for a constant, and its gradient would be lost without a word."""
    gain = nn.Parameter(torch.ones(WIDTH))
    of = case(Chain, lambda out, target: mse(out * gain, target), vectors)
    with pytest.raises(zbfx.TraceError, match=r"(?s)test_models_weights.py:\d+ .*shape \[8\] that is no part of the model"):
        pipe_for(of, 2)
    of = case(Chain, lambda out, target: mse(out * gain.detach(), target), vectors)
    assert wrong(of, eager(of, 2), stages=(2,)) == {}


def test_a_loss_that_is_a_module_with_tensors() -> None:
    def batch(n: int, g: torch.Generator) -> Any:
        return (torch.randn(n, WIDTH, generator=g),), {}, torch.randint(0, WIDTH, (n,), generator=g)

    loss = nn.CrossEntropyLoss(weight=torch.arange(1.0, WIDTH + 1), label_smoothing=0.1)
    of = case(Chain, loss, batch)
    assert wrong(of, eager(of, 2), stages=(2,)) == {}


def test_reading_the_batch_twice_is_the_same() -> None:
    """part() of the helper cuts as zbfx does."""
    of = case(Chain, mse, vectors)
    whole = of.batch(2 * SAMPLES)
    assert torch.equal(torch.cat([part(copy.deepcopy(whole), i, 2)[0][0] for i in range(2)]), whole[0][0])
