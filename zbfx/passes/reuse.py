"""Stages that compute the same, as in the middle of a deep model: one is differentiated and split, the others renamed from it.

A model of 96 equal layers on 16 stages has about six different ones. Equal ones differ in names, in where in the model their
random operators stand, and in the numbers of their checkpointed regions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zbfx.ir import Captured, Fn, Forward, Joint, Stage

Signature = tuple[Any, ...]
# Metadata of a captured node that differentiating and splitting go by, beside what it computes.
_READ = ("source", "grad", "contexts")


def signature(forward: Forward, tangents: Sequence[Any]) -> Signature:
    """Equal for stages whose functions are equal but for what `renamed` puts right."""
    number = {n: i for i, n in enumerate(forward.graph.nodes)}
    places, regions = _found(forward, "place"), _found(forward, "region")
    groups = (forward.params, forward.buffers, forward.constants, forward.leaves, forward.inputs, forward.outputs)
    by_name = {n.name: number[n] for n in number}
    views = tuple(tuple(by_name[v] for v in names) for names in (forward.views_in, forward.views_out))

    def line(node: fx.Node) -> str:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _Reference(number[n]))
        value = pytree.tree_map_only(torch.Tensor, _type, node.meta.get("val"))
        read = [node.meta.get(key) for key in _READ]
        own = (places.get(node.meta.get("place")), regions.get(node.meta.get("region")))
        return repr((node.op, "" if node.op == "placeholder" else node.target, args, kwargs, value, read, own))

    return (tuple(map(len, groups)), views, tuple(_type(t) for t in tangents), tuple(map(line, forward.graph.nodes)))


class _Reference(int):
    """A node's number as an operator's argument: no number that an operator takes is written like it."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _type(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), str(value.device), value.requires_grad)


def _found(forward: Forward, key: str) -> dict[Any, int]:
    """The values of a piece of metadata -> their rank among those of the stage."""
    found = {n.meta.get(key) for n in forward.graph.nodes} - {None}
    return {value: i for i, value in enumerate(sorted(found))}


# ---------------------------------------------------------------- the same under other names


def renamed(stage: Stage, joint: Joint, forward: Forward, captured: Captured) -> Stage:
    """The stage of `forward`, made from the stage and joint graph of another with an equal signature."""
    before = [n.name for n in joint.graph.nodes if n.op == "placeholder"]
    places = [n.name for n in forward.graph.nodes if n.op == "placeholder"]
    outputs = (*forward.outputs, *forward.views_out)
    after = [*[_plain(name) for name in places], *[f"g_{outputs[i]}" for i in joint.tangents]]
    names = dict(zip(before, after, strict=True))
    draws = dict(zip(_found(joint.forward, "place"), _found(forward, "place"), strict=True))
    return replace(
        stage,
        index=forward.index,
        F=_renamed(stage.F, names, draws),
        B=None if stage.B is None else _renamed(stage.B, names, draws),
        W=None if stage.W is None else _renamed(stage.W, names, draws),
        whole=None if stage.whole is None else (_renamed(stage.whole[0], names, draws), _renamed(stage.whole[1], names, draws)),
        names=tuple(captured.params[n] for n in forward.params),
        buffers=tuple(captured.buffers[n] for n in forward.buffers),
        constants=forward.constants,
        leaves=forward.leaves,
    )


def _plain(name: str) -> str:
    """A placeholder's name as it is shown: without what says that it is the model's parameter, buffer or constant."""
    return re.sub(r"^[pbc]_model_", "", name)


def _renamed(fn: Fn, names: Mapping[str, str], draws: Mapping[Any, Any]) -> Fn:
    """A copy with other placeholder names, whose random operators stand elsewhere in the model."""
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in fn.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], env.__getitem__))
            continue
        is_place = node.op == "placeholder"
        env[node] = graph.placeholder(names.get(node.name, node.name)) if is_place else graph.node_copy(node, env.__getitem__)
        env[node].meta = dict(node.meta)
        if "draw" in node.meta:
            place, number = node.meta["draw"]
            env[node].meta["draw"] = (draws.get(place, place), number)
    by_name = {node.name: new.name for node, new in env.items()}
    takes = {group: tuple(by_name[n] for n in own) for group, own in fn.takes.items()}
    return Fn(graph, takes, fn.gives)
