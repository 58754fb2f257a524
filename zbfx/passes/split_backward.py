"""A stage's joint graph -> F, B and W, which together do exactly the unsplit backward's work.

joint: p, c, x, gy -> y, gx, gparams
F: p, c, x -> y, s        B: p, c, s, gy -> gx, k        W: p, c, k -> gparams

B is every backward node that the gradient of the stage's input needs (Zero Bubble, section 2: "B"), W all others. Backward
operators that compute both at once (layer norm, convolution, ...) are told apart by their output mask. Views are never
saved: they are taken again from what they view, so that each saved value is a storage of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zbfx.ir import Captured, Fn, Joint, Stage, outputs_of
from zbfx.passes.remat import made_again
from zbfx.storage import is_dense, is_view, mutates

_MASKS = ("output_mask", "grad_input_mask")
aten = torch.ops.aten


def split_backward(joint: Joint, captured: Captured, *, recompute: bool = True) -> Stage:
    """Split a joint graph. Pure: the joint graph is copied first.

    recompute: W makes again what one cheap operator makes of parameters and other kept values (see remat). Without it W does
    no operator twice, and needs of the parameters at most their shapes.
    """
    forward = joint.forward
    graph, ends = open_joint(joint)
    f_nodes = forward_nodes(graph, ends.ys)
    _split_masks(graph, ends.gxs, ends.gps, f_nodes)
    b_nodes = with_parts(graph, {n for n in ancestors(ends.gxs) if n.op == "call_function"} - f_nodes)
    w_nodes = {n for n in ancestors(ends.gps) if n.op == "call_function"} - f_nodes - b_nodes

    given = {*ends.p, *ends.c}
    order = {n: i for i, n in enumerate(graph.nodes)}
    k = roots(w_nodes, ends.gps, given, order)
    k = _without(k, made_again(k, given, root_of)) if recompute and ends.gxs else k
    s = roots(b_nodes, [*ends.gxs, *k], given, order) if ends.gxs else k
    s = _without(s, {*ends.gy, *(made_again(s, given, root_of, only_given=True) if recompute else ())})
    fixed = {"p": ends.p, "c": ends.c}
    f = function(graph, f_nodes, {**fixed, "x": ends.x}, {"y": dense(graph, ends.ys, f_nodes), "s": s})
    b = w = None
    if ends.gxs:
        b = function(graph, b_nodes, {**fixed, "s": s, "gy": ends.gy}, {"gx": dense(graph, ends.gxs, b_nodes), "k": k})
    if ends.gps:
        takes = {**fixed, "k": k} if b is not None else {**fixed, "s": s, "gy": ends.gy}
        w = function(graph, w_nodes, takes, {"gp": owned(graph, ends.gps, w_nodes)})
    names = tuple(captured.params[n] for n in forward.params)
    buffers = tuple(captured.buffers[n] for n in forward.buffers)
    return Stage(
        forward.index, f, b, w, names, buffers, forward.constants, forward.leaves, joint.tangents, joint.gx, joint.gparams
    )


@dataclass(frozen=True, slots=True)
class Ends:
    """A joint graph's placeholders and outputs, by group."""

    p: list[fx.Node]
    c: list[fx.Node]
    x: list[fx.Node]
    gy: list[fx.Node]
    ys: list[fx.Node]
    gxs: list[fx.Node]
    gps: list[fx.Node]


def open_joint(joint: Joint) -> tuple[fx.Graph, Ends]:
    """A copy of the joint graph, and its ends."""
    graph, forward = copied(joint.graph), joint.forward
    places = [n for n in graph.nodes if n.op == "placeholder"]
    outputs = list(outputs_of(graph))
    ny, ngx, nx, nc = len(forward.outputs), len(joint.gx), len(forward.inputs), len(forward.leaves)
    end = len(places) - len(joint.tangents)
    ins = (places[: end - nx - nc], places[end - nx - nc : end - nx], places[end - nx : end], places[end:])
    return graph, Ends(*ins, outputs[:ny], outputs[ny : ny + ngx], outputs[ny + ngx :])


def forward_nodes(graph: fx.Graph, ys: list[fx.Node]) -> set[fx.Node]:
    """What F computes: all that the outputs need, and every write into a buffer."""
    found = ancestors([*ys, *[n for n in graph.nodes if n.op == "call_function" and mutates(n.target)]])
    return with_parts(graph, found)


def with_parts(graph: fx.Graph, nodes: set[fx.Node]) -> set[fx.Node]:
    """Operators with several results belong together with all of them, whoever uses which."""
    return nodes | {n for n in graph.nodes if n.target is operator.getitem and n.args[0] in nodes}


def _without(nodes: list[fx.Node], gone: set[fx.Node]) -> list[fx.Node]:
    return [n for n in nodes if n not in gone]


