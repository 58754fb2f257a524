"""What W makes again: cheap operators on what it has anyway, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zbfx
from zbfx.ir import Fn, Stage, outputs_of
from zbfx.passes.split_backward import split_backward
from zbfx.trace.differentiate import differentiate

aten = torch.ops.aten


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def middle(recompute: bool) -> Stage:
    """The middle one of three equal stages."""
    x = torch.randn(8, 16)
    model = nn.Sequential(*[Layer() for _ in range(3)])
    pipe = zbfx.compile(
        model, 3, example_inputs=(x,), example_target=x, loss=nn.functional.mse_loss, microbatches=1, cuts=("1", "2")
    )
    history = dict(pipe.plan.history)
    after: Any = pipe.plan.stages[2].B
    joint = differentiate(history["partition"][1], [n.meta["val"] for n in outputs_of(after.graph)[: after.gives["gx"]]])
    return split_backward(joint, history["capture"], recompute=recompute)


def targets(fn: Fn | None) -> list[Any]:
    return [] if fn is None else [n.target for n in fn.graph.nodes if n.op == "call_function"]


def kept_bytes(stage: Stage) -> int:
    assert stage.B is not None
    return sum(v.nbytes for v in stage.B.group("k"))


def test_w_normalises_again_instead_of_keeping_the_layer_norms_output() -> None:
    kept, again = middle(recompute=False), middle(recompute=True)
    assert aten.native_layer_norm.default in targets(again.W)
    assert aten.native_layer_norm.default not in targets(again.B) + targets(kept.B) + targets(kept.W)
    assert kept_bytes(kept) - kept_bytes(again) == 8 * 16 * 4
    assert kept.F.gives["s"] - again.F.gives["s"] == 1


def test_nothing_dear_and_nothing_random_is_made_again() -> None:
    stage = middle(recompute=True)
    again = targets(stage.B) + targets(stage.W)
    for operator in (aten.addmm.default, aten.tanh.default, aten.bernoulli.p):
        assert operator in targets(stage.F)
        assert operator not in again


def test_a_cast_of_a_parameter_is_made_again_rather_than_saved_for_each_microbatch() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.bfloat16() @ self.linear.weight.bfloat16()).float()

    x = torch.randn(8, 16)
    model = nn.Sequential(*[Cast() for _ in range(3)])
    pipe = zbfx.compile(
        model, 3, example_inputs=(x,), example_target=x, loss=nn.functional.mse_loss, microbatches=1, cuts=("1", "2")
    )
    stage: Any = pipe.plan.stages[1]
    assert all(v.shape != (16, 16) for v in stage.F.group("s"))
    assert aten._to_copy.default in targets(stage.B)
