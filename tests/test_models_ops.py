"""Operators of all kinds within and across cuts: bitwise one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.equal import case, eager, wrong
from tests.test_models_weights import WIDTH, Chain, mse, vectors

F = nn.functional


class Several(Chain):
    """chunk, split, topk, max, sort: operators with several results."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.layers[0](x).chunk(2, -1)
        c, d, e = self.layers[1](torch.cat([b, a.sigmoid()], -1)).split([2, 3, 3], -1)
        top, where = self.layers[2](torch.cat([e, c, d], -1)).topk(3, -1)
        most, _ = x.max(-1, keepdim=True)
        return self.layers[3](torch.cat([top, where.to(x.dtype), c], -1)).sort(-1)[0] + most * d.sum(-1, keepdim=True)


class InPlace(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        y.mul_(2).add_(1)
        z = self.layers[1](y)
        z[:, 0] = 0
        z[:, 1:3] += y[:, 1:3]
        z = self.layers[2](z.relu().clone().index_add_(1, torch.tensor([0, 3]), y[:, :2]))
        return F.leaky_relu_(self.layers[3](z), 0.1)


class Filled(Chain):
    """A tensor made without gradient, filled in place, read by a later stage (as DeepSeek makes its keys)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        z = y.new_empty(y.shape)
        z[:, :3], z[:, 3:] = y[:, 5:], y[:, :5] * 2
        return self.layers[3](self.layers[2](self.layers[1](y.tanh()).tanh()) + z)


class Scatter(Chain):
    def forward(self, x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        z = torch.zeros_like(y).scatter_add(1, where, y)
        w = self.layers[1](torch.where(z > 0, z, y * 0.1))
        mask = torch.triu(torch.ones(WIDTH, WIDTH, dtype=torch.bool), 1) & (x.sum() < 1e9)
        w = self.layers[2](w) @ torch.eye(WIDTH).masked_fill(mask, 0.5)
        return self.layers[3](w.gather(1, where) + y[:, where[0]])


class Complex(Chain):
    """Fourier transforms, complex parameters, rotations."""

    def init(self) -> None:
        self.w = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fft.irfft(torch.fft.rfft(self.layers[0](x)) * self.w, n=WIDTH)
        z = torch.view_as_complex(self.layers[1](x).view(-1, WIDTH // 2, 2))
        z = z * torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) * 1.0)
        return self.layers[3](self.layers[2](torch.view_as_real(z).flatten(1)).tanh())


class Modes(Chain):
    """no_grad with enable_grad inside, detach, a value that is computed without gradient and sent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            quiet = self.layers[0](x)
            with torch.enable_grad():
                loud = self.layers[1](quiet)
        return self.layers[3](self.layers[2](loud.tanh()) + quiet) - loud.detach()


class Attention(Chain):
    """Multi-head attention, fused attention with a mask, module hooks."""

    def init(self) -> None:
        self.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.0, batch_first=True)
        self.layers[2].register_forward_hook(lambda module, args, out: out * 2)
        self.layers[3].register_forward_pre_hook(lambda module, args: (args[0].tanh(),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x).unsqueeze(1) * torch.linspace(0, 1, 3)[:, None]
        y = self.block(self.heads(y, y, y, need_weights=False)[0])
        q = self.layers[1](y).unflatten(-1, (2, 4)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return self.layers[3](self.layers[2](y)).mean(1)


class Transforms(Chain):
    """nn.Transformer with a causal mask and one of padding; torch looks into their values, a trace cannot."""

    def init(self) -> None:
        self.both = nn.Transformer(WIDTH, 2, 1, 1, 16, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.layers[0](x).unsqueeze(1) * torch.linspace(0, 1, 3)[:, None]
        b = self.layers[1](x).unsqueeze(1) * torch.linspace(1, 0, 4)[:, None]
        causal, padding = nn.Transformer.generate_square_subsequent_mask(4), torch.zeros(len(x), 3)
        padding[:, 2] = float("-inf")
        return self.layers[3](self.both(a, b, tgt_mask=causal, src_key_padding_mask=padding).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = getattr(nn, kind)(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = self.first(x).unsqueeze(1) * torch.linspace(0.1, 1, 3)[:, None]
        return self.last(self.middle(steps)[0][:, -1])


class Bag(Chain):
    def init(self) -> None:
        self.bag = nn.EmbeddingBag(20, WIDTH, mode="mean")
        self.padded = nn.Embedding(20, WIDTH, padding_idx=0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(self.bag(ids) + self.padded(ids[:, 0]))


class Triple(torch.autograd.Function):
    """A ReLU whose backward is not its derivative: export alone would differentiate clamp."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (x > 0) * 3.0


class Pair(torch.autograd.Function):
    """Two tensors and a number in, two tensors out."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, scale: float) -> Any:
        ctx.scale = scale
        return x * scale, x + y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.scale + grads[1] * 0.5, grads[1] * 2.0, None


class Functions(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[1](Triple.apply(self.layers[0](x)))
        a, b = Pair.apply(y, self.layers[2](y), 1.5)
        return self.layers[3](a * b)


@torch.library.custom_op("zbfx_tests::scale", mutates_args=())
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


scale.register_fake(lambda x, by: torch.empty_like(x))
scale.register_autograd(
    lambda ctx, grad: (grad * ctx.by * 2, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1])
)


class CustomOp(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.layers[1](scale(self.layers[0](x), 2.5)).tanh())


def scattered(n: int, g: torch.Generator) -> Any:
    (x,), _, target = vectors(n, g)
    return (x, torch.randint(0, WIDTH, (n, WIDTH), generator=g)), {}, target


def bags(n: int, g: torch.Generator) -> Any:
    return (torch.randint(0, 20, (n, 5), generator=g),), {}, torch.randn(n, WIDTH, generator=g)


@pytest.mark.parametrize("model", [Several, InPlace, Filled, Complex, Modes, Attention, Transforms, Functions, CustomOp])
def test_bitwise_one_process(model: type[nn.Module]) -> None:
    of = case(model, mse, vectors)
    assert wrong(of, eager(of, 2), stages=(4,)) == {}


def test_lstm() -> None:
    """With its workspace, which shapes do not tell, among the bytes."""
    of = case(lambda: Recurrent("LSTM"), mse, vectors)
    assert wrong(of, eager(of, 2), stages=(3,)) == {}


def test_gru() -> None:
    """A width that fills no vector register: its gates are written in place, in pieces whose layout decides the rounding."""
    of = case(lambda: Recurrent("GRU"), mse, vectors)
    assert wrong(of, eager(of, 2), stages=(3,)) == {}


def test_scatter_and_masks() -> None:
    of = case(Scatter, mse, scattered)
    assert wrong(of, eager(of, 2), stages=(4,)) == {}


def test_embedding_bags() -> None:
    """To the byte: the kernel's helper tensors have more room than its shape function says."""
    of = case(Bag, mse, bags)
    assert wrong(of, eager(of, 2), stages=(3,)) == {}


def test_a_custom_backward_is_the_one_that_runs() -> None:
    """The gradients differ from those of the plain operators in its place."""
    of = case(Functions, mse, vectors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Triple, "apply", lambda x: x.clamp(min=0))
        plain = eager(of, 2)
    ours = eager(of, 2)
    assert not torch.equal(ours.grads["layers.0.weight"], plain.grads["layers.0.weight"])
