"""A model that fails in the middle of a step, and a worker that trains it. Imports little: processes of tests start it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

import zbfx
from zbfx.runtime import Channel


@torch.library.custom_op("zbfx_tests::fragile", mutates_args=())
def fragile(x: torch.Tensor, how: str) -> torch.Tensor:
    """Returns a copy; a microbatch of negative numbers raises or kills the process, as `how` says."""
    if x.sum() < 0 and how == "raise":
        raise ValueError("no such token: -1")
    if x.sum() < 0:
        time.sleep(0.6)  # a heartbeat tells where this rank is
        os.kill(os.getpid(), getattr(signal, how))
    return x.clone()


@fragile.register_fake
def _(x: torch.Tensor, how: str) -> torch.Tensor:
    return torch.empty_like(x)


fragile.register_autograd(lambda ctx, grad: (grad, None))


class Fragile(torch.nn.Module):
    """Two layers; the operator after the second fails in microbatch 2 of `bad_batch`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        for layer in (self.first, self.second):
            torch.nn.init.eye_(layer.weight)
            torch.nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fragile(self.second(self.first(x)), self.how).square().mean()


def good_batch() -> torch.Tensor:
    return torch.ones(8, 4)


def bad_batch() -> torch.Tensor:
    x = good_batch()
    x[4:6] = -1.0
    return x


def train(channel: Channel | None, how: str, folder: str) -> None:
    """A good step, then one in which stage 1 fails in 1F2. The other ranks write what they were told, and after how long."""
    pipe = zbfx.compile(Fragile(how), 2, microbatches=4, schedule="1f1b", cuts=["second"])
    pipe.step(good_batch())
    begun = time.monotonic()
    try:
        pipe.step(bad_batch())
    except zbfx.RankError as error:
        Path(folder, f"told {torch.distributed.get_rank()}").write_text(f"{time.monotonic() - begun:.1f}|{error}")
        raise
