"""Hand-made rank programs in the form that the code generator writes: two linear stages, fused or split backward."""

from __future__ import annotations

from types import ModuleType

import torch

STAGES = """
import torch
aten = torch.ops.aten

class stage_0:
    @staticmethod
    def F(w, b, x):
        h = aten.addmm.default(b, x, aten.t.default(w))
        y = aten.tanh.default(h); del h
        return y, y

    @staticmethod
    def W(x, y, gy):
        gh = aten.tanh_backward.default(gy, y)
        gw = aten.mm.default(aten.t.default(gh), x)
        gb = aten.sum.dim_IntList(gh, [0])
        return gw, gb

class stage_1:
    @staticmethod
    def F(w, b, x, target):
        y = aten.addmm.default(b, x, aten.t.default(w))
        d = aten.sub.Tensor(y, target)
        return aten.mean.default(aten.mul.Tensor(d, d)), d

    @staticmethod
    def B(w, d, g):
        gy = aten.mul.Tensor(d, aten.mul.Scalar(g, 2.0 / d.numel()))
        return aten.mm.default(gy, w), gy

    @staticmethod
    def W(x, gy):
        return aten.mm.default(aten.t.default(gy), x), aten.sum.dim_IntList(gy, [0])

MESSAGES = {
    "1F": (0, 1, (("float32", (8, 16), (16, 1)),)),
    "0W": (1, 0, (("float32", (8, 16), (16, 1)),)),
}
"""

RANK_0 = (
    STAGES
    + """
def step(rank):
    rank.begin("0F0")
    x_0, = rank.inputs(0, 0)
    y_0, s_0 = stage_0.F(*rank.params(0), x_0)
    rank.send("1F0", y_0); del y_0
    rank.post("0W0")
    rank.begin("0F1")
    x_1, = rank.inputs(0, 1)
    y_1, s_1 = stage_0.F(*rank.params(0), x_1)
    rank.sent("1F0")
    rank.send("1F1", y_1); del y_1
    rank.post("0W1")
    rank.begin("0W0")
    g_0, = rank.recv("0W0")
    rank.accumulate(0, stage_0.W(x_0, s_0, g_0)); del s_0, g_0
    rank.sent("1F1")
    rank.begin("0W1")
    g_1, = rank.recv("0W1")
    rank.accumulate(0, stage_0.W(x_1, s_1, g_1)); del s_1, g_1
"""
)

RANK_1 = (
    STAGES
    + """
def step(rank):
    rank.post("1F0")
    rank.begin("1F0")
    x_0, = rank.recv("1F0")
    loss_0, d_0 = stage_1.F(*rank.params(1), x_0, *rank.inputs(1, 0))
    rank.post("1F1")
    rank.begin("1B0")
    g_0 = rank.loss(0, loss_0); del loss_0
    gx_0, k_0 = stage_1.B(rank.params(1)[0], d_0, g_0); del d_0, g_0
    rank.send("0W0", gx_0); del gx_0
    rank.begin("1F1")
    x_1, = rank.recv("1F1")
    loss_1, d_1 = stage_1.F(*rank.params(1), x_1, *rank.inputs(1, 1))
    rank.begin("1B1")
    rank.sent("0W0")
    g_1 = rank.loss(1, loss_1); del loss_1
    gx_1, k_1 = stage_1.B(rank.params(1)[0], d_1, g_1); del d_1, g_1
    rank.send("0W1", gx_1); del gx_1
    rank.begin("1W0")
    rank.accumulate(1, stage_1.W(x_0, k_0)); del x_0, k_0
    rank.begin("1W1")
    rank.accumulate(1, stage_1.W(x_1, k_1)); del x_1, k_1
    rank.sent("0W1")
"""
)


def program(source: str, name: str = "program") -> ModuleType:
    """The module that `source` defines."""
    module = ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


class Example:
    """Parameters, inputs and targets of the two stages, and what one process computes from them."""

    def __init__(self, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)

        def make(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.params = {s: tuple(torch.nn.Parameter(p) for p in (make(16, 16), make(16))) for s in (0, 1)}
        self.inputs = {(s, mb): (make(8, 16),) for s in (0, 1) for mb in (0, 1)}
        self.weights = [torch.tensor(0.5, device=device) for _ in range(2)]

    def reference(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Losses and gradients of the unsplit model, by autograd in float64."""
        params = [p.detach().double().requires_grad_() for s in (0, 1) for p in self.params[s]]
        losses = []
        for mb in (0, 1):
            y = torch.tanh(torch.addmm(params[1], self.inputs[0, mb][0].double(), params[0].t()))
            d = torch.addmm(params[3], y, params[2].t()) - self.inputs[1, mb][0].double()
            losses.append((d * d).mean())
            (losses[-1] / 2).backward()
        return losses, [p.grad for p in params if p.grad is not None]
