"""A stage's forward graph -> one joint forward and backward graph of plain, functional aten calls.

joint: params, buffers, constants, leaves, x, gy -> y, gx, gparams
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from zbfx.errors import TraceError, ZbfxError
from zbfx.ir import Forward, Joint
from zbfx.storage import draws, mutates
from zbfx.trace.replay import Replay

aten = torch.ops.aten


def differentiate(forward: Forward, tangents: Sequence[FakeTensor | None]) -> Joint:
    """Trace the stage's backward. tangents[i] lends its layout to the gradient of output (then view) i; None: none comes.

    The loss (the last stage's only output) has a tangent of its own shape. Gradients that autograd finds to be absent are
    left out of gx and gparams.
    """
    places = [n for n in forward.graph.nodes if n.op == "placeholder"]
    differentiable = {*forward.params, *forward.inputs}
    wanted = [i for i, n in enumerate(places) if n.meta["grad"] and n.name in differentiable]
    gys = [(i, t) for i, t in enumerate(tangents) if t is not None]
    trace = _Trace(forward, wanted, [i for i, _ in gys])
    graph = _traced(trace, [*[n.meta["val"] for n in places], *[t for _, t in gys]])
    names = [
        *[n.name.removeprefix("p_model_").removeprefix("b_model_").removeprefix("c_model_") for n in places],
        *[f"g_{(*forward.outputs, *forward.views_out)[i]}" for i, _ in gys],
    ]
    offset = len(places) - len(forward.inputs)
    gx = tuple(i - offset for i in trace.found if i >= offset)
    gparams = tuple(i for i in trace.found if i < len(forward.params))
    ny = len(forward.outputs)
    order = [*range(ny), *range(ny + len(gparams), ny + len(trace.found)), *range(ny, ny + len(gparams))]
    return Joint(forward, _cleaned(graph, names, order), tuple(i for i, _ in gys), gx, gparams)


class _Marks:
    """Where every node that a trace makes comes from: its operator's source line and place among the random ones.

    Backward nodes get those of their forward's operator.
    """

    def __init__(self) -> None:
        self.marks: list[tuple[int, fx.Node | None]] = []
        self.seen: set[Any] = set()

    def mark(self, origin: fx.Node) -> None:
        mode = get_proxy_mode()
        if mode is not None:
            self.marks.append((len(mode.tracer.graph.nodes), origin))

    def follow(self, result: Any, origin: fx.Node) -> None:
        """Have the autograd nodes that made `result` mark their source when they run."""
        stack = [t.grad_fn for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        while stack:
            fn = stack.pop()
            if fn is None or fn in self.seen or not hasattr(fn, "register_prehook"):
                continue
            self.seen.add(fn)
            fn.register_prehook(lambda _: self.mark(origin))
            stack.extend(f for f, _ in fn.next_functions if f is not None)

    def annotate(self, graph: fx.Graph) -> None:
        marks = iter([*self.marks, (len(graph.nodes) + 1, None)])
        upto: int = 0
        origin: fx.Node | None = None
        following: fx.Node | None = None
        for i, node in enumerate(graph.nodes):
            while i >= upto:
                origin = following
                upto, following = next(marks)
            node.meta["source"] = origin.meta.get("source", "") if origin is not None else ""
            node.meta["place"] = origin.meta.get("place") if origin is not None else None
            node.meta["region"] = origin.meta.get("region") if origin is not None else None


class _MarkedReplay(Replay):
    def __init__(self, graph: fx.Graph, marks: _Marks, views_in: Sequence[str] = (), views_out: Sequence[str] = ()) -> None:
        super().__init__(graph)
        self.marks, self.views_in = marks, views_in
        self.views: dict[str, Any] = dict.fromkeys((*views_in, *views_out))

    def run_node(self, n: fx.Node) -> Any:
        self.marks.mark(n)
        result = super().run_node(n)
        if n.name in self.views_in:  # its gradient goes to the stage that took it first, not into what it is taken from
            result = result.detach().requires_grad_()
        if n.name in self.views:
            self.views[n.name] = result
        if torch.is_grad_enabled():
            self.marks.follow(result, n)
        return result


class _Trace:
    """The function that is traced: forward, then the gradients that autograd finds."""

    def __init__(self, forward: Forward, wanted: list[int], gys: list[int]) -> None:
        self.forward, self.wanted, self.gys = forward, wanted, gys
        self.found: list[int] = []
        self.marks = _Marks()

    def __call__(self, *flat: Any) -> tuple[Any, ...]:
        count = len(flat) - len(self.gys)
        ins = [v.detach() if isinstance(v, torch.Tensor) else v for v in flat[:count]]
        for i in self.wanted:
            ins[i].requires_grad_()
        forward = self.forward
        replay = _MarkedReplay(forward.graph, self.marks, forward.views_in, forward.views_out)
        ys = replay.run(*ins)
        ends = [*ys, *[replay.views[name] for name in forward.views_out]]
        pairs = [(ends[i], gy) for i, gy in zip(self.gys, flat[count:], strict=True) if ends[i].requires_grad]
        wanted = [*self.wanted, *range(count, count + len(forward.views_in))]
        if not pairs or not wanted:
            return tuple(ys)
        leaves = [*[ins[i] for i in self.wanted], *[replay.views[name] for name in forward.views_in]]
        grads = torch.autograd.grad([y for y, _ in pairs], leaves, [gy for _, gy in pairs], allow_unused=True)
        self.found = [i for i, g in zip(wanted, grads, strict=True) if g is not None]
        for i, g in zip(wanted, grads, strict=True):
            if g is not None and g.layout != torch.strided:
                names = [n.name for n in self.forward.graph.nodes if n.op == "placeholder"]
                raise TraceError(
                    f"the gradient of {names[i]} is sparse, which a pipeline cannot add up: use dense gradients "
                    "(nn.Embedding(sparse=False))"
                )
        return (*ys, *[g for g in grads if g is not None])


def _traced(trace: _Trace, flat: list[Any]) -> fx.Graph:
    """Trace autograd's work as plain operators; where in-place ones are among them, trace again to make it functional."""
    mode = next((v.fake_mode for v in flat if isinstance(v, FakeTensor)), None) or FakeTensorMode()
    flat = [_leaf(v, mode) for v in flat]
    try:
        kind = next((v.device.type for v in flat if isinstance(v, torch.Tensor)), "cpu")
        with torch.enable_grad(), torch.autocast(kind, enabled=False), mode:  # autograd itself runs outside autocast
            graph = make_fx(trace, tracing_mode="real", _allow_non_fake_inputs=True)(*flat).graph
        trace.marks.annotate(graph)
        if any(mutates(n.target) for n in graph.nodes):
            _make_pieces_views(graph)
            graph = _functional(graph, flat, mode)
    except ZbfxError:
        raise
    except Exception as error:
        index = trace.forward.index
        raise TraceError(f"stage {index}: its backward cannot be traced: {type(error).__name__}: {error}") from error
    return graph


_PIECES = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    aten.unsafe_chunk.default: aten.chunk.default,
}


