"""FLOPs and bytes of every operator, and the seconds they would take: a roofline.

seconds = max(FLOPs / peak, bytes moved / bandwidth) + launch overhead. Views move nothing and cost nothing on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from zbfx.storage import is_view

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Device:
    """What a roofline needs of a device: FLOP/s at 32 and 16 bits, bytes/s of its memory, seconds to launch one operator."""

    flops: float
    flops_16bit: float
    bandwidth: float
    overhead: float


# One core of a server CPU; an H100-class GPU. Only ratios between operators matter for balancing.
DEVICES = {
    "cpu": Device(flops=6e10, flops_16bit=6e10, bandwidth=1e10, overhead=4e-6),
    "cuda": Device(flops=4e13, flops_16bit=5e14, bandwidth=2.5e12, overhead=3e-6),
}


def device_profile(device: torch.device) -> Device:
    """The roofline of a device type; an unknown type is taken for a GPU."""
    return DEVICES.get(device.type, DEVICES["cuda"])


def op_seconds(target: Any, args: Any, kwargs: Any, out: Any, device: Device) -> float:
    """Estimated seconds of one aten call on (fake) tensors."""
    if is_view(target):
        return 0.0
    flops = op_flops(target, args, kwargs, out)
    ins = [t for t in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(t, torch.Tensor)]
    outs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    moved = sum(t.numel() * t.element_size() for t in (*ins, *outs))
    narrow = any(t.element_size() <= 2 and t.is_floating_point() for t in outs)
    peak = device.flops_16bit if narrow else device.flops
    return max(flops / peak, moved / device.bandwidth) + device.overhead


def op_flops(target: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Multiply-adds counted twice, as torch.utils.flop_counter does; 0 for operators without matrix products."""
    packet = getattr(target, "overloadpacket", None)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention_flops(args[0], args[1], products=2)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _attention_flops(args[1], args[2], products=5)
    formula = flop_registry.get(packet)
    return float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0


def _attention_flops(query: torch.Tensor, key: torch.Tensor, products: int) -> float:
    return 2.0 * products * query.numel() * key.shape[-2]


class Meter(TorchDispatchMode):
    """Adds up the seconds of every operator that runs inside it, decomposed as it would run."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seconds += op_seconds(func, args, kwargs or {}, out, self.device)
        return out


def graph_seconds(graph: fx.Graph, device: Device) -> float:
    """Estimated seconds of a differentiated graph (aten calls with `val` in every node's meta)."""
    return sum((node_seconds(node, device) for node in graph.nodes), 0.0)


def node_seconds(node: fx.Node, device: Device) -> float:
    """Estimated seconds of one operator of such a graph."""
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return op_seconds(node.target, args, kwargs, node.meta.get("val"), device)
