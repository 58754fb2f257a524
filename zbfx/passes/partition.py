"""Captured graph -> stages: where to cut, and each stage's own graph.

Cuts fall anywhere between two nodes of the graph's line where no value is torn (see line).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import fx

from zbfx.errors import PartitionError
from zbfx.ir import Captured, Forward, Link, outputs_of
from zbfx.passes.balance import best_cuts
from zbfx.passes.line import Line, line_of

# What the backward adds to a forward second: a gradient of the input and one of the weights, each as long as the forward.
_WITH_BACKWARD = 3.0
# Bytes moved per byte of a parameter's gradient: written by W, then read, added and written by the accumulation.
_GRADIENT_TRAFFIC = 4.0


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
    line = line_of(captured)
    if cuts is None:
        work = [_work(n, captured, bandwidth) for n in line.nodes]
        cross = _crossing_seconds(line, link)
        pinned = tuple(_pin(line, name) for name in pins)
        cuts = best_cuts(work, cross, line.allowed, num_stages, pinned=pinned)
    ends = [0, *cuts, len(line.nodes)]
    return tuple(_stage(captured, line, k, a, b, last=k == len(cuts)) for k, (a, b) in enumerate(pairwise(ends)))


def cuts_for_owners(
    captured: Captured, owners: Mapping[str, int], num_stages: int, shared: Mapping[str, tuple[int, int]] | None = None
) -> tuple[int, ...]:
    """Cuts of another trace of the same model (other shapes, eval mode) that leave every parameter and buffer on its stage.

    owners: the user's name -> stage; shared: of what several stages use, the first and the last of them, which get its first use
    and its last. Among the positions that do, the one with the fewest bytes crossing.
    """
    line = line_of(captured)
    names = {**captured.params, **captured.buffers}
    first, last = [len(line.nodes)] * num_stages, [0] * num_stages
    uses: dict[str, list[int]] = {}
    for node, i in line.place.items():
        for a in node.all_input_nodes:
            uses.setdefault(names.get(a.name, ""), []).append(i)
    for name, places in uses.items():
        ends = (shared or {}).get(name)
        own = owners.get(name)
        held = zip(ends, (min(places), max(places)), strict=True) if ends else [(own, i) for i in places if own is not None]
        for stage, i in held:
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


def _work(node: fx.Node, captured: Captured, bandwidth: float) -> float:
    """Seconds of a node's forward and backward, with its parameters' gradients written and accumulated."""
    seconds = node.meta["seconds"] * (_WITH_BACKWARD if node.meta["grad"] else 1.0)
    params = [a for a in node.all_input_nodes if a.name in captured.params and a.meta["grad"]]
    return seconds + sum(_GRADIENT_TRAFFIC * p.meta["val"].nbytes / bandwidth for p in params)


def _crossing_seconds(line: Line, link: Link) -> list[float]:
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


def _pin(line: Line, name: str) -> int:
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


def _stage(captured: Captured, line: Line, index: int, start: int, end: int, *, last: bool) -> Forward:
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


def _needed(line: Line, own: list[fx.Node], outputs: list[fx.Node], given: set[fx.Node]) -> set[fx.Node]:
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
