"""A stage's joint graph -> F and BW: the backward as one function, not split.

joint: p, c, x, gy -> y, gx, gparams
F: p, c, x -> y, s        BW: p, c, s, gy -> gx, gparams

No schedule needs it, since B followed by W does the same work: it is what B and W are measured and checked against.
"""

from __future__ import annotations

from zbfx.ir import Fn, Joint
from zbfx.passes.split_backward import ancestors, dense, forward_nodes, function, open_joint, owned, roots


def whole_backward(joint: Joint) -> tuple[Fn, Fn]:
    """F and BW of a stage. Pure: the joint graph is copied first."""
    graph, ends = open_joint(joint)
    f_nodes = forward_nodes(graph, ends.ys)
    nodes = {n for n in ancestors([*ends.gxs, *ends.gps]) if n.op == "call_function"} - f_nodes
    fixed = {"p": ends.p, "c": ends.c}
    order = {n: i for i, n in enumerate(graph.nodes)}
    s = [v for v in roots(nodes, [*ends.gxs, *ends.gps], {*ends.p, *ends.c}, order) if v not in ends.gy]
    f = function(graph, f_nodes, {**fixed, "x": ends.x}, {"y": dense(graph, ends.ys, f_nodes), "s": s})
    gives = {"gx": dense(graph, ends.gxs, nodes), "gp": owned(graph, ends.gps, nodes)}
    return f, function(graph, nodes, {**fixed, "s": s, "gy": ends.gy}, gives)
