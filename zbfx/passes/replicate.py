"""Which values every stage recomputes for itself instead of receiving them.

Two kinds: values that depend on inputs, constants and unchanging buffers only (masks, positions, rotary tables), and views with
holes or overlaps, which are cheaper and exact to take again from their dense base.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zbfx.errors import InputError
from zbfx.ir import Captured
from zbfx.storage import draws, is_dense, is_view, mutates

aten = torch.ops.aten
_UPDATES_STATISTICS = {aten.batch_norm.default: 5, aten.instance_norm.default: 5}


def written_storages(captured: Captured) -> dict[int, list[fx.Node]]:
    """Storage -> the nodes that write into it, in order. Refuses models that write into their inputs or parameters."""
    places = {s: n for n in captured.graph.nodes if n.op == "placeholder" for s in n.meta["storage"]}
    written: dict[int, list[fx.Node]] = {}
    for node in captured.graph.nodes:
        for target in _targets(node):
            for storage in target.meta["storage"]:
                place = places.get(storage)
                if place is not None and place.name not in captured.buffers:
                    kind = "a parameter" if place.name in captured.params else "an input"
                    name = captured.params.get(place.name, place.name)
                    raise InputError(
                        f"{node.meta['source']}: {node.target} changes {name!r}, {kind}, in place. Work on a copy: use the "
                        "out-of-place operator, or .clone() first"
                    )
                written.setdefault(storage, []).append(node)
    return written


def _targets(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes into."""
    if node.target in _UPDATES_STATISTICS:
        training = node.args[_UPDATES_STATISTICS[node.target]]
        return [a for a in node.args[3:5] if isinstance(a, fx.Node)] if training else []
    if not mutates(node.target):
        return []
    schema: torch._C.FunctionSchema = node.target._schema  # type: ignore[union-attr]
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    found = []
    for i in written:
        value = node.args[i] if i < len(node.args) else node.kwargs.get(schema.arguments[i].name)
        found += [v for v in pytree.tree_leaves(value) if isinstance(v, fx.Node)]
    return found


def replicated(captured: Captured, written: dict[int, list[fx.Node]]) -> set[fx.Node]:
    """Nodes that depend on inputs, constants and unchanging buffers only, need no gradient and draw no random numbers."""
    free: set[fx.Node] = set()
    given = {*captured.leaves, *captured.constants, *captured.buffers}
    for node in captured.graph.nodes:
        if node.op == "output" or any(s in written for s in node.meta["storage"]):
            continue
        if node.op == "placeholder":
            if node.name in given:
                free.add(node)
        elif (
            not node.meta["grad"]
            and not mutates(node.target)
            and not draws(node)
            and all(a in free for a in node.all_input_nodes)
        ):
            free.add(node)
    return free


def bases(captured: Captured) -> dict[fx.Node, fx.Node]:
    """View with holes or overlaps (or a tuple of views) -> the value it can be taken from again."""
    found: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None or source.op == "placeholder":
            continue
        value = node.meta["val"]
        if node.target is operator.getitem:
            if source in found and not (isinstance(value, torch.Tensor) and is_dense(value)):
                found[node] = source
        elif is_view(node.target) and (not isinstance(value, torch.Tensor) or not is_dense(value)):
            found[node] = source
    return found