def copied(graph: fx.Graph) -> fx.Graph:
    """A graph of one's own: same nodes, same meta."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    new.output(new.graph_copy(graph, env))
    return new


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they need."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


# ---------------------------------------------------------------- fused backward operators


def _mask_place(node: fx.Node) -> int | str | None:
    """Where a fused backward operator takes its output mask: a position, a keyword, or None."""
    schema = getattr(node.target, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name in _MASKS:
            return argument.name if argument.name in node.kwargs else i
    return None


def _with_mask(node: fx.Node, place: int | str, wanted: set[int]) -> tuple[tuple, dict]:  # type: ignore[type-arg]
    old = node.kwargs[place] if isinstance(place, str) else node.args[place]
    mask = [bool(m) and i in wanted for i, m in enumerate(old)]  # type: ignore[arg-type]
    if isinstance(place, str):
        return node.args, {**node.kwargs, place: mask}
    return (*node.args[:place], mask, *node.args[place + 1 :]), dict(node.kwargs)


def _split_masks(graph: fx.Graph, gxs: list[fx.Node], gps: list[fx.Node], f_nodes: set[fx.Node]) -> None:
    """Clone each fused backward operator that serves both B and W, with complementary masks."""
    live, for_b = ancestors([*gxs, *gps]), ancestors(gxs)
    for node in [n for n in graph.nodes if n not in f_nodes and n.op == "call_function"]:
        place = _mask_place(node)
        if place is None:
            continue
        parts = {u.args[1]: u for u in node.users if u.target is operator.getitem and u in live}
        b_parts = {i for i, u in parts.items() if u in for_b}
        w_parts = set(parts) - b_parts
        if b_parts and w_parts:
            args, kwargs = _with_mask(node, place, w_parts)
            with graph.inserting_after(node):
                clone = graph.call_function(node.target, args, kwargs)
            clone.meta = {**node.meta, "val": _masked(node.meta["val"], w_parts)}
            for i in w_parts:
                parts[i].replace_input_with(node, clone)
        node.args, node.kwargs = _with_mask(node, place, b_parts or w_parts)
        node.meta["val"] = _masked(node.meta["val"], b_parts or w_parts)


def _masked(values: Sequence[object], wanted: set[int]) -> tuple[object, ...]:
    """The results of a fused operator: those masked out do not exist."""
    return tuple(v if i in wanted else None for i, v in enumerate(values))


# ---------------------------------------------------------------- what is saved and kept


def root_of(node: fx.Node) -> fx.Node:
    """What a chain of views looks at."""
    while node.op == "call_function":
        if (node.target is operator.getitem and is_view(node.args[0].target)) or is_view(node.target):  # type: ignore[union-attr]
            node = node.args[0]  # type: ignore[assignment]
        else:
            break
    return node


def roots(own: set[fx.Node], ends: list[fx.Node], given: set[fx.Node], order: dict[fx.Node, int]) -> list[fx.Node]:
    """The values that `own` nodes, or results that are not made by them, need from outside: views replaced by their roots."""
    outside = {a for n in own for a in n.all_input_nodes if a not in own} | {e for e in ends if e not in own}
    found = {root_of(node) for node in outside}
    return sorted((root for root in found if root not in own and root not in given), key=order.__getitem__)


def _clone_after(graph: fx.Graph, node: fx.Node, own: set[fx.Node], memory_format: torch.memory_format) -> fx.Node:
    with graph.inserting_before(graph.output_node()):
        copy = graph.call_function(aten.clone.default, (node,), {"memory_format": memory_format})
    copy.meta = {**node.meta, "val": node.meta["val"].clone(memory_format=memory_format)}
    own.add(copy)
    return copy


def dense(graph: fx.Graph, nodes: list[fx.Node], own: set[fx.Node]) -> list[fx.Node]:
    """Messages are dense: a value with holes or overlaps is copied before it is sent."""
    return [n if is_dense(n.meta["val"]) else _clone_after(graph, n, own, torch.contiguous_format) for n in nodes]


def owned(graph: fx.Graph, nodes: list[fx.Node], own: set[fx.Node]) -> list[fx.Node]:
    """A parameter's gradient owns its storage, so that accumulation may write into it: shared ones are copied."""
    result: list[fx.Node] = []
    seen: set[fx.Node] = set()
    for node in nodes:
        root, value = root_of(node), node.meta["val"]
        whole = is_dense(value) and value.nbytes == root.meta["val"].untyped_storage().nbytes()
        shared = root not in own or root in seen or not whole
        seen.add(root)
        result.append(_clone_after(graph, node, own, torch.preserve_format) if shared else node)
    return result


def function(graph: fx.Graph, own: set[fx.Node], takes: dict[str, list[fx.Node]], gives: dict[str, list[fx.Node]]) -> Fn:
    """A function's own graph: its placeholders, its nodes and the views it takes again, in the joint graph's order."""
    places = [n for group in takes.values() for n in group]
    outputs = [n for group in gives.values() for n in group]
    needed = set(own)
    stack = [a for n in own for a in n.all_input_nodes] + outputs
    while stack:
        node = stack.pop()
        if node not in needed and node not in places:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in places:
        env[node] = new.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node in needed and node not in env:
            env[node] = new.node_copy(node, lambda n: env[n])
            env[node].meta = dict(node.meta)
    new.output(tuple(env[n] for n in outputs))
    for node in reversed(list(new.nodes)):
        if node.op == "call_function" and not node.users and not mutates(node.target):
            new.erase_node(node)
    return Fn(new, {g: tuple(env[n].name for n in ns) for g, ns in takes.items()}, {g: len(ns) for g, ns in gives.items()})
