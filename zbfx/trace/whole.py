"""Inputs to loss in one module, which is what torch.export sees, with two things that export would lose put right.

A loss that is a module lends its tensors as constants: its parameters are not the model's. A buffer that forward assigns
(`self.mean = 0.9 * self.mean + ...`) is written back in place: forward reads a copy made before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zbfx.errors import InputError
from zbfx.trace.state import Changes, Key, attributes, changes

Loss = Callable[[Any, Any], torch.Tensor]


class Seen:
    """What forward did to plain attributes when it was traced last: an object that export does not put back."""

    changed: Changes
    read: dict[Key, tuple[Any, ...]]


class Whole(torch.nn.Module):
    """forward(args, kwargs, target) -> loss, or (predict) what the model returns. `assigned` grows while it is traced."""

    def __init__(self, model: torch.nn.Module, loss: Loss | None, predict: bool) -> None:
        super().__init__()
        self.model = model
        self._loss, self._predict = (loss,), predict  # in a tuple: a loss that is a module is no part of this one
        self.assigned: set[tuple[str, str]] = set()  # (module, buffer) that forward assigned when it was traced last
        self.copied: frozenset[tuple[str, str]] = frozenset()  # those that it reads copies of
        self.seen = Seen()
        self.training = model.training  # of the whole alone: submodules keep their own modes

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
        before = list(self._buffers_of_model())
        for key, slots, tensor in before:
            if key in self.copied:
                slots[key[1]] = tensor.clone()
        copies = {key: slots[key[1]] for key, slots, _ in before}
        (loss,) = self._loss
        plain = attributes(self.model)
        with _Own():
            output = self.model(*args, **kwargs)
            if not self._predict:
                output = loss(output, target) if loss is not None else own_loss(output)
        self.seen.changed = changes(plain, attributes(self.model))
        for key, slots, tensor in before:
            if slots[key[1]] is not copies[key]:
                self.assigned.add(key)
                if key in self.copied:
                    with torch.no_grad():
                        tensor.copy_(slots[key[1]])
            slots[key[1]] = tensor
        return output

    def _buffers_of_model(self) -> Iterator[tuple[tuple[str, str], dict[str, Any], torch.Tensor]]:
        for path, module in self.model.named_modules():
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    yield (path, name), module._buffers, tensor


class _Own(TorchFunctionMode):
    """Refuses tensors from outside the model that require grad: a trace takes them for constants, without a gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook:
            raise RuntimeError("a hook on a tensor in forward would not run in a compiled backward")
        reads = func is torch.Tensor.detach or getattr(func, "__name__", "") == "__get__" or not torch.is_grad_enabled()
        for leaf in () if reads else pytree.tree_leaves((args, kwargs)):
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.is_leaf and leaf.requires_grad:
                if torch._C._functorch.is_gradtrackingtensor(leaf):
                    raise RuntimeError("a gradient taken in forward (torch.func.grad) cannot be differentiated again in a trace")
                raise RuntimeError(
                    f"a parameter of shape {list(leaf.shape)} that is no part of the model is used: it would get no gradient"
                )
        return func(*args, **(kwargs or {}))


def own_loss(output: Any) -> torch.Tensor:
    """The loss a model returns itself: a 0-dim tensor, an object or dict with `loss`, or a tuple that starts with it."""
    found = output
    if not isinstance(output, torch.Tensor):
        if isinstance(output, Mapping):
            found = output.get("loss")
        elif hasattr(output, "loss"):
            found = output.loss
        elif isinstance(output, (tuple, list)) and output:
            found = output[0]
    if isinstance(found, torch.Tensor) and found.dim() == 0:
        return found
    what = f"a tensor of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else f"{type(output).__name__}"
    raise InputError(
        f"the model returned {what} where a scalar loss is needed. Pass loss=fn to zbfx.compile, with fn(output, target) -> "
        "scalar, or let the model return its own loss (a 0-dim tensor, or an output with .loss, as Hugging Face "
        "models do when given labels=)"
    )
