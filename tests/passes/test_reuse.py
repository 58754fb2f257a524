"""A stage renamed from an equal one is, but for the names of values, what differentiating and splitting it gives."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbfx

compiler = importlib.import_module("zbfx.compile")  # zbfx.compile is the function of that name


class Layer(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5, rate: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(width, eps=eps), nn.Linear(width, width), nn.Dropout(rate)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.relu(self.linear(self.norm(x)))) * self.scale


class Checkpointed(Layer):
    """Two regions of torch.utils.checkpoint, numbered through the whole model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + checkpoint(lambda v: self.drop(torch.relu(self.linear(self.norm(v)))), x, use_reentrant=False)
        return x * checkpoint(lambda v: torch.sigmoid(self.linear(v)), x, use_reentrant=False)


def sources(model: nn.Module, monkeypatch: pytest.MonkeyPatch, *, reuse: bool) -> tuple[list[str], int]:
    """The rank programs, and how many stages were differentiated."""
    traced = itertools.count()
    real = compiler.differentiate
    monkeypatch.setattr(compiler, "differentiate", lambda *a: (next(traced), real(*a))[1])
    if not reuse:
        different = itertools.count()
        monkeypatch.setattr(compiler, "signature", lambda *_: next(different))
    x = torch.randn(4, 8)
    cuts = [str(i) for i in range(1, len(model))]
    pipe = zbfx.compile(
        model,
        len(model),
        example_inputs=(x,),
        example_target=x,
        loss=nn.functional.mse_loss,
        microbatches=2,
        cuts=cuts,
        seed=3,
    )
    monkeypatch.undo()
    return [numbered(p.source) for p in pipe.plan.programs], next(traced)


def numbered(source: str) -> str:
    """The program with each function's names numbered by their first appearance; operators and comments stay."""
    lines: list[str] = []
    seen: dict[str, str] = {}
    for line in source.splitlines():
        if line.lstrip().startswith("def "):
            seen.clear()
        code, hash_, comment = line.partition("#")
        if line.startswith("    "):
            code = re.sub(r"\b(?!aten_)[A-Za-z_]\w*", _numbers(seen), code)
        lines.append(code + hash_ + comment)
    return "\n".join(lines)


def _numbers(seen: dict[str, str]) -> Callable[[re.Match[str]], str]:
    return lambda name: seen.setdefault(name[0], f"v{len(seen)}")


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_equal_stages_are_traced_once_and_come_out_as_if_each_were(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[Layer(8, rate=rate) for _ in range(6)])
    with_reuse, few = sources(model, monkeypatch, reuse=True)
    without, all_of_them = sources(model, monkeypatch, reuse=False)
    assert with_reuse == without
    assert (few, all_of_them) == (3, 6)  # the first needs no input gradient, the last has the loss


def test_equal_stages_with_checkpointed_regions_share_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[Checkpointed(8, rate=0.5) for _ in range(5)])
    with_reuse, few = sources(model, monkeypatch, reuse=True)
    without, all_of_them = sources(model, monkeypatch, reuse=False)
    assert with_reuse == without
    assert (few, all_of_them) == (3, 5)
    forwards = [len(re.findall(r"= aten_sigmoid\(", text)) for text in with_reuse]
    assert forwards == [2] * 5, "once in F, and once more where the region is computed again"


def test_stages_that_differ_in_a_number_alone_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[Layer(8, eps=eps) for eps in (1e-5, 1e-5, 1e-5, 1e-3, 1e-5, 1e-5)])
    with_reuse, few = sources(model, monkeypatch, reuse=True)
    without, _ = sources(model, monkeypatch, reuse=False)
    assert with_reuse == without
    assert few == 4
    assert "0.001" in with_reuse[3] and "0.001" not in with_reuse[2]


def test_frozen_stages_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[Layer(8) for _ in range(5)])
    model[2].linear.weight.requires_grad_(False)
    with_reuse, few = sources(model, monkeypatch, reuse=True)
    without, _ = sources(model, monkeypatch, reuse=False)
    assert with_reuse == without
    assert few == 4
