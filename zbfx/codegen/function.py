"""A stage function's graph -> the Python text of a function, as a person would have written it.

Every name is deleted at its last use; arguments are taken out of the caller's lists, so that nothing lives longer than it
must. Shapes and the user's source lines stand as comments.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zbfx.errors import TraceError
from zbfx.ir import Fn, short

_STATIC = ("p", "c")


def function_text(name: str, fn: Fn, last: Mapping[fx.Node, fx.Node], ops: dict[str, str], users: Sequence[str]) -> list[str]:
    """Lines of `def name(...)`. last: name -> operator after which it is deleted. ops is filled with alias -> operator.

    users: the user's names of the entries of p, for comments.
    """
    groups = [g for g in fn.takes if g in _STATIC or fn.takes[g]]
    lines = [f"def {name}({', '.join('_' + g for g in groups)}):"]
    if any("draw" in n.meta for n in fn.graph.nodes):
        lines.append("    draw = _c[-1]  # runs an operator on the random stream of (seed, step, microbatch, place)")
    nodes = {n.name: n for n in fn.graph.nodes}
    for group in groups:
        lines += _unpack(group, [nodes[n] for n in fn.takes[group]], users)
    dies: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        dies.setdefault(user, []).append(value)
    dynamic = [n for g in groups if g not in _STATIC for n in fn.takes[g]]
    unused = [n for n in dynamic if not nodes[n].users]
    if unused:
        lines.append(f"    del {', '.join(unused)}")
    static = {n for g in _STATIC for n in fn.takes.get(g, ())}
    for node in fn.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            gone = [d.name for d in dies.get(node, ()) if d.name not in static]
            lines.append(_call(node, gone, ops))
    lines.append(f"    return {_returned(fn)}")
    return lines


def _unpack(group: str, nodes: Sequence[fx.Node], users: Sequence[str]) -> list[str]:
    if group == "p":
        return [
            f"    {n.name} = _p[{i}]  # {short(n.meta['val'])} {users[i] if i < len(users) else 'constant'}"
            for i, n in enumerate(nodes)
            if n.users
        ]
    if group == "c":
        return [f"    {n.name} = _c[{i}]  # {short(n.meta['val'])}" for i, n in enumerate(nodes) if n.users]
    names = ", ".join(n.name for n in nodes)
    return [f"    {names}{',' if len(nodes) == 1 else ''} = _{group}; _{group}.clear()"]


def _call(node: fx.Node, gone: list[str], ops: dict[str, str]) -> str:
    value = node.meta["val"]
    call = f"{alias(node.target, ops)}({_arguments(node)})"
    if "draw" in node.meta:
        call = f"draw({node.meta['draw']}, {alias(node.target, ops)}, {_arguments(node)})"
    if isinstance(value, (tuple, list)):
        names = {u.args[1]: u.name for u in node.users}
        parts = [names.get(i, "_") for i in range(len(value))]
        if "_" in parts:
            gone = [*gone, "_"]
        call = f"{', '.join(parts)}{',' if len(parts) == 1 else ''} = {call}"
    elif node.users:
        call = f"{node.name} = {call}"
    delete = f"; del {', '.join(gone)}" if gone else ""
    source = node.meta.get("source")
    return f"    {call}{delete}  # {short(value)}" + (f" {source}" if source else "")


def _returned(fn: Fn) -> str:
    lists, start = [], 0
    for count in fn.gives.values():
        lists.append(f"[{', '.join(n.name for n in fn.outputs[start : start + count])}]")
        start += count
    return ", ".join(lists)


def alias(target: Any, ops: dict[str, str]) -> str:
    """A short module-level name of an operator: aten.add.Tensor -> aten_add_Tensor."""
    if not isinstance(target, torch._ops.OpOverload):
        raise TraceError(
            f"{target} cannot be written into a program: it is not a registered operator (torch.library.custom_op makes one)"
        )
    namespace, _, rest = target._schema.name.partition("::")
    overload = target._overloadname
    name = f"{namespace}_{rest}" + ("" if overload == "default" else f"_{overload}")
    ops[name] = f"torch.ops.{namespace}.{rest}.{overload}"
    return name


def _arguments(node: fx.Node) -> str:
    return ", ".join(
        [*map(literal, node.args), *[f"{k}={literal(v)}" for k, v in node.kwargs.items() if v is not None or k != "pin_memory"]]
    )


def literal(value: Any) -> str:
    """Python text of an operator's argument."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(literal, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if isinstance(value, torch.device):
        return "DEVICE"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TraceError(f"a shape depends on a value ({value}): zbfx compiles for fixed shapes; pad to a fixed size")
    return repr(value)  # dtypes, layouts, memory formats and plain values print as they are written
