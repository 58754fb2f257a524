"""A GPT written by hand in plain PyTorch: the model of the benchmarks, from four small blocks to 175 billion parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each with a layer norm before and a residual around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        batch, length, width = x_BTC.shape
        q, k, v = self.qkv(self.ln_1(x_BTC)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x_BTC = x_BTC + self.proj(a)
        return x_BTC + self.down(F.gelu(self.up(self.ln_2(x_BTC)), approximate="tanh"))


class GPT(nn.Module):
    """Token and position embeddings, `layers` blocks, a final norm, an untied output layer: ids[B, T] -> logits[B, T, vocab]."""

    def __init__(self, *, layers: int, width: int, heads: int, vocab: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTC = self.tokens(ids_BT) + self.positions(torch.arange(ids_BT.shape[1], device=ids_BT.device))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.ln(x_BTC))


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy over all positions."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
