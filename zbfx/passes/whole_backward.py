"""The backward as one function, for schedules that do not split it; and what B and W are measured and checked against.

joint: p, c, x, gy -> y, gx, gparams
F: p, c, x -> y, s        BW: p, c, s, gy -> gx, gparams

Where a schedule has nothing between a stage's B and its W, the backward in autograd's own order frees each activation as soon
as its gradient is through, and reads what both need once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zbfx.ir import Fn, Joint, Schedule, Stage
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


def with_whole_backwards(stages: Sequence[Stage], schedule: Schedule) -> tuple[Stage, ...]:
    """The stages as the schedule runs them: those whose backwards it never splits get BW in place of B and W."""
    split = {a.stage for rank in schedule.ranks for a in rank if a.kind in ("B", "W")}
    backward = {a.stage for rank in schedule.ranks for a in rank if a.kind == "BW"}
    return tuple(
        replace(s, F=s.whole[0], B=None, W=None, BW=s.whole[1]) if s.whole is not None and s.index in backward - split else s
        for s in stages
    )
