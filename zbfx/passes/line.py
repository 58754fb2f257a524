"""The captured graph as a line of nodes: which values and gradients cross each position, and where a cut may fall.

A cut is not allowed where a value would be torn: between the birth of a storage and the last in-place write into it, or between
an operator with several outputs and their last use (where they are views, between it and the first of each).

Values cross a cut by what they look into, gradients by view: a view that is taken again after the cut sends back a gradient of
its own. So the terms of every gradient are added where, and in the order in which, one process adds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx

from zbfx.ir import Captured
from zbfx.passes.replicate import bases, replicated, written_storages


@dataclass(slots=True)
class Line:
    """The captured graph as a line of nodes that belong to one stage each, and what crosses each position."""

    nodes: list[fx.Node]
    place: dict[fx.Node, int]
    base: dict[fx.Node, fx.Node]
    free: set[fx.Node]
    last_use: dict[fx.Node, int] = field(default_factory=dict)
    own_use: dict[fx.Node, int] = field(default_factory=dict)
    allowed: list[bool] = field(default_factory=list)

    def crossing(self, cut: int) -> list[fx.Node]:
        """The values sent over a cut, in the order they are made."""
        return [v for v, end in self.last_use.items() if self.place[v] < cut <= end]

    def views_crossing(self, cut: int) -> list[fx.Node]:
        """The views with a gradient that are taken before a cut and again, for their own users, after it."""
        return [v for v in self.base if self._has_gradient(v) and self.place[v] < cut <= self.own_use[v]]

    def gradients(self) -> list[fx.Node]:
        """What a gradient is sent back for where its own users lie behind a cut: values and views."""
        return [n for n in self.nodes if self._has_gradient(n)]

    def _has_gradient(self, node: fx.Node) -> bool:
        return node in self.place and node.meta["grad"] and isinstance(node.meta["val"], torch.Tensor)


def line_of(captured: Captured) -> Line:
    """The line of a captured graph's nodes, without those that every stage computes for itself."""
    written = written_storages(captured)
    free = replicated(captured, written)
    nodes = [n for n in captured.graph.nodes if n.op == "call_function" and n not in free]
    place = {n: i for i, n in enumerate(nodes)}
    line = Line(nodes, place, bases(captured), free)
    _find_last_uses(captured, line)
    _forbid(captured, line, written)
    return line


def _find_last_uses(captured: Captured, line: Line) -> None:
    """last_use[v]: place of the last node that needs v, or a view that is taken from v again; own_use: that has v itself."""
    end = len(line.nodes)
    uses = {n: max((line.place.get(u, end) for u in n.users), default=i) for n, i in line.place.items()}
    line.own_use = dict(uses)
    for node in reversed(line.nodes):
        if node in line.base and line.base[node] in uses:
            source = line.base[node]
            uses[source] = max(uses[source], uses[node])
    line.last_use = {n: uses[n] for n in line.nodes if n not in line.base}


def _forbid(captured: Captured, line: Line, written: dict[int, list[fx.Node]]) -> None:
    """Mark the positions where no cut may fall."""
    torn = [0] * (len(line.nodes) + 2)

    def keep_together(first: int, last: int) -> None:
        if last > first:
            torn[first + 1] += 1
            torn[last + 1] -= 1

    touching: dict[int, list[int]] = {}
    for node, i in line.place.items():
        storages = node.meta["storage"].union(*[a.meta["storage"] for a in node.all_input_nodes])
        for storage in storages & written.keys():
            touching.setdefault(storage, []).append(i)
    buffers = {s for n in captured.graph.nodes if n.op == "placeholder" for s in n.meta["storage"]}
    for storage, writers in written.items():
        inside = touching[storage]
        keep_together(inside[0], inside[-1] if storage in buffers else line.place[writers[-1]])
    for node, end in line.last_use.items():
        if not isinstance(node.meta["val"], torch.Tensor):
            keep_together(line.place[node], end)
    for node in line.base:
        if node in line.place and not isinstance(node.meta["val"], torch.Tensor):
            keep_together(line.place[node], line.own_use[node])
    for first, last in _own_arithmetic(captured, line):
        keep_together(first, last)
    depth, line.allowed = 0, [False] * (len(line.nodes) + 1)
    for cut in range(1, len(line.nodes)):
        depth += torn[cut]
        line.allowed[cut] = depth == 0


def _own_arithmetic(captured: Captured, line: Line) -> Iterator[tuple[int, int]]:
    """First and last place between which a module makes its weight out of a parameter alone, as spectral norm does.

    A cut inside would have two stages use the parameter, whose gradient then is a sum over ranks.
    """
    trained = {n for n in captured.graph.nodes if n.name in captured.params and n.meta["grad"]}
    takes = [bool(trained.intersection(n.all_input_nodes)) for n in line.nodes]
    for parameter in trained:
        owner = captured.params[parameter.name].rpartition(".")[0]
        places = sorted(line.place[u] for u in parameter.users if u in line.place)
        for a, b in pairwise(places):
            own = all(line.nodes[i].meta["module"] == owner for i in range(a, b + 1))
            if owner and own and not any(takes[a + 1 : b]):
                yield a, b
