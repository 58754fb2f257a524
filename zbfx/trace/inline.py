"""torch.export's graph -> a graph of ours: regions inlined, every node with its source line, module and contexts."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import count
from typing import Any

import torch
from torch import fx

from zbfx.errors import TraceError
from zbfx.storage import draws, is_view, mutates
from zbfx.trace.explain import source_of
from zbfx.trace.regions import REGION
from zbfx.trace.replay import Context


def inlined(module: fx.GraphModule, ambient: tuple[Context, ...]) -> fx.Graph:
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
                    f"the model uses {user.target}, a control-flow operator that zbfx cannot split, at {source_of(user)}: "
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


def annotate(graph: fx.Graph) -> None:
    """Give every node its source line, module and, where it draws random numbers, its place among those that do."""
    places = count()
    for node in graph.nodes:
        node.meta["place"] = next(places) if draws(node) else None
        node.meta["source"] = source_of(node)
        stack = node.meta.pop("nn_module_stack", None) or {}
        path = [entry[0] for entry in stack.values()]
        node.meta["module"] = path[-1].removeprefix("model").removeprefix(".") if path else ""
        node.meta["modules"] = tuple(p.removeprefix("model").removeprefix(".") for p in path)


def narrow_assignments(graph: fx.Graph, buffers: Mapping[str, str]) -> None:
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


def clean(graph: fx.Graph, keep: set[str]) -> None:
    """Drop metadata asserts (shapes are fixed here) and placeholders that are not tensors."""
    for node in reversed(list(graph.nodes)):
        name = str(node.target)
        dead = name.startswith(("aten._assert_tensor_metadata", "aten.sym_constrain_range", "aten._assert_scalar"))
        pure = node.op == "call_function" and not node.is_impure() and not mutates(node.target)
        if not node.users and (dead or pure or (node.op == "placeholder" and node.name not in keep)):
            graph.erase_node(node)
