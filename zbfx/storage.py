"""What shares memory with what: views, dense layouts, and the bytes of a tensor's storage window."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def is_view(target: Any) -> bool:
    """True for operators whose result shares its input's storage (by schema; _unsafe_view does so without saying it)."""
    if target is torch.ops.aten._unsafe_view.default:
        return True
    schema = getattr(target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def mutates(target: Any) -> bool:
    """True for operators that write into an argument (detach_ writes no data and does not count)."""
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable and target is not torch.ops.aten.detach_.default)


def draws(node: fx.Node) -> bool:
    """True for a call that draws from a random generator; dropout with rate 0, or not in training, draws nothing."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    for i, argument in enumerate(arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        if (argument.name in _RATES and value == 0) or (argument.name in _SWITCHES and value is False):
            return False
    return True


_RATES = {"p", "dropout", "dropout_p"}
_SWITCHES = {"train", "training"}


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill the storage window without holes or overlaps, in some order of the dimensions."""
    expected = 1
    if tensor.numel() == 0:
        return True
    for stride, size in sorted((st, s) for s, st in zip(tensor.shape, tensor.stride(), strict=True) if s > 1):
        if stride != expected:
            return False
        expected = stride * size
    return True


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage that a (fake) tensor keeps alive."""
    return tensor.untyped_storage().nbytes()
