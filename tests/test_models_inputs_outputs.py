"""What goes into a model and what comes out: every structure and type, first needed by whichever stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zbfx
from tests.equal import case, eager, pipe_for, step, wrong
from tests.reference import differences
from tests.test_models_weights import WIDTH, Chain, mse, vectors


class Inputs(Chain):
    """Keyword, None, bool, int, float, nested; a mask that the middle and one that only the last stage reads."""

    def forward(
        self, x: torch.Tensor, *, more: dict[str, Any], flag: bool, turns: int, gain: float, nothing: Any = None, mask: Any = None
    ) -> torch.Tensor:
        y = self.layers[0](x).tanh()
        y = self.layers[1](y * more["list"][0]) if flag else y
        for _ in range(turns):
            y = y * gain
        y = self.layers[2](y + more["deep"]["middle"]).tanh()
        return self.layers[3](y) * (1.0 if mask is None else mask)


class Crossing(Chain):
    """Over the cuts go: int and bool made from values, one without gradient beside one with, one untouched."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        positive, rounded, quiet = y > 0, (y * 10).long(), y.detach().exp()
        z = self.layers[2](self.layers[1](y.tanh()).tanh())
        return self.layers[3](torch.where(positive, z, -z)) + rounded.float() * quiet + y


class Nested(Chain):
    def forward(self, x: torch.Tensor) -> Any:
        a = self.layers[0](x)
        deep = ((a, (a * 2, {"k": a.tanh()})), a.topk(3, -1))
        b = self.layers[1](deep[0][1][0]) + deep[0][1][1]["k"]
        c = self.layers[2](b) + deep[1][0].sum(-1, keepdim=True)
        return self.layers[3](c) * deep[1][1].float().mean(-1, keepdim=True)


class Outputs(Chain):
    """A dict of outputs: from the last stage, from the first, nested, an input itself, a number, a mean."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        early = self.layers[0](x)
        y = early
        for layer in self.layers[1:]:
            y = layer(y).tanh()
        return {"last": y, "early": early, "pair": (y * 2, [early.tanh()]), "input": x, "number": 3, "mean": y.mean()}


def all_outputs(out: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    """A loss of all of them."""
    one = mse(out["last"], target) + out["early"].square().mean() * out["number"]
    return one + (out["pair"][0] * out["pair"][1][0]).sum() + (out["input"] * out["last"]).mean() + out["mean"]


def many(n: int, g: torch.Generator) -> Any:
    (x,), _, target = vectors(n, g)
    more = {"list": [torch.tensor(2.0)], "deep": {"middle": torch.randn(n, WIDTH, generator=g)}}
    mask = torch.rand(n, WIDTH, generator=g) > 0.3
    return (x,), {"more": more, "flag": True, "turns": 3, "gain": 1.25, "nothing": None, "mask": mask}, target


@pytest.mark.parametrize(
    "model, loss, batch",
    [(Inputs, mse, many), (Crossing, mse, vectors), (Nested, mse, vectors), (Outputs, all_outputs, vectors)],
    ids=["inputs", "crossing", "nested", "outputs"],
)
def test_bitwise_one_process(model: type[nn.Module], loss: Any, batch: Any) -> None:
    of = case(model, loss, batch)
    assert wrong(of, eager(of, 2), stages=(2, 4)) == {}


@pytest.mark.parametrize("stages", [1, 4])
def test_predict_gives_the_models_own_structure(stages: int) -> None:
    """With a batch dimension joined along it; a scalar of every microbatch stacked."""
    of = case(Outputs, all_outputs, vectors)
    model, pipe = pipe_for(of, stages)
    step(of, pipe)
    (x,), _, _ = of.batch(4)
    out = pipe.predict(x)
    with torch.no_grad():
        halves = [model.eval()(half) for half in x.chunk(2)]
    assert out.keys() == halves[0].keys() and out["number"] == 3
    for name in ("last", "early", "input"):
        assert torch.equal(out[name], torch.cat([h[name] for h in halves])), name
    assert torch.equal(out["pair"][1][0], torch.cat([h["pair"][1][0] for h in halves]))
    assert torch.equal(out["mean"], torch.stack([h["mean"] for h in halves]))


def test_double_precision() -> None:
    of = case(lambda: Crossing().double(), mse, lambda n, g: _double(vectors(n, g)))
    assert wrong(of, eager(of, 2), stages=(3,)) == {}


def _double(batch: Any) -> Any:
    (x,), kwargs, target = batch
    return (x.double(),), kwargs, target.double()


def test_an_input_that_requires_grad_is_refused() -> None:
    """It would get no gradient, where eager autograd gives it one."""
    of = case(Chain, mse, vectors)
    _, pipe = pipe_for(of, 2)
    (x,), _, target = of.batch(4)
    with pytest.raises(zbfx.InputError, match=r"\[0\]\[0\] of shape \[4, 8\] requires grad, .* detach\(\) it"):
        pipe.step(x.requires_grad_(), target=target)


# ---------------------------------------------------------------- shapes


def test_sizes_that_change_from_step_to_step() -> None:
    """Longer and shorter rows, one sample a microbatch; parameters stay where they are."""

    def rows(n: int, g: torch.Generator, length: int = 5) -> Any:
        return (torch.randn(n, length, WIDTH, generator=g),), {}, torch.randn(n, length, WIDTH, generator=g)

    of = case(Chain, mse, rows)
    model, pipe = pipe_for(of, 3)
    owners = pipe.plan.owners
    for length, samples in ((5, 4), (2, 4), (9, 2), (5, 4)):
        g = torch.Generator().manual_seed(length)
        (x,), _, target = rows(samples, g, length)
        twin = of.fresh()
        total = torch.zeros(())
        for part, want in zip(x.chunk(2), target.chunk(2), strict=True):
            loss = mse(twin(part), want) / 2
            loss.backward()
            total = total + loss.detach()
        model.zero_grad()
        assert torch.equal(pipe.step(x, target=target), total)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        assert pipe.plan.owners == owners


def test_a_last_partial_batch_is_refused_with_the_way_out_or_runs_with_fewer_microbatches() -> None:
    of = case(Chain, mse, vectors)
    model, pipe = pipe_for(of, 2, microbatches=3)
    (x,), _, target = of.batch(4)
    with pytest.raises(zbfx.InputError, match="a batch of 4 does not divide into microbatches=3"):
        pipe.step(x, target=target)
    assert all(p.grad is None for p in model.parameters())
    loss = pipe.reschedule(microbatches=2).step(x, target=target)
    assert differences(model, loss, eager(of, 2)) == []
