"""Exact bytes: what a stage function allocates and frees at each of its operators, by storage.

The generated function deletes every name at its last use and takes its arguments out of the caller's lists, so the storages
alive at any operator follow from the graph alone. Parameters, buffers, constants and input leaves are static and count 0.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zbfx.ir import Fn
from zbfx.storage import allocated, is_view, mutates

Slot = int | None  # a storage within one function; None for a static one
STATIC_GROUPS = ("p", "c")


@dataclass(frozen=True, slots=True)
class Step:
    """One operator: the storages it makes (slot, bytes), the slots that get one more name, the names that die after it."""

    makes: tuple[tuple[int, int], ...]
    views: tuple[int, ...]
    drops: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """A function's storage life. Slots 0..inputs-1 are its dynamic inputs (x, s, gy, k), in order."""

    inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[Slot, ...]
    groups: tuple[tuple[str, int], ...]


def profile(fn: Fn) -> Profile:
    """The storage life of a stage function."""
    slots = _Slots(fn)
    last = last_uses(fn.graph)
    nodes = list(fn.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder" and slots.of[n] is not None]
    dies: dict[fx.Node, list[fx.Node]] = {}
    for name, user in last.items():
        dies.setdefault(user, []).append(name)
    steps = [Step((), (), tuple(s for n in inputs if not n.users and (s := slots.of[n]) is not None))]
    for node in nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        drops = [s for n in dies.get(node, ()) if (s := slots.of.get(n)) is not None] + slots.unused.get(node, [])
        steps.append(Step(tuple(slots.made.get(node, ())), tuple(slots.views.get(node, ())), tuple(drops)))
    outputs = tuple(slots.of[n] for n in fn.outputs)
    return Profile(len(inputs), tuple(steps), outputs, tuple(fn.gives.items()))


def last_uses(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Name -> the operator after which it can go. Outputs live on; tuples have no name: they are unpacked where they are made."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    kept = set(graph.output_node().all_input_nodes)
    return {name: user for name, user in last.items() if name not in kept and user.target is not operator.getitem}


class _Slots:
    """Which storage each name looks at, and which storages each operator makes."""

    def __init__(self, fn: Fn) -> None:
        self.of: dict[fx.Node, Slot] = {}
        self.made: dict[fx.Node, list[tuple[int, int]]] = {}
        self.views: dict[fx.Node, list[int]] = {}
        self.unused: dict[fx.Node, list[int]] = {}
        self.count = 0
        static = {n for group in STATIC_GROUPS for n in fn.takes.get(group, ())}
        for node in fn.graph.nodes:
            if node.op == "placeholder":
                self.of[node] = None if node.name in static else self._next()
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._operator(node)

    def _next(self) -> int:
        self.count += 1
        return self.count - 1

    def _operator(self, node: fx.Node) -> None:
        value = node.meta["val"]
        if isinstance(value, (tuple, list)):
            self._several(node, value)
        elif is_view(node.target):
            self.of[node] = self._look(node)
        elif mutates(node.target):
            self.of[node] = None  # writes into a buffer, which is static
        elif isinstance(value, torch.Tensor):
            self.of[node] = self._make(node, value)
            if not node.users:
                self.unused[node] = [self.of[node]]  # type: ignore[list-item]

    def _several(self, node: fx.Node, values: Sequence[Any]) -> None:
        """An operator with several results: each is a name from the start; those nobody takes die at once."""
        parts: dict[int, fx.Node] = {u.args[1]: u for u in node.users}  # type: ignore[misc]
        for i, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                continue
            view = is_view(node.target)
            if i in parts:
                self.of[parts[i]] = self._look(node) if view else self._make(node, value, i)
            elif not view:
                self.unused.setdefault(node, []).append(self._make(node, value, i))

    def _look(self, node: fx.Node) -> Slot:
        """One more name on the storage that a view looks at."""
        slot = self.of[node.args[0]]  # type: ignore[index]
        if slot is not None:
            self.views.setdefault(node, []).append(slot)
        return slot

    def _make(self, node: fx.Node, value: torch.Tensor, index: int = 0) -> int:
        slot = self._next()
        self.made.setdefault(node, []).append((slot, allocated(node, value, index)))
        return slot


# ---------------------------------------------------------------- many calls: a rank's ledger

_Key = tuple[int, tuple[int, ...], tuple[bool, ...]]


@dataclass(frozen=True, slots=True)
class _Effect:
    """What a call does: the highest it climbs above the bytes held before, and where its outputs' storages come from."""

    climb: int
    outputs: tuple[tuple[str, int], ...]  # ("in", position) | ("new", slot) | ("static", 0)
    sizes: dict[int, int] = field(default_factory=dict)


class Ledger:
    """Counts the storages of one rank as a program would hold them: references by name, bytes by storage."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._refs: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._next = 0
        self._effects: dict[_Key, _Effect] = {}
        self._profiles: dict[int, Profile] = {}

    def new(self, size: int) -> int:
        """A storage with one name on it."""
        storage = self._add(size)
        self.peak = max(self.peak, self.live)
        return storage

    def _add(self, size: int) -> int:
        self._next += 1
        self._refs[self._next], self._bytes[self._next] = 1, size
        self.live += size
        return self._next

    def drop(self, storages: Sequence[Slot]) -> None:
        """One name less on each."""
        for storage in storages:
            if storage is None:
                continue
            self._refs[storage] -= 1
            if not self._refs[storage]:
                self.live -= self._bytes.pop(storage)
                del self._refs[storage]

    def call(self, fn: Profile, inputs: Sequence[Slot]) -> dict[str, list[Slot]]:
        """Run a function that takes `inputs` over from its caller; its output groups."""
        effect = self._effect(fn, inputs)
        self.peak = max(self.peak, self.live + effect.climb)
        fresh = {slot: self._add(effect.sizes[slot]) for slot in sorted({j for kind, j in effect.outputs if kind == "new"})}
        result: list[Slot] = []
        for kind, j in effect.outputs:
            storage = fresh[j] if kind == "new" else inputs[j] if kind == "in" else None
            if storage is not None:
                self._refs[storage] += 1
            result.append(storage)
        self.drop([*fresh.values(), *inputs])
        groups, start = {}, 0
        for name, count in fn.groups:
            groups[name] = result[start : start + count]
            start += count
        return groups

    def _effect(self, fn: Profile, inputs: Sequence[Slot]) -> _Effect:
        first: dict[Slot, int] = {}
        alias = tuple(-1 if s is None else first.setdefault(s, i) for i, s in enumerate(inputs))
        mine: dict[Slot, int] = {}
        for s in inputs:
            mine[s] = mine.get(s, 0) + 1
        outside = tuple(s is not None and self._refs[s] > mine[s] for s in inputs)
        sizes = tuple(0 if s is None else self._bytes[s] for s in inputs)
        key = (id(fn), alias + sizes, outside)
        if key not in self._effects:
            self._profiles[id(fn)] = fn  # keeps the id from being used again
            self._effects[key] = _run(fn, alias, outside, sizes)
        return self._effects[key]


def _run(fn: Profile, alias: Sequence[int], outside: Sequence[bool], sizes: Sequence[int]) -> _Effect:
    """Simulate one call: references of names within the function, plus one for what is held outside."""
    refs: dict[int, int] = {}
    size: dict[int, int] = {}
    canonical: dict[int, int] = {}
    for i, a in enumerate(alias):
        canonical[i] = a
        if a >= 0:
            refs[a] = refs.get(a, 1 if outside[i] else 0) + 1
            size[a] = sizes[i]
    level = climb = 0
    for step in fn.steps:
        for slot, n in step.makes:
            canonical[slot], refs[slot], size[slot] = slot, 1, n
            level += n
        for slot in step.views:
            if canonical[slot] >= 0:
                refs[canonical[slot]] += 1
        climb = max(climb, level)
        for slot in step.drops:
            c = canonical[slot]
            if c < 0:
                continue
            refs[c] -= 1
            if not refs[c]:
                level -= size[c]
    outputs: list[tuple[str, int]] = []
    for out in fn.outputs:
        c = -1 if out is None else canonical[out]
        outputs.append(("static", 0) if c < 0 else ("in", c) if c < fn.inputs else ("new", c))
    return _Effect(climb, tuple(outputs), size)
