"""A call's arguments -> microbatches: which leaves are split along dimension 0, and which every microbatch shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zbfx.errors import InputError


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's flattened (args, kwargs, target), how it is cut, and a key that is equal for calls that can share a plan."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    split: tuple[bool, ...]
    size: int
    microbatches: int

    def microbatch(self, mb: int) -> list[Any]:
        """The leaves of one microbatch: narrow views of those that are split."""
        step = self.size // self.microbatches
        return [leaf.narrow(0, mb * step, step) if split else leaf for leaf, split in zip(self.leaves, self.split, strict=True)]

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The first microbatch, as (args, kwargs, target)."""
        args, kwargs, target = pytree.tree_unflatten(self.microbatch(0), self.spec)
        return args, kwargs, target

    def key(self) -> tuple[Any, ...]:
        """Equal for calls whose microbatches have the same structure, shapes, layouts and non-tensor values."""
        return (str(self.spec), *[_leaf_key(leaf) for leaf in self.microbatch(0)])


def read_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, microbatches: int, shared: Sequence[str] = ()
) -> Batch:
    """Decide how a call's arguments are cut, before anything runs.

    The batch size is that of dimension 0 of the first tensor with dimensions among args, kwargs and target. Tensors of that
    size are split; all others, and those whose keyword is in `shared`, go whole to every microbatch.
    Raises InputError where there is no tensor, one requires grad, or the batch does not divide by microbatches.
    """
    paths, spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs), target))
    leaves = [leaf for _, leaf in paths]
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    if not sizes:
        raise InputError("no input tensor has a batch dimension: pass at least one tensor whose dimension 0 is the batch")
    for path, leaf in paths:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise InputError(
                f"the input {pytree.keystr(path)} of shape {list(leaf.shape)} requires grad, but only the model's parameters get "
                "gradients: detach() it, or move what made it into the model"
            )
    size = sizes[0]
    if size % microbatches:
        near = [d for d in range(1, size + 1) if size % d == 0]
        raise InputError(
            f"a batch of {size} does not divide into {microbatches=} equal parts. Pad or drop samples "
            f"(DataLoader(drop_last=True)), or compile with microbatches from {near}"
        )
    split = tuple(
        isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == size and not _is_shared(path, shared)
        for path, leaf in paths
    )
    return Batch(tuple(leaves), spec, split, size, microbatches)


def _is_shared(path: tuple[Any, ...], shared: Sequence[str]) -> bool:
    return any(str(getattr(entry, "key", "")) in shared for entry in path)


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype)
    return (type(leaf).__name__, repr(leaf))
