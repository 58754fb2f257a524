"""What every node of a captured graph is: its value as a fake tensor, its storage, whether it has a gradient, its seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from zbfx.errors import TraceError
from zbfx.trace.estimate import Device, Meter
from zbfx.trace.replay import Replay


class _Analyse(Replay):
    """Record each node's value and whether it requires grad, as eager autograd would see it; meter its forward seconds."""

    def __init__(self, graph: fx.Graph, meter: Meter) -> None:
        super().__init__(graph)
        self.meter = meter

    def run_node(self, n: fx.Node) -> Any:
        before = self.meter.seconds
        try:
            result = super().run_node(n)
        except Exception as error:
            raise TraceError(f"the model cannot be traced at {n.meta.get('source')}: {n.target} failed: {error}") from error
        n.meta["val"] = result
        n.meta["seconds"] = self.meter.seconds - before
        tensors = _tensors(result)
        n.meta["grad"] = any(t.requires_grad for t in tensors)
        n.meta["storage"] = frozenset(_storage(t, n) for t in tensors)
        return result


def _storage(tensor: torch.Tensor, node: fx.Node) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError as error:
        name = getattr(node.target, "__name__", str(node.target))
        raise TraceError(
            f"the model cannot be traced at {node.meta.get('source')}: {name} makes a tensor without a memory of its own. Use "
            "dense tensors in place of sparse ones, and batched operators in place of torch.vmap"
        ) from error


def analyse(graph: fx.Graph, profile: Device) -> None:
    """Replay the graph on fake tensors with grad on, so that aliasing, strides and requires_grad are exact."""
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    # torch.export answers with a fake mode of its own, not the one its inputs came in
    mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    meter = Meter(profile)
    with mode, torch.enable_grad(), meter:
        _Analyse(graph, meter).run(*inputs)
        for node in graph.nodes:  # a tensor made without grad has it once a value with grad is written into it
            if node.op == "call_function":
                node.meta["grad"] |= any(t.grad_fn is not None for t in _tensors(node.meta["val"]))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
