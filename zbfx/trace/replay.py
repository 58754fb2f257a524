"""Run a captured graph node by node, in the grad and autocast regions that its nodes were traced in."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx

from zbfx.trace.regions import calls

Context = tuple[str, tuple[Any, ...]]


def entered(contexts: tuple[Context, ...]) -> contextlib.ExitStack:
    """The regions of a node, outermost first, as one context manager."""
    stack = contextlib.ExitStack()
    for kind, args in contexts:
        if kind == "grad":
            stack.enter_context(torch.set_grad_enabled(args[0]))
        else:
            device_type, dtype, enabled, cache = args
            stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache))
    return stack


class Replay(fx.Interpreter):
    """fx.Interpreter that honours each node's `contexts`; values die at their last use."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule(torch.nn.Module(), graph))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        # autocast forgets its casts when the outermost region ends: with one around all nodes, each weight is cast once
        graph: fx.Graph = self.graph
        kinds = {c[1][0] for n in graph.nodes for c in n.meta.get("contexts", ()) if c[0] == "autocast"}
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return super().run(*args, **kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        call = calls.get(target)
        return super().call_function(target, args, kwargs) if call is None else call(*args)

    def run_node(self, n: fx.Node) -> Any:
        contexts = n.meta.get("contexts", ())
        if not contexts:
            return super().run_node(n)
        with entered(contexts):
            return super().run_node(n)
