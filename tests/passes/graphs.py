"""Small graphs for tests of passes: hand-made models, and random ones from hypothesis."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import nn

from zbfx.ir import Captured, Forward, Joint, Link, Stage, outputs_of
from zbfx.passes.partition import partition
from zbfx.passes.split_backward import split_backward
from zbfx.trace.capture import capture
from zbfx.trace.differentiate import differentiate

CPU = torch.device("cpu")
# Each example traces a model: few of them, and none to make a failing one smaller.
TRACED = settings(max_examples=8, phases=(Phase.explicit, Phase.reuse, Phase.generate))
LINK = Link(latency=1e-6, bandwidth=1e9)


class RandomNet(nn.Module):
    """A line of operators drawn by hypothesis: layers with parameters, in-place and fused ones, skips and shared layers."""

    def __init__(self, kinds: tuple[str, ...], skips: tuple[int, ...]) -> None:
        super().__init__()
        self.kinds, self.skips = kinds, skips
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in kinds)
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in kinds)
        self.shared = nn.Linear(6, 6, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for i, kind in enumerate(self.kinds):
            x = self._layer(kind, i, x)
            if self.skips[i]:
                x = x + seen[max(0, len(seen) - self.skips[i])]
            seen.append(x)
        return self.shared(x).square().mean()

    def _layer(self, kind: str, i: int, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "linear":
                return self.linears[i](x)
            case "norm":
                return self.norms[i](x)
            case "shared":
                return self.shared(x)
            case "inplace":
                return torch.relu_(x * 1.5)
            case "view":
                return x.reshape(-1, 2, 3).transpose(1, 2).reshape(-1, 6)
            case "chunk":
                a, b, c = x.chunk(3, dim=1)
                return torch.cat([c, a * b.sigmoid(), b], dim=1)
            case "scale":
                return x * self.scale.cos()
            case _:
                return torch.tanh(x)


KINDS = ("linear", "norm", "shared", "inplace", "view", "chunk", "scale", "tanh")


@st.composite
def random_nets(draw: st.DrawFn) -> RandomNet:
    kinds = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=6)))
    skips = tuple(draw(st.integers(0, 3)) for _ in kinds)
    torch.manual_seed(draw(st.integers(0, 5)))
    return RandomNet(kinds, skips)


def captured_of(model: nn.Module, *args: Any, loss: Any = None, target: Any = None) -> Captured:
    return capture(model, args, {}, target, loss=loss, device=CPU)


def cut(captured: Captured, num_stages: int, **options: Any) -> tuple[Forward, ...]:
    return partition(captured, num_stages, link=LINK, bandwidth=1e10, **options)


def most_stages(captured: Captured) -> int:
    """How many stages the graph can be cut into."""
    from zbfx.errors import PartitionError

    try:
        cut(captured, 10_000)
    except PartitionError as error:
        return int(str(error).split("at most ")[1].split()[0])
    return 10_000


def split(captured: Captured, forwards: tuple[Forward, ...]) -> list[tuple[Joint, Stage]]:
    """Every stage's joint graph and its split, first to last."""
    tangents: list[Any] = [outputs_of(forwards[-1].graph)[0].meta["val"]]
    found = []
    for forward in reversed(forwards):
        joint = differentiate(forward, tangents)
        stage = split_backward(joint, captured)
        found.append((joint, stage))
        tangents = [None] * len((*forward.inputs, *forward.views_in))
        if stage.B is not None:
            for i, position in enumerate(joint.gx):
                tangents[position] = stage.B.outputs[i].meta["val"]
    return found[::-1]
