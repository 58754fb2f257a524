"""Buffers that change, modes, evaluation between steps: the state of one process after every step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import zbfx
from tests.equal import case, eager, exported, pipe_for, step, wrong
from tests.models import Case
from tests.reference import differences
from tests.test_models_weights import WIDTH, Chain, mse, vectors


class Assigned(Chain):
    """A running mean that forward assigns, which export alone would lose; a counter that it adds to in place."""

    def init(self) -> None:
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x * self.mean


class Early(Chain):
    """A buffer that the first layer reads and the third assigns."""

    def init(self) -> None:
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1]((self.layers[0](x) * self.scale).tanh())
        self.scale = self.scale * 0.9 + x.detach().mean(0).abs()
        return self.layers[3](self.layers[2](x).tanh())


class Counted(Chain):
    """Changed in place in forward, in training and in evaluation alike."""

    def init(self) -> None:
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        return super().forward(x) * self.seen.clone()


class Remembers(Chain):
    """Attributes that are only looked at from outside, or filled once: no state. A buffer that no state dict has: state."""

    def init(self) -> None:
        self.last, self.table, self.width = None, None, 0
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or self.width != x.shape[1]:
            self.table, self.width = torch.linspace(0.5, 1.5, x.shape[1]), x.shape[1]
        with torch.inference_mode():
            quiet = self.layers[3](x).mean()
        self.last = super().forward(x * self.table) * self.scale.clone() + quiet.clone()
        self.scale.mul_(0.9)
        return self.last


class NormedTwice(Chain):
    """One batch norm called twice; statistics kept by one, none by the other."""

    def init(self) -> None:
        self.norm, self.none = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layers[1](self.norm(self.layers[0](x)).relu()))
        return self.layers[3](self.none(self.layers[2](x)))


class NormedOnce(Chain):
    def init(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


@pytest.mark.parametrize("model", [Assigned, Early, Counted, Remembers, NormedTwice])
def test_bitwise_one_process_step_after_step(model: type[nn.Module]) -> None:
    of = case(model, mse, vectors)
    assert wrong(of, eager(of, 3), stages=(2, 3), microbatches=3) == {}
    ours, pipe = pipe_for(of, 2)
    twin = of.fresh()
    for _ in range(3):
        loss = step(of, pipe)
        assert differences(ours, loss, eager(of, 2, twin)) == []


@pytest.mark.parametrize("model", [Assigned, Counted, NormedTwice])
def test_evaluation_leaves_training_unchanged(model: type[nn.Module]) -> None:
    """eval_step and predict, before and between the steps, though this forward changes buffers in eval mode too."""
    of = case(model, mse, vectors)
    (quiet, pipe_quiet), (ours, pipe) = pipe_for(of, 2), pipe_for(of, 2)
    args, _, target = of.batch(4)
    for _ in range(2):
        assert torch.isfinite(pipe.eval_step(*args, target=target))
        pipe.predict(*args)
        assert torch.equal(step(of, pipe), step(of, pipe_quiet))
    assert ours.training
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), quiet.state_dict().values(), strict=True))


def test_the_mode_of_every_module_is_respected() -> None:
    """A frozen batch norm in a model that trains; then the whole model in eval mode."""

    of = case(lambda: NormedOnce(), mse, vectors)
    of.model.norm.eval()
    model, pipe = pipe_for(of, 2)
    twin = of.fresh()
    assert differences(model, step(of, pipe), eager(of, 2, twin)) == []
    assert model.norm.num_batches_tracked == 0
    for m in (model, twin):
        m.train()
        m.zero_grad()
    assert differences(model, step(of, pipe), eager(of, 2, twin)) == []
    assert model.norm.num_batches_tracked == 2


class Tuned(Chain):
    """Numbers in attributes that users change between steps: a gain, a list of them, a rate."""

    def init(self) -> None:
        self.gain, self.gains, self.unread = 1.0, [1.0, 0.5], 0
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x * self.gain)) * self.gains[1]


def test_numbers_changed_between_steps_are_the_ones_used() -> None:
    of = case(Tuned, mse, vectors)
    model, pipe = pipe_for(of, 2)
    twin = of.fresh()
    plans = {id(pipe.plan)}
    for change in (lambda m: None, lambda m: setattr(m, "gain", 2.0), lambda m: m.gains.__setitem__(1, 3.0)):
        for m in (model, twin):
            change(m)
        assert differences(model, step(of, pipe), eager(of, 2, twin)) == []
        plans.add(id(pipe.plan))
    assert len(plans) == 3
    model.unread += 1
    step(of, pipe)
    assert id(pipe.plan) in plans
    before = model.layers[0].weight.grad.clone()
    model.drop.p = 1.0
    step(of, pipe)
    assert torch.equal(model.layers[0].weight.grad, before)  # all is dropped


def test_a_model_cast_after_compiling_is_compiled_for_its_new_type() -> None:
    of = case(lambda: nn.Sequential(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)), mean_square, words)
    model, pipe = pipe_for(of, 2)
    step(of, pipe)
    model.zero_grad()
    assert differences(model.bfloat16(), step(of, pipe), eager(of, 2, of.fresh().bfloat16())) == []


def mean_square(out: torch.Tensor, target: Any) -> torch.Tensor:
    return out.square().mean()


def words(n: int, g: torch.Generator) -> Any:
    return torch.randint(0, 9, (n,), generator=g)


def test_a_parameter_that_is_replaced_is_refused() -> None:
    """The programs hold the tensors that they were made for: a new one would be left out without a word."""
    of = case(Chain, mse, vectors)
    model, pipe = pipe_for(of, 2)
    step(of, pipe)
    model.layers[1].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(zbfx.InputError, match=r"'layers.1.weight' is another tensor than when .* copy new values into it"):
        step(of, pipe)
    with pytest.raises(zbfx.InputError, match="is another tensor"):
        pipe.predict(*of.batch(4)[0])


# ---------------------------------------------------------------- vision


class UNet(nn.Module):
    """Long skips from early to late stages, batch norm, transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, 2, 1), nn.Conv2d(8, 12, 3, 2, 1)])
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ModuleList([nn.ConvTranspose2d(12, 8, 2, 2), nn.ConvTranspose2d(8, 6, 2, 2)])
        self.mix = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(12, 6, 3, padding=1), nn.Conv2d(6, 5, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down[0](x).relu()
        b = self.norm(self.down[1](a)).relu()
        c = self.up[0](self.down[2](b).relu())
        d = self.up[1](self.mix[0](torch.cat([c, b], 1)).relu())
        return self.mix[2](self.mix[1](torch.cat([d, a], 1)).relu())


class ResNet(nn.Module):
    """Skip connections, batch norm, in-place ReLU, a strided projection."""

    def __init__(self) -> None:
        super().__init__()
        wide = [4, 4, 8]
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.first, self.second, self.norms, self.skips = (nn.ModuleList() for _ in range(4))
        for i, o in pairwise(wide):
            self.first.append(nn.Conv2d(i, o, 3, o // i, 1, bias=False))
            self.second.append(nn.Conv2d(o, o, 3, 1, 1, bias=False))
            self.norms.append(nn.ModuleList([nn.BatchNorm2d(o), nn.BatchNorm2d(o)]))
            self.skips.append(nn.Identity() if i == o else nn.Conv2d(i, o, 1, 2, bias=False))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for first, second, (a, b), skip in zip(self.first, self.second, self.norms, self.skips, strict=True):
            y = nn.functional.relu(a(first(x)), inplace=True)
            x = nn.functional.relu(b(second(y)) + skip(x), inplace=True)
        return self.head(x.mean((2, 3)))


def pictures(n: int, g: torch.Generator) -> Any:
    return (torch.randn(n, 3, 8, 8, generator=g),), {}, torch.randint(0, 5, (n,), generator=g)


def pixels(n: int, g: torch.Generator) -> Any:
    return (torch.randn(n, 3, 8, 8, generator=g),), {}, torch.randint(0, 5, (n, 8, 8), generator=g)


VISION: dict[str, Callable[[], Case]] = {
    "UNet": lambda: case(UNet, nn.functional.cross_entropy, pixels),
    "ResNet": lambda: case(ResNet, nn.functional.cross_entropy, pictures),
}


@pytest.mark.parametrize("name", VISION)
def test_vision(name: str) -> None:
    """Running statistics are updated once per microbatch, in their order."""
    of = VISION[name]()
    assert wrong(of, exported(of, 3), stages=(2, 4), microbatches=3) == {}
