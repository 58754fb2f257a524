"""State that forward keeps in plain attributes (a counter, a running mean, a list of the last results): refused where it counts.

A trace takes numbers and tensors in attributes for constants, so every call would compute as the first did. What is only
left there to be looked at (an auxiliary loss, attention weights) is no state.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zbfx.errors import TraceError

Key = tuple[str, str]  # (module, attribute)
Attributes = dict[Key, tuple[Any, ...]]
Changes = dict[Key, tuple[tuple[Any, ...], tuple[Any, ...]]]  # what was there before, and after
_OWN = frozenset(torch.nn.Module().__dict__)
_NUMBERS = (bool, int, float, str)
_FEW = 16


def attributes(model: torch.nn.Module) -> Attributes:
    """Every plain attribute of every module: a list's, tuple's or dict's elements, or the value alone."""
    return {
        (path, name): _elements(value)
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if name not in _OWN
    }


def _elements(value: Any) -> tuple[Any, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return (*value.keys(), *value.values()) if isinstance(value, dict) else (value,)


def changes(before: Attributes, after: Attributes) -> Changes:
    """The attributes that were there before and are otherwise after."""
    return {key: (old, after[key]) for key, old in before.items() if key in after and not _same(old, after[key])}


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return len(old) == len(new) and all(
        a is b or (isinstance(a, _NUMBERS) and type(a) is type(b) and a == b) for a, b in zip(old, new, strict=True)
    )


@contextlib.contextmanager
def numbers_read(model: torch.nn.Module) -> Iterator[dict[Key, tuple[Any, ...]]]:
    """While inside: the numbers (and short lists of them) that are read from attributes of modules, as they first were."""
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[Key, tuple[Any, ...]] = {}

    def read(module: Any, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if name not in _OWN and id(module) in paths and not name.startswith("__") and _is_plain(value):
            found.setdefault((paths[id(module)], name), _elements(value))
        return value

    torch.nn.Module.__getattribute__ = read  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del torch.nn.Module.__getattribute__


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= _FEW and all(_is_plain(v) and not isinstance(v, (list, tuple)) for v in value)
    return value is None or type(value) in _NUMBERS


def same_numbers(model: torch.nn.Module, numbers: Mapping[Key, tuple[Any, ...]]) -> bool:
    """True if the attributes are what they were when forward read them."""
    modules = dict(model.named_modules())
    now = {key: getattr(modules.get(key[0]), key[1], None) for key in numbers}
    return all(_is_plain(value) and _elements(value) == numbers[key] for key, value in now.items())


def refuse_read(model: torch.nn.Module, changed: Changes, constants: Mapping[str, Any]) -> None:
    """Raises TraceError for a tensor in an attribute that forward both computes with and changes."""
    used = {id(value) for value in constants.values()}
    for key, (old, _) in changed.items():
        if any(isinstance(value, torch.Tensor) and id(value) in used for value in old):
            raise _error(model, key, "a tensor that it computes with")


@contextlib.contextmanager
def numbers_as_left(model: torch.nn.Module, changed: Changes) -> Iterator[list[Key]]:
    """While inside: the numbers that forward changed are as it left them. Gives their names."""
    keys = [k for k, (old, new) in changed.items() if _is_number(old) and _is_number(new)]
    slots = [(model.get_submodule(path).__dict__, name) for path, name in keys]
    before = [slot[name] for slot, name in slots]
    try:
        for (slot, name), key in zip(slots, keys, strict=True):
            slot[name] = changed[key][1][0]
        yield keys
    finally:
        for (slot, name), value in zip(slots, before, strict=True):
            slot[name] = value


def _is_number(elements: Sequence[Any]) -> bool:
    return len(elements) == 1 and isinstance(elements[0], _NUMBERS)


def refuse_counted(model: torch.nn.Module, keys: Sequence[Key], first: str, second: str | None) -> None:
    """Raises TraceError where a second trace, with the numbers that the first left, computes something else."""
    if second is not None and first != second:
        raise _error(model, keys[0], "a number that it computes with")


def _error(model: torch.nn.Module, key: Key, what: str) -> TraceError:
    path, name = key
    full = ".".join(filter(None, key))
    return TraceError(
        f"the model cannot be traced at {_line(model.get_submodule(path), name)}\n"
        f"  reason: forward changes {full!r}, {what}; in a trace it would stay as it is\n"
        f"  what to do: keep it in a buffer, self.register_buffer({name!r}, torch.tensor(...)), which zbfx updates once per "
        "microbatch, or pass it as an argument"
    )


def _line(module: torch.nn.Module, name: str) -> str:
    """The line of forward that changes the attribute, or where forward begins."""
    try:
        source, start = inspect.getsourcelines(type(module).forward)
        file = inspect.getsourcefile(type(module))
    except (OSError, TypeError):
        return type(module).__qualname__
    change = re.compile(rf"\bself\.{re.escape(name)}(\[.*\])?\s*([-+*/@%|&^]|//|\*\*)?=(?!=)|\bself\.{re.escape(name)}\.\w+\(")
    return f"{file}:{start + next((i for i, line in enumerate(source) if change.search(line)), 0)}"