def _make_pieces_views(graph: fx.Graph) -> None:
    """Pieces that are written in place (as a GRU's gates are) keep the layout of the whole, which kernels round by.

    Autograd takes the results of an unsafe split for tensors of their own; here they are what they are, views.
    """
    for node in graph.nodes:
        if node.target in _PIECES and any(mutates(u.target) for piece in node.users for u in piece.users):
            node.target = _PIECES[node.target]


def _functional(graph: fx.Graph, flat: list[Any], mode: FakeTensorMode) -> fx.Graph:
    marks = _Marks()
    run = torch.func.functionalize(lambda *a: _MarkedReplay(graph, marks).run(*a), remove="mutations")
    with torch.no_grad(), mode:
        functional = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*flat).graph
    marks.annotate(functional)
    return functional


def _leaf(value: Any, mode: FakeTensorMode) -> Any:
    """A fresh fake tensor of the same layout, detached from any earlier trace."""
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _cleaned(graph: fx.Graph, names: list[str], order: list[int]) -> fx.Graph:
    """A copy without detach and dead code, placeholders named as in the forward, outputs put in `order`."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    fresh = iter(names)
    drawn: dict[int | None, int] = {}  # place -> random operators met so far that its operator became
    for node in graph.nodes:
        if node.op == "output":
            outputs = [env[node.args[0][i]] for i in order]
            new.output(tuple(outputs))
        elif node.target in (aten.detach.default, aten.alias.default, aten.lift_fresh.default):
            env[node] = env[node.args[0]]
        else:
            env[node] = new.placeholder(next(fresh)) if node.op == "placeholder" else new.node_copy(node, lambda n: env[n])
            env[node].meta = {k: node.meta.get(k) for k in ("val", "source", "region")}
            if node.op == "call_function" and draws(node):
                place = node.meta["place"]
                env[node].meta["draw"] = (place, drawn.get(place, 0))
                drawn[place] = drawn.get(place, 0) + 1
    for node in reversed(list(new.nodes)):
        if node.op == "call_function" and not node.users and not mutates(node.target):
            new.erase_node(node)
    return new
