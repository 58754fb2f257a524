"""Targets for the tests of the command line: small, and without transformers."""

from __future__ import annotations

import torch

import zbfx

not_a_function = 3


def mlp():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(16, 16), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers)


def mean_square(output, target):
    return (output - target).square().mean()


def target():
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    return zbfx.Target(mlp(), (x,), example_target=x.flip(1), loss=mean_square)


class WithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x).square().mean()


def pair():
    return WithLoss(), torch.ones(8, 16)


def on_meta():
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)])
    return zbfx.Target(model, (torch.ones(8, 4096),), example_target=torch.ones(8, 4096), loss=mean_square)


def raises():
    raise RuntimeError("no data here")


def wrong_result():
    return mlp()


def wrong_model():
    return "model", torch.ones(8)


def no_inputs():
    return zbfx.Target(mlp())
