"""What a function makes again instead of being kept: one cheap operator on what it is given or kept anyway.

A linear layer's W needs the layer norm's output, and that layer norm's own W needs the layer norm's input: the output is the
input, normalised again, bit for bit. The same for casts of parameters, and for elementwise operators between kept values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from zbfx.storage import draws, mutates, nbytes

aten = torch.ops.aten
# Beside elementwise operators: each reads its inputs a few times and computes little.
_CHEAP = {aten.native_layer_norm.default, aten.native_group_norm.default, aten._to_copy.default}


def made_again(
    kept: Sequence[fx.Node], given: set[fx.Node], root: Callable[[fx.Node], fx.Node], *, only_given: bool = False
) -> set[fx.Node]:
    """Those of `kept` (in the graph's order) that one cheap operator makes from `given` and the rest of `kept`, bit for bit.

    root: what a chain of views looks at. only_given: from `given` alone. Never a value smaller than what it is made of: a
    reduction is worth keeping. Nothing is made again from a buffer that the graph writes into.
    """
    steady = {n for n in given if not any(mutates(u.target) for u in n.users if u.op == "call_function")}
    at_hand = steady if only_given else {*steady, *kept}
    again = set()
    for node in kept:
        maker = node.args[0] if node.target is operator.getitem else node
        if not isinstance(maker, fx.Node) or not _is_cheap(maker):
            continue
        sources = {root(a) for a in maker.all_input_nodes}
        largest = max((nbytes(a.meta["val"]) for a in sources - given), default=0)
        if sources <= at_hand and node not in sources and nbytes(node.meta["val"]) >= largest:
            again.add(node)
    return again


def _is_cheap(node: fx.Node) -> bool:
    if node.op != "call_function" or draws(node) or mutates(node.target):
        return False
    return node.target in _CHEAP or torch.Tag.pointwise in getattr(node.target, "tags", ())
