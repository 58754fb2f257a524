"""nn.Module -> one forward graph from inputs to loss, with the user's parameter names and source lines.

torch.export traces the model with fake parameters, so that a model on the meta device (or one larger than memory) costs
nothing to trace, and the result does not depend on where the parameters lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from zbfx.errors import InputError, TraceError
from zbfx.ir import Captured, Place, outputs_of
from zbfx.trace.analyse import analyse
from zbfx.trace.estimate import Device, device_profile
from zbfx.trace.export import export
from zbfx.trace.inline import annotate, clean, inlined, narrow_assignments
from zbfx.trace.replay import Context
from zbfx.trace.whole import Loss, Whole

_PREFIX = "model."


def capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Any,
    *,
    loss: Loss | None,
    device: torch.device,
    profile: Device | None = None,
    differentiable: bool = True,
    predict: bool = False,
) -> Captured:
    """Trace one microbatch's forward pass, to its loss, or (predict) to the model's outputs.

    Tensors in args, kwargs and target only lend their shapes. An autocast region around the call is part of the trace.

    Raises TraceError with the user's source line where torch.export refuses, InputError where no scalar loss comes out.
    """
    ambient = _ambient_autocast(device)
    whole = Whole(model, loss, predict)
    exported, inputs = export(whole, (tuple(args), dict(kwargs), target), device)
    with torch.autocast(device.type, enabled=False):
        captured = _captured(exported, inputs, device, model.training, profile or device_profile(device), ambient)
    captured = replace(captured, numbers=whole.seen.read, template=captured.template if predict else None)
    if differentiable and not outputs_of(captured.graph)[0].meta["grad"]:
        raise InputError(
            "the loss needs no gradient: no parameter with requires_grad=True reaches it. Unfreeze one, or check for "
            "detach() or torch.no_grad() between the parameters and the loss"
        )
    return captured


def _captured(
    exported: torch.export.ExportedProgram,
    inputs: tuple[Any, ...],
    device: torch.device,
    training: bool,
    profile: Device,
    ambient: tuple[Context, ...],
) -> Captured:
    params: dict[str, str] = {}
    buffers: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    user: list[str] = []
    statics: dict[int, Any] = {}
    for spec in exported.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind == InputKind.PARAMETER:
            params[name] = str(spec.target).removeprefix(_PREFIX)
        elif spec.kind == InputKind.BUFFER:
            buffers[name] = str(spec.target).removeprefix(_PREFIX)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constants[name] = _real(exported.constants[spec.target], name)
        elif spec.kind == InputKind.USER_INPUT:
            if isinstance(spec.arg, ConstantArgument):
                statics[len(user)] = spec.arg.value
            user.append(name)
        else:
            raise TraceError(f"the model takes {name!r} of kind {spec.kind.name}, which zbfx cannot place on a stage")
    for index, leaf in enumerate(pytree.tree_leaves(inputs)):
        if not isinstance(leaf, torch.Tensor):
            statics[index] = leaf
    graph = inlined(exported.graph_module, ambient)
    narrow_assignments(graph, buffers)
    leaves = {name: i for i, name in enumerate(user) if i not in statics}
    annotate(graph)
    template = _flatten_output(graph, exported)
    values = {**params, **buffers, **constants, **leaves}
    clean(graph, keep=set(values))
    analyse(graph, profile)
    names = tuple(n.name for n in outputs_of(graph))
    return Captured(graph, params, buffers, constants, leaves, statics, names, template, device, training)


def _real(tensor: Any, name: str) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        if tensor.constant is not None:
            return tensor.constant.detach().clone()
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        raise TraceError(
            f"the tensor constant {name!r} was computed from parameters or inputs outside the graph. Register it as a buffer "
            "(self.register_buffer) in __init__, so that it can be found again on every rank"
        )
    if not isinstance(tensor, torch.Tensor):
        raise TraceError(
            f"the model holds {name!r}, a {type(tensor).__name__}, which is not a tensor: pass it as an argument instead"
        )
    return tensor.detach().clone()


def _ambient_autocast(device: torch.device) -> tuple[Context, ...]:
    """The autocast region that the caller stands in, if any: export records operators, not their casts."""
    if not torch.is_autocast_enabled(device.type):
        return ()
    options = (device.type, torch.get_autocast_dtype(device.type), True, torch.is_autocast_cache_enabled())
    return (("autocast", options),)


def _flatten_output(graph: fx.Graph, exported: torch.export.ExportedProgram) -> Any:
    """Have the graph return a flat tuple of tensors; what the model returns, with their positions in their places."""
    output = graph.output_node()
    leaves = list(output.args[0]) if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
    nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    if not nodes:
        raise InputError("what the model returns does not depend on its inputs or parameters: there is nothing to compute")
    output.args = (tuple(dict.fromkeys(nodes)),)
    places = {n: i for i, n in enumerate(dict.fromkeys(nodes))}
    filled = [Place(places[leaf]) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    spec = exported.call_spec.out_spec
    return pytree.tree_unflatten(filled, spec) if spec is not None and spec.num_leaves == len(filled) else filled[0]
