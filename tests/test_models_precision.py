"""bfloat16, autocast, gradients in a wider type; then hooks on parameters and clipping: as in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zbfx
from tests.equal import Result, case, eager, pipe_for, step
from tests.models import MODELS, Case
from tests.reference import differences

Context = Callable[[], contextlib.AbstractContextManager[Any]]


def autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def typed(dtype: torch.dtype) -> Case:
    """The small GPT-2 in a type."""
    of = MODELS["gpt2"](layers=1)
    return Case(of.fresh().to(dtype).train(), of.loss, of.batch)


def in_one_process(of: Case, context: Context, grad_dtype: torch.dtype | None) -> Result:
    """The forward within the context, the backward outside; gradients added in grad_dtype."""
    model = of.fresh()
    for p in model.parameters() if grad_dtype else ():
        p.grad_dtype = grad_dtype
    _, kwargs, _ = of.batch(4)
    total = None
    for ids in kwargs["input_ids"].chunk(2):
        with context():
            loss = model(input_ids=ids, labels=ids).loss / 2
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    return Result(total, {n: p.grad for n, p in model.named_parameters()}, {})


@pytest.mark.parametrize(
    "dtype, context, grad_dtype",
    [
        (torch.bfloat16, contextlib.nullcontext, None),
        (torch.float32, autocast, None),
        (torch.bfloat16, contextlib.nullcontext, torch.float32),
        (torch.float64, contextlib.nullcontext, None),
    ],
    ids=["bf16", "autocast", "bf16, gradients in fp32", "fp64"],
)
def test_bitwise_one_process(dtype: torch.dtype, context: Context, grad_dtype: torch.dtype | None) -> None:
    of = typed(dtype)
    model = of.fresh()
    for p in model.parameters() if grad_dtype else ():
        p.grad_dtype = grad_dtype
    pipe = zbfx.compile(model, 3, microbatches=2)
    with context():
        loss = pipe.step(**of.batch(4)[1])
    wanted = in_one_process(of, context, grad_dtype)
    assert differences(model, loss, wanted) == []
    assert {p.grad.dtype for p in model.parameters()} == {grad_dtype or dtype}


def test_a_step_outside_autocast_is_another_plan() -> None:
    of = typed(torch.float32)
    model = of.fresh()
    pipe = zbfx.compile(model, 2, microbatches=2)
    with autocast():
        rough = pipe.step(**of.batch(4)[1])
    model.zero_grad()
    exact = pipe.step(**of.batch(4)[1])
    assert rough != exact
    assert differences(model, exact, in_one_process(of, contextlib.nullcontext, None)) == []


# ---------------------------------------------------------------- hooks and clipping


def test_hooks_fire_once_a_step_when_the_gradient_is_whole() -> None:
    of = MODELS["mlp"]()
    model, pipe = pipe_for(of, 3)
    seen: list[tuple[str, torch.Tensor]] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda q, name=name: seen.append((name, q.grad.clone())))
    wanted = eager(of, 2)
    step(of, pipe)
    assert sorted(n for n, _ in seen) == sorted(n for n, _ in model.named_parameters())
    assert all(torch.equal(g, wanted.grads[n]) for n, g in seen)
    step(of, pipe)
    assert len(seen) == 2 * len(wanted.grads)


def test_an_optimizer_in_a_hook() -> None:
    """Steps each parameter as soon as its gradient is whole, and drops the gradient."""
    of = MODELS["mlp"]()
    model, pipe = pipe_for(of, 2)
    twin = of.fresh()
    for p in model.parameters():
        one = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda _, one=one: (one.step(), one.zero_grad()))
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        step(of, pipe)
        eager(of, 2, twin)
        plain.step()
        plain.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_hooks_that_would_be_lost_are_refused() -> None:
    of = MODELS["mlp"]()
    model, pipe = pipe_for(of, 2)
    handle = model[0].weight.register_hook(lambda g: g * 2)
    with pytest.raises(zbfx.InputError, match=r"'0\.weight' has a hook from register_hook"):
        step(of, pipe)
    handle.remove()
    model[1].register_full_backward_hook(lambda module, gx, gy: None)
    with pytest.raises(zbfx.InputError, match="module '1' has a backward hook"):
        step(of, pipe)


@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf")])
def test_clipping_by_the_global_norm(kind: float) -> None:
    of = MODELS["mlp"]()
    model, pipe = pipe_for(of, 4)
    twin = of.fresh()
    step(of, pipe)
    eager(of, 2, twin)
    ours = pipe.clip_grad_norm_(0.05, kind)
    assert torch.equal(ours, nn.utils.clip_grad_norm_(twin.parameters(), 0.05, kind)) and ours > 0.05
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_precision_of_a_single_layer_is_no_matter_of_stages() -> None:
    """Mixed types in one model: a float64 layer between float32 ones, cast by the model."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x).double()).tanh().float()).square().mean()

    of = case(Mixed, None, lambda n, g: torch.randn(n, 4, generator=g))
    model, pipe = pipe_for(of, 3)
    assert differences(model, step(of, pipe), eager(of, 2)) == []
