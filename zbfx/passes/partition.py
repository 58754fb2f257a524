"""Captured graph -> stages: where to cut, and each stage's own graph.

Cuts fall anywhere between two nodes of the graph's line. A cut is not allowed where a value would be torn: between the
birth of a storage and the last in-place write into it, or between an operator with several outputs and their last use (where
they are views, between it and the first of each).

Values cross a cut by what they look into, gradients by view: a view that is taken again after the cut sends back a gradient of
its own. So the terms of every gradient are added where, and in the order in which, one process adds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx

from zbfx.errors import PartitionError
from zbfx.ir import Captured, Forward, Link, outputs_of
from zbfx.passes.balance import best_cuts
from zbfx.passes.replicate import bases, replicated, written_storages

# What the backward adds to a forward second: a gradient of the input and one of the weights, each as long as the forward.
_WITH_BACKWARD = 3.0
# Bytes moved per byte of a parameter's gradient: written by W, then read, added and written by the accumulation.
_GRADIENT_TRAFFIC = 4.0


@dataclass(slots=True)
class _Line:
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


def partition(
    captured: Captured,
    num_stages: int,
    *,
    link: Link,
    bandwidth: float,
    pins: Sequence[str] = (),
    cuts: Sequence[int] | None = None,
) -> tuple[Forward, ...]:
    """Cut the captured graph into num_stages stages with the smallest largest load; crossing bytes count at link speed.

    bandwidth: bytes/s of device memory, for the traffic of gradients. pins: module names before which a cut is made.
    cuts: positions (the later stages' `start`) from an earlier call, to keep a plan's cuts. Raises PartitionError.
    """
    if num_stages < 1:
        raise PartitionError(f"{num_stages=}: a pipeline has at least 1 stage")
    line = _line(captured)
    if cuts is None:
        work = [_work(n, captured, bandwidth) for n in line.nodes]
        cross = _crossing_seconds(line, link)
        pinned = tuple(_pin(line, name) for name in pins)
        cuts = best_cuts(work, cross, line.allowed, num_stages, pinned=pinned)
    ends = [0, *cuts, len(line.nodes)]
    return tuple(_stage(captured, line, k, a, b, last=k == len(cuts)) for k, (a, b) in enumerate(pairwise(ends)))


def cuts_for_owners(captured: Captured, owners: Mapping[str, int], num_stages: int) -> tuple[int, ...]:
    """Cuts of another trace of the same model (other shapes, eval mode) that leave every parameter and buffer on its stage.

    owners: the user's name -> stage. Among the positions that do, the one with the fewest bytes crossing.
    """
    line = _line(captured)
    names = {**captured.params, **captured.buffers}
    first, last = [len(line.nodes)] * num_stages, [0] * num_stages
    for node, i in line.place.items():
        for a in node.all_input_nodes:
            stage = owners.get(names.get(a.name, ""))
            if stage is not None:
                first[stage], last[stage] = min(first[stage], i), max(last[stage], i + 1)
    seconds = _crossing_seconds(line, Link(0.0, 1.0))
    cuts: list[int] = []
    for k in range(num_stages - 1):
        low = max([*cuts[-1:], *last[: k + 1]])
        high = min(first[k + 1 :])
        options = [c for c in range(low, high + 1) if line.allowed[c] or c in (0, len(line.nodes)) or c == (cuts or [-1])[-1]]
        if not options:
            raise PartitionError(
                f"the model traced for these inputs uses the parameters of stages {k} and {k + 1} in another order than "
                "the plan: compile a second pipeline for it"
            )
        cuts.append(min(options, key=lambda c: (seconds[c], c)))
    return tuple(cuts)


def _line(captured: Captured) -> _Line:
    written = written_storages(captured)
    free = replicated(captured, written)
    nodes = [n for n in captured.graph.nodes if n.op == "call_function" and n not in free]
    place = {n: i for i, n in enumerate(nodes)}
    line = _Line(nodes, place, bases(captured), free)
    _find_last_uses(captured, line)
    _forbid(captured, line, written)
    return line


def _find_last_uses(captured: Captured, line: _Line) -> None:
    """last_use[v]: place of the last node that needs v, or a view that is taken from v again; own_use: that has v itself."""
    end = len(line.nodes)
    uses = {n: max((line.place.get(u, end) for u in n.users), default=i) for n, i in line.place.items()}
    line.own_use = dict(uses)
    for node in reversed(line.nodes):
        if node in line.base and line.base[node] in uses:
            source = line.base[node]
            uses[source] = max(uses[source], uses[node])
    line.last_use = {n: uses[n] for n in line.nodes if n not in line.base}


def _forbid(captured: Captured, line: _Line, written: dict[int, list[fx.Node]]) -> None:
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


def _own_arithmetic(captured: Captured, line: _Line) -> Iterator[tuple[int, int]]:
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


def _work(node: fx.Node, captured: Captured, bandwidth: float) -> float:
    """Seconds of a node's forward and backward, with its parameters' gradients written and accumulated."""
    seconds = node.meta["seconds"] * (_WITH_BACKWARD if node.meta["grad"] else 1.0)
    params = [a for a in node.all_input_nodes if a.name in captured.params and a.meta["grad"]]
    return seconds + sum(_GRADIENT_TRAFFIC * p.meta["val"].nbytes / bandwidth for p in params)


def _crossing_seconds(line: _Line, link: Link) -> list[float]:
    """Seconds that a cut's messages take (values, and the gradients that come back), for every position; 0 at the ends."""
    steps = [0.0] * (len(line.nodes) + 2)
    count = [0] * (len(line.nodes) + 2)

    def crosses(node: fx.Node, end: int) -> None:
        value, start = node.meta["val"], line.place[node]
        if isinstance(value, torch.Tensor) and end > start:
            seconds = value.nbytes / link.bandwidth
            steps[start + 1] += seconds
            steps[end + 1] -= seconds
            count[start + 1] += 1
            count[end + 1] -= 1

    for node, end in line.last_use.items():
        crosses(node, end)
    for node in line.gradients():
        crosses(node, line.own_use[node])
    total, live, result = 0.0, 0, [0.0] * (len(line.nodes) + 1)
    for cut in range(1, len(line.nodes)):
        total += steps[cut]
        live += count[cut]
        result[cut] = max(total, 0.0) + (link.latency if live else 0.0)
    return result


def _pin(line: _Line, name: str) -> int:
    """The position before the first node of a module."""
    for i, node in enumerate(line.nodes):
        if any(m == name or m.startswith(name + ".") for m in node.meta["modules"]):
            if i == 0:
                raise PartitionError(f"cannot cut before module {name!r}: it is the first in the model")
            if not line.allowed[i]:
                raise PartitionError(f"cannot cut before module {name!r} ({node.meta['source']}): an in-place operation spans it")
            return i
    known = sorted({m.split(".")[0] for n in line.nodes for m in n.meta["modules"] if m})
    raise PartitionError(f"no module named {name!r} in the graph; top-level modules are {known}")


# ---------------------------------------------------------------- a stage's own graph


def _stage(captured: Captured, line: _Line, index: int, start: int, end: int, *, last: bool) -> Forward:
    inputs, views_in = line.crossing(start), line.views_crossing(start)
    outputs = list(outputs_of(captured.graph)) if last else line.crossing(end)
    views_out = [] if last else line.views_crossing(end)
    needed = _needed(line, line.nodes[start:end], [*outputs, *views_in, *views_out], set(inputs))
    order = [n for n in captured.graph.nodes if n in needed]
    places = [n.name for n in order if n.op == "placeholder"]
    groups = [
        [p for p in places if p in names] for names in (captured.params, captured.buffers, captured.constants, captured.leaves)
    ]
    graph = _extract(captured, order, [name for group in groups for name in group], inputs, outputs)
    seconds = sum(n.meta["seconds"] for n in order if n.op == "call_function")
    params, buffers, constants, leaves = (tuple(g) for g in groups)
    return Forward(
        index,
        graph,
        params,
        buffers,
        constants,
        leaves,
        tuple(n.name for n in inputs),
        tuple(n.name for n in outputs),
        seconds,
        start,
        tuple(n.name for n in views_in),
        tuple(n.name for n in views_out),
    )


def _needed(line: _Line, own: list[fx.Node], outputs: list[fx.Node], given: set[fx.Node]) -> set[fx.Node]:
    """A stage's own nodes and everything it takes again for itself; values given from the stage before are not followed."""
    needed: set[fx.Node] = set(own)
    stack = [a for n in [*own] for a in n.all_input_nodes] + [n for n in outputs if n not in given]
    while stack:
        node = stack.pop()
        if node in needed or node in given:
            continue
        if node in line.place and node not in line.base and node not in own:
            raise PartitionError(f"internal: {node.name} ({node.meta['source']}) is needed but does not cross the cut")
        needed.add(node)
        stack.extend(node.all_input_nodes)
    return needed


def _extract(
    captured: Captured, order: list[fx.Node], places: list[str], inputs: list[fx.Node], outputs: list[fx.Node]
) -> fx.Graph:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    by_name = {n.name: n for n in order}
    for node in [*[by_name[p] for p in places], *inputs]:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in order:
        if node.op == "call_function" and node not in env:
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[n] for n in outputs))
    return graph
