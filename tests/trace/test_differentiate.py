"""A stage's joint graph: what autograd would compute, bit for bit, as plain operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.passes.graphs import TRACED, RandomNet, captured_of, cut, most_stages, random_nets, split
from tests.passes.test_split_backward import interpret, real
from zbfx.ir import Forward, Joint
from zbfx.storage import mutates
from zbfx.trace.replay import Replay


class Eager(Replay):
    """Keeps the views that gradients are exchanged of; those of an earlier stage begin here."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(forward.graph)
        self.forward, self.kept = forward, {}

    def run_node(self, n: Any) -> Any:
        result = super().run_node(n)
        self.kept[n.name] = result.detach().requires_grad_() if n.name in self.forward.views_in else result
        return self.kept[n.name]


def check_against_autograd(joint: Joint) -> None:
    """The joint graph gives the outputs and gradients of eager autograd over the stage's forward graph."""
    forward = joint.forward
    places = [n for n in joint.graph.nodes if n.op == "placeholder"]
    generator = torch.Generator().manual_seed(0)
    values = [real(n, generator) for n in places]
    got = interpret(joint.graph, *values)
    count = len(places) - len(joint.tangents)
    leaves = [v.clone() for v in values[:count]]
    offset = count - len(forward.inputs)
    for i in [*[offset + i for i in joint.gx if i < len(forward.inputs)], *joint.gparams]:
        leaves[i].requires_grad_()
    with torch.enable_grad():
        replay = Eager(forward)
        ys = replay.run(*leaves)
        ys = list(ys) if isinstance(ys, (tuple, list)) else [ys]
        ends = [*ys, *[replay.kept[name] for name in forward.views_out]]
        leaves += [replay.kept[name] for name in forward.views_in]
        wanted = [leaves[i] for i in [*[offset + i for i in joint.gx], *joint.gparams]]
        tangents = [(ends[i], gy) for i, gy in zip(joint.tangents, values[count:], strict=True) if ends[i].requires_grad]
        grads = torch.autograd.grad([y for y, _ in tangents], wanted, [g for _, g in tangents]) if wanted else ()
    for i, (a, b) in enumerate(zip(got, [*ys, *grads], strict=True)):
        assert torch.equal(a, b), f"output {i} of stage {forward.index}"


@TRACED
@given(random_nets(), st.integers(1, 3))
def test_random_stages(net: RandomNet, num_stages: int) -> None:
    captured = captured_of(net, torch.randn(4, 6))
    for joint, _ in split(captured, cut(captured, min(num_stages, most_stages(captured)))):
        check_against_autograd(joint)
        assert not any(mutates(n.target) for n in joint.graph.nodes if n.op == "call_function")


def square(out: torch.Tensor, target: Any) -> torch.Tensor:
    return out.square().mean()


@pytest.mark.parametrize(
    "layers, shape",
    [
        ([nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)], (4, 6)),
        ([nn.Conv1d(6, 6, 3), nn.GroupNorm(2, 6), nn.SiLU(), nn.Conv1d(6, 6, 3)], (4, 6, 9)),
        ([nn.Linear(6, 12), nn.GLU(), nn.Linear(6, 6), nn.Softmax(dim=1)], (4, 6)),
        ([nn.MultiheadAttention(6, 2, batch_first=True)], (2, 5, 6)),
    ],
    ids=["inplace", "convolution", "gate", "attention"],
)
def test_layers(layers: list[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    if isinstance(layers[0], nn.MultiheadAttention):
        model: nn.Module = SelfAttention(layers[0])
    else:
        model = nn.Sequential(*layers)
    captured = captured_of(model, torch.randn(shape), loss=square)
    for joint, _ in split(captured, cut(captured, min(2, most_stages(captured)))):
        check_against_autograd(joint)


class SelfAttention(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def test_a_frozen_stage_gets_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 6))
    captured = captured_of(model, torch.randn(4, 6), loss=square)
    (first, _), (second, _) = split(captured, cut(captured, 2, pins=["2"]))
    assert first.gx == first.gparams == first.tangents == ()
    assert second.gx == () and len(second.gparams) == 2


def test_backward_nodes_have_the_line_of_their_forward() -> None:
    captured = captured_of(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), torch.randn(4, 6), loss=square)
    ((joint, _),) = split(captured, cut(captured, 1))
    lines = {str(n.target): n.meta["source"] for n in joint.graph.nodes if n.op == "call_function"}
    assert lines["aten.tanh_backward.default"] == lines["aten.tanh.default"] != ""


def test_the_forward_graph_is_not_changed() -> None:
    captured = captured_of(nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)), torch.randn(4, 6), loss=square)
    forwards = cut(captured, 1)
    before = str(forwards[0].graph)
    split(captured, forwards)
    assert str(forwards[0].graph) == before


def test_random_nets_cover_what_they_should() -> None:
    """The random graphs above do hold the operators that are hard: views, in-place writes and chunks."""
    captured = captured_of(RandomNet(("chunk", "inplace", "view", "shared"), (0, 2, 0, 1)), torch.randn(4, 6))
    targets = {str(n.target) for n in captured.graph.nodes}
    assert {"aten.chunk.default", "aten.relu_.default", "aten.cat.default", "aten.add.Tensor"} <= targets
