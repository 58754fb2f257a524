"""nn.Module -> one forward graph from inputs to loss, with the user's parameter names and source lines.

torch.export traces the model with fake parameters, so that a model on the meta device (or one larger than memory) costs
nothing to trace, and the result does not depend on where the parameters lie.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from zbfx.errors import InputError, TraceError, ZbfxError
from zbfx.ir import Captured, Place, outputs_of
from zbfx.storage import draws, is_view, mutates
from zbfx.trace.estimate import Device, Meter, device_profile
from zbfx.trace.regions import REGION, observed
from zbfx.trace.replay import Context, Replay
from zbfx.trace.whole import Loss, Whole
from zbfx.trace.whole import __file__ as whole_file

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
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    whole = Whole(model, loss, predict)
    ambient = _ambient_autocast(device)
    inputs = pytree.tree_map_only(torch.Tensor, lambda t: _fake(t, mode, device), (tuple(args), dict(kwargs), target))
    with _fake_parameters(model, mode, device):
        exported = _export(whole, inputs)
        if whole.assigned:  # traced again, so that what forward assigns is kept
            whole.copied = frozenset(whole.assigned)
            exported = _export(whole, inputs)
    _refuse_symbols(exported.graph_module)
    torch.clear_autocast_cache()  # it may hold casts of the fake parameters
    with torch.autocast(device.type, enabled=False):
        captured = _captured(exported, inputs, device, model.training, profile or device_profile(device), ambient)
    if not predict:
        captured = replace(captured, template=None)
    if differentiable and not outputs_of(captured.graph)[0].meta["grad"]:
        raise InputError(
            "the loss needs no gradient: no parameter with requires_grad=True reaches it. Unfreeze one, or check for "
            "detach() or torch.no_grad() between the parameters and the loss"
        )
    return captured


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_floating_point())


@contextlib.contextmanager
def _fake_parameters(model: torch.nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Swap every parameter and buffer for a fake one (a shared one stays shared); put the real ones back after."""
    swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    fakes: dict[int, torch.Tensor] = {}
    try:
        for module in model.modules():
            both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for slots in both:
                for name, real in slots.items():
                    if real is None:
                        continue
                    if id(real) not in fakes:
                        fake = _fake(real.detach(), mode, device)
                        is_parameter = isinstance(real, torch.nn.Parameter)
                        fakes[id(real)] = torch.nn.Parameter(fake, requires_grad=real.requires_grad) if is_parameter else fake
                    swapped.append((slots, name, real))
                    slots[name] = fakes[id(real)]
        yield
    finally:
        for slots, name, real in swapped:
            slots[name] = real


def _export(whole: Whole, inputs: tuple[Any, ...]) -> torch.export.ExportedProgram:
    said = io.StringIO()  # on failure torch prints the whole partial graph: the error below says what matters
    shapes = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = shapes.level
    shapes.setLevel(logging.ERROR)
    try:
        with torch.enable_grad(), observed(), contextlib.redirect_stderr(said):
            exported = torch.export.export(whole, inputs, strict=False)
    except ZbfxError:
        raise
    except Exception as error:
        raise TraceError(_explain(error)) from error
    finally:
        shapes.setLevel(level)
    sys.stderr.write(said.getvalue())
    return exported


def _refuse_symbols(module: fx.GraphModule) -> None:
    """Raises TraceError where a Python number or a shape depends on a tensor's values: graphs here have fixed shapes."""
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            for value in pytree.tree_leaves(node.meta.get("val")):
                sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
                if any(isinstance(s, (torch.SymInt, torch.SymFloat, torch.SymBool)) for s in sizes):
                    what = "shape" if isinstance(value, torch.Tensor) else "number"
                    raise TraceError(
                        f"the model cannot be traced at {_source(node)}\n"
                        f"  reason: {node.target} makes a {what} that depends on a tensor's values\n"
                        "  what to do: keep values in tensors (no .item(), int() or float()), and use masks and torch.where "
                        "in place of boolean indexing or nonzero()"
                    )


_USER_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_BRANCH = "use torch.where in place of a Python branch on a tensor's values, and masks in place of boolean indexing"
_HINTS = (
    ("data-dependent", _BRANCH),
    ("guard on", _BRANCH),
    (".item()", "keep the value a tensor; .item() has no value while tracing"),
    ("nonzero", "avoid shapes that depend on values: use a mask and torch.where in place of boolean indexing"),
    ("numpy", "use torch operations in forward: numpy calls cannot be traced"),
    ("no part of the model", "make it a parameter of the model (or of a module in it), where it gets a gradient, or detach() it"),
    ("not a known type", "have the model return tensors in tuples, lists and dicts (Hugging Face: pass use_cache=False)"),
    ("sparse", "use dense gradients and tensors (nn.Embedding(sparse=False))"),
    ("device", "put all parameters and inputs on one device"),
)


def _explain(error: BaseException) -> str:
    """The model's own line that could not be traced, torch's reason, and what to change."""
    message = str(error)
    frames = [(frame.filename, frame.lineno, frame.name) for frame in _frames(error)]
    frames += [(f, int(line), name) for f, line, name in _USER_FRAME.findall(message)]
    own = [f for f in frames if not _is_library(f[0])]
    place = "{}:{} in {}".format(*own[-1]) if own else "no line of the model's own code is on the stack"
    lowered = message.lower()
    hint = next((text for key, text in _HINTS if key in lowered), "rewrite the line with traceable torch operations")
    reason = next((line.strip() for line in message.splitlines() if line.strip()), type(error).__name__)
    return f"the model cannot be traced at {place}\n  reason: {type(error).__name__}: {reason}\n  what to do: {hint}"


def _frames(error: BaseException) -> list[Any]:
    import traceback

    return list(traceback.extract_tb(error.__traceback__))


