"""Capture: the user's names, source lines and modes; regions and in-place changes; what cannot be traced."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import MODELS
from tests.passes.graphs import captured_of
from zbfx.errors import InputError, TraceError
from zbfx.ir import Captured, outputs_of
from zbfx.trace.capture import capture
from zbfx.trace.estimate import DEVICES, device_profile, graph_seconds, op_flops, op_seconds
from zbfx.trace.replay import Replay

aten = torch.ops.aten


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, scale: float = 2.0, extra: torch.Tensor | None = None) -> torch.Tensor:
        h = self.norm(self.inner(x))
        h = torch.tanh(h) * scale  # the line
        return (h if extra is None else h + extra).square().mean()


def test_names_are_the_users() -> None:
    captured = captured_of(Small(), torch.randn(4, 4))
    assert set(captured.params.values()) == {"inner.weight", "inner.bias", "norm.weight", "norm.bias"}
    assert set(captured.buffers.values()) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert list(captured.leaves.values()) == [0]


def test_nodes_know_their_line_and_module() -> None:
    captured = captured_of(Small(), torch.randn(4, 4))
    lines, start = inspect.getsourcelines(Small)
    line = start + next(i for i, text in enumerate(lines) if "# the line" in text)
    (tanh,) = (n for n in captured.graph.nodes if n.target is aten.tanh.default)
    (linear,) = (n for n in captured.graph.nodes if n.target is aten.linear.default)
    assert tanh.meta["source"] == f"test_capture.py:{line}" and tanh.meta["module"] == ""
    assert linear.meta["module"] == "inner" and linear.meta["source"].startswith("test_capture.py:")


def test_plain_values_are_part_of_the_trace_and_tensors_are_leaves() -> None:
    captured = capture(
        Small(), (torch.randn(4, 4),), {"scale": 3.0, "extra": torch.randn(4, 4)}, None, loss=None, device=torch.device("cpu")
    )
    assert captured.statics[1] == 3.0 and captured.statics[3] is None and sorted(captured.leaves.values()) == [0, 2]


def test_train_and_eval_mode() -> None:
    model = Small()
    writes = [n for n in captured_of(model, torch.randn(4, 4)).graph.nodes if "add_" in str(n.target)]
    assert writes and captured_of(model, torch.randn(4, 4)).training
    model.eval()
    captured = captured_of(model, torch.randn(4, 4))
    assert not captured.training and not [n for n in captured.graph.nodes if "add_" in str(n.target)]


def test_grad_is_what_autograd_would_say() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frozen = self.b(x)
            with torch.no_grad():
                mask = torch.sigmoid(self.a(x))
            return (self.a(frozen) * mask.detach() + (frozen > 0)).square().mean()

    captured = captured_of(Partly(), torch.randn(4, 4))
    grads = {n.name: n.meta["grad"] for n in captured.graph.nodes if n.op == "call_function"}
    assert not grads["linear"] and not grads["sigmoid"] and not grads["gt"] and grads["mean"]
    assert [n.meta["contexts"] for n in captured.graph.nodes if n.name == "sigmoid"] == [(("grad", (False,)),)]


def run(captured: Captured, model: nn.Module, *leaves: torch.Tensor) -> torch.Tensor:
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    values = {n: state[u].detach().clone() for n, u in {**captured.params, **captured.buffers}.items()}
    values |= {**captured.constants, **{n: leaves[i] for n, i in captured.leaves.items()}}
    places = [n.name for n in captured.graph.nodes if n.op == "placeholder"]
    return Replay(captured.graph).run(*[values[p] for p in places])


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_computes_what_the_exported_model_computes(name: str) -> None:
    case = MODELS[name]()
    args, kwargs, target = case.batch(2)
    captured = capture(case.model, args, kwargs, target, loss=case.loss, device=torch.device("cpu"))
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs, target))]
    with torch.no_grad():
        got = run(captured, case.model, *leaves)
        output = case.fresh()(*args, **kwargs)
    wanted = output.loss if case.loss is None else case.loss(output, target)
    torch.testing.assert_close(got[0] if isinstance(got, (tuple, list)) else got, wanted.detach())


def test_autocast_regions_are_kept() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.a(x)
            return h.float().square().mean()

    captured = captured_of(Cast(), torch.randn(4, 4))
    linear = next(n for n in captured.graph.nodes if n.target is aten.linear.default)
    assert linear.meta["contexts"][0][0] == "autocast" and linear.meta["val"].dtype == torch.bfloat16


def test_nothing_of_the_users_model_changes() -> None:
    model = Small()
    before = {n: (id(t), t.clone()) for n, t in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()}
    captured_of(model, torch.randn(4, 4))
    for name, t in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        assert id(t) == before[name][0] and torch.equal(t, before[name][1])


def test_a_failing_trace_puts_the_parameters_back() -> None:
    class Fails(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.inner(x).sum() if self.inner(x).sum() > 0 else x.sum()

    model = Fails()
    before = [id(p) for p in model.parameters()]
    with pytest.raises(TraceError, match=r"test_capture.py:\d+ in forward\n  reason: .*\n  what to do: use torch.where"):
        captured_of(model, torch.randn(4, 4))
    assert [id(p) for p in model.parameters()] == before


class BooleanIndex(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.inner(x)[x.sum(1) > 0].sum()


class Item(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.inner(x).sum() * x.sum().item()


@pytest.mark.parametrize("model", [BooleanIndex, Item])
def test_what_depends_on_values_is_refused_with_its_line(model: type[nn.Module]) -> None:
    line = inspect.getsourcelines(model)[1] + 2
    with pytest.raises(TraceError, match=rf"test_capture\.py:{line}\D(.|\n)*what to do"):
        captured_of(model(), torch.randn(4, 4))


def test_what_the_loss_function_does_is_marked_as_the_loss() -> None:
    captured = captured_of(nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4), loss=lambda out, _: out.square().mean())
    assert {str(n.target): n.meta["source"] for n in captured.graph.nodes}["aten.mean.default"] == "loss"


@pytest.mark.parametrize(
    "forward, error, message",
    [
        (lambda self, x: self.inner(x), InputError, r"returned a tensor of shape \[4, 4\] where a scalar loss is needed"),
        (lambda self, x: {"logits": self.inner(x)}, InputError, "returned dict where a scalar loss is needed"),
        (lambda self, x: x.sum(), InputError, "the loss needs no gradient"),
        (lambda self, x: self.inner(x).detach().sum(), InputError, "the loss needs no gradient"),
    ],
    ids=["no loss", "a dict", "constant", "detached"],
)
def test_refusals(forward: Any, error: type[Exception], message: str) -> None:
    model = type("Model", (Small,), {"forward": forward})()
    with pytest.raises(error, match=message):
        captured_of(model, torch.randn(4, 4))


def test_the_meta_device_costs_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100_000, 100_000), nn.Linear(100_000, 1))  # 37 GiB of weights
    captured = captured_of(model, torch.randn(2, 100_000), loss=lambda out, _: out.sum())
    assert len(captured.params) == 4 and outputs_of(captured.graph)[0].meta["val"].shape == ()


# ---------------------------------------------------------------- estimates


def test_flops_of_matrix_products_convolutions_and_attention() -> None:
    def flops(target: Any, *args: Any) -> float:
        return op_flops(target, args, {}, target(*args))

    a, b = torch.empty(3, 5), torch.empty(5, 7)
    assert flops(aten.mm.default, a, b) == 2 * 3 * 5 * 7
    assert flops(aten.tanh.default, a) == 0
    x, w = torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3)
    assert flops(aten.convolution.default, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1) == 2 * (2 * 4 * 8 * 8) * (3 * 9)
    q = torch.empty(1, 2, 6, 8)
    assert flops(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q) == 2 * 2 * (2 * 6 * 6 * 8)


def test_seconds_are_a_roofline() -> None:
    device = DEVICES["cpu"]
    big = torch.empty(1000, 1000)
    product = op_seconds(aten.mm.default, (big, big), {}, big, device)
    assert product == pytest.approx(2e9 / device.flops + device.overhead)
    assert op_seconds(aten.tanh.default, (big,), {}, big, device) == pytest.approx(8e6 / device.bandwidth + device.overhead)
    assert op_seconds(aten.t.default, (big,), {}, big.t(), device) == 0.0
    half = big.bfloat16()
    gpu = DEVICES["cuda"]
    assert op_seconds(aten.mm.default, (half, half), {}, half, gpu) < op_seconds(aten.mm.default, (big, big), {}, big, gpu)
    assert device_profile(torch.device("xpu")) == DEVICES["cuda"]


def test_a_graphs_seconds_are_the_sum_of_its_operators() -> None:
    captured = captured_of(nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4), loss=lambda out, _: out.sum())
    device = DEVICES["cpu"]
    alone = [n.meta["seconds"] for n in captured.graph.nodes if n.op == "call_function"]
    assert all(s > 0 for s in alone)
    assert graph_seconds(captured.graph, device) > 0
