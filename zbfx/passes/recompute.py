"""Activation checkpointing: what the user's model marked is computed again in the backward instead of being saved.

joint: p, c, x, gy -> y, gx, gparams     to the same, in which the backward of a region uses copies of the region's operators
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from zbfx.ir import Joint, outputs_of
from zbfx.passes.split_backward import copied, forward_nodes


def recompute_regions(joint: Joint) -> Joint:
    """Copy each region's operators into the backward, before the first that needs them. Pure: the joint graph is copied first.

    A region's own inputs are saved, also where another region makes them, so that each operator runs twice at most. Copies
    draw the random numbers of the originals.
    """
    if not any(n.meta.get("region") for n in joint.graph.nodes):
        return joint
    graph = copied(joint.graph)
    ys = list(outputs_of(graph)[: len(joint.forward.outputs)])
    forward = forward_nodes(graph, ys)
    regions = sorted({n.meta["region"] for n in graph.nodes if n.meta.get("region")})
    for region in regions:
        _recompute(graph, region, forward)
    return replace(joint, graph=graph)


def _recompute(graph: fx.Graph, region: int, forward: set[fx.Node]) -> None:
    order = {n: i for i, n in enumerate(graph.nodes)}
    own = {n for n in forward if n.meta.get("region") == region and n.op == "call_function"}
    users = [n for n in graph.nodes if n not in forward and n.op == "call_function" and n.meta.get("region") == region]
    needed = {a for u in users for a in u.all_input_nodes if a in own}
    if not needed:
        return
    again = sorted(_within(needed, own), key=order.__getitem__)
    first = min((u for u in users if any(a in own for a in u.all_input_nodes)), key=order.__getitem__)
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(first):
        for node in again:
            copies[node] = graph.node_copy(node, lambda a: copies.get(a, a))
            copies[node].meta = dict(node.meta)
    for user in users:
        for a in user.all_input_nodes:
            if a in copies:
                user.replace_input_with(a, copies[a])


def _within(nodes: set[fx.Node], own: set[fx.Node]) -> set[fx.Node]:
    """The ancestors of nodes that belong to the region."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(a for a in node.all_input_nodes if a in own)
    return found