def _is_library(filename: str) -> bool:
    here = __file__.replace("\\", "/").rsplit("/zbfx/", 1)[0] + "/zbfx/"
    return "/torch/" in filename or filename.startswith("<") or filename.replace("\\", "/").startswith(here)


# ---------------------------------------------------------------- export's program -> Captured


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
    graph = _inlined(exported.graph_module, ambient)
    _narrow_assignments(graph, buffers)
    leaves = {name: i for i, name in enumerate(user) if i not in statics}
    _annotate(graph)
    template = _flatten_output(graph, exported)
    values = {**params, **buffers, **constants, **leaves}
    _clean(graph, keep=set(values))
    _analyse(graph, profile)
    names = tuple(n.name for n in outputs_of(graph))
    return Captured(graph, params, buffers, constants, leaves, statics, names, template, device, training)


def _narrow_assignments(graph: fx.Graph, buffers: Mapping[str, str]) -> None:
    """Move the copies of assigned buffers (see whole.py) to where they are read and made: stages can be cut before and after."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.args[0] if node.args else None, fx.Node):
            continue
        of_buffer = node.args[0].op == "placeholder" and node.args[0].name in buffers
        if of_buffer and node.target is torch.ops.aten.clone.default and node.users:
            order = {n: i for i, n in enumerate(graph.nodes)}
            min(node.users, key=order.__getitem__).prepend(node)
        elif of_buffer and node.target is torch.ops.aten.copy_.default:
            value = node.args[1]
            users = [u for u in value.users if u != node] if isinstance(value, fx.Node) else []
            steady = not any(mutates(u.target) or is_view(u.target) for u in users)
            if isinstance(value, fx.Node) and steady and value.op == "call_function" and not is_view(value.target):
                value.append(node)


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


def _inlined(module: fx.GraphModule, ambient: tuple[Context, ...]) -> fx.Graph:
    """A copy in which no_grad and autocast regions are flattened into their nodes' `contexts`."""
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    _copy(module, graph, env, ambient)
    graph.output(fx.map_arg(module.graph.output_node().args[0], lambda n: env[n]))
    return graph


def _copy(module: fx.GraphModule, graph: fx.Graph, env: dict[fx.Node, Any], contexts: tuple[Context, ...]) -> None:
    for node in module.graph.nodes:
        if node in env or node.op == "output":
            continue
        region = _region(node)
        if region is not None:
            context, submodule, args = region
            inner = getattr(module, str(submodule.target))
            places = [n for n in inner.graph.nodes if n.op == "placeholder"]
            inside = dict(zip(places, fx.map_arg(args, lambda n: env[n]), strict=True))
            _copy(inner, graph, inside, (*contexts, context))
            env[node] = fx.map_arg(inner.graph.output_node().args[0], inside.__getitem__)
        elif node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), fx.GraphModule):
            if not all(_region(user) for user in node.users):
                user = next(u for u in node.users if not _region(u))
                raise TraceError(
                    f"the model uses {user.target}, a control-flow operator that zbfx cannot split, at {_source(user)}: "
                    "write the branch with torch.where"
                )
        elif node.target is operator.getitem and isinstance(env.get(node.args[0]), (tuple, list)):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            new = graph.node_copy(node, lambda n: env[n])
            new.meta = {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")}
            new.meta["region"] = node.meta.get(REGION)
            if node.op == "placeholder":
                new.meta["val"] = node.meta["val"]
            new.meta["contexts"] = contexts
            env[node] = new


def _region(node: fx.Node) -> tuple[Context, fx.Node, tuple[Any, ...]] | None:
    """(context, submodule node, its arguments) of a no_grad or autocast region."""
    name = getattr(node.target, "__name__", "")
    if name == "wrap_with_set_grad_enabled":
        enabled, submodule, *args = node.args
        return ("grad", (enabled,)), submodule, tuple(args)  # type: ignore[return-value]
    if name == "wrap_with_autocast":
        *options, submodule = node.args[:5]
        return ("autocast", tuple(options)), submodule, tuple(node.args[5:])  # type: ignore[return-value]
    return None


def _annotate(graph: fx.Graph) -> None:
    """Give every node its source line, module and, where it draws random numbers, its place among those that do."""
    places = count()
    for node in graph.nodes:
        node.meta["place"] = next(places) if draws(node) else None
        node.meta["source"] = _source(node)
        stack = node.meta.pop("nn_module_stack", None) or {}
        path = [entry[0] for entry in stack.values()]
        node.meta["module"] = path[-1].removeprefix("model").removeprefix(".") if path else ""
        node.meta["modules"] = tuple(p.removeprefix("model").removeprefix(".") for p in path)


def _source(node: fx.Node) -> str:
    """file:line of the innermost frame of the user's own code (of any code, if there is none)."""
    frames = _USER_FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f for f in frames if not _is_library(f[0])] or frames
    if own and own[-1][0] == whole_file:
        return "loss"  # torch keeps the frames of forward methods alone, and the loss function has none
    return f"{own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]}" if own else ""


def _clean(graph: fx.Graph, keep: set[str]) -> None:
    """Drop metadata asserts (shapes are fixed here) and placeholders that are not tensors."""
    for node in reversed(list(graph.nodes)):
        name = str(node.target)
        dead = name.startswith(("aten._assert_tensor_metadata", "aten.sym_constrain_range", "aten._assert_scalar"))
        pure = node.op == "call_function" and not node.is_impure() and not mutates(node.target)
        if not node.users and (dead or pure or (node.op == "placeholder" and node.name not in keep)):
            graph.erase_node(node)


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
        n.meta["storage"] = frozenset(t.untyped_storage()._cdata for t in tensors)
        return result


def _analyse(graph: fx.Graph, profile: Device) -> None:
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
