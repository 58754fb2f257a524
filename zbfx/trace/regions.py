"""What torch.export would lose: custom autograd functions and activation checkpointing; and one thing that would stop it.

While a model is exported, a call of a user's `torch.autograd.Function` is recorded as one operator, which `replay` turns back
into the call, so that its own backward is differentiated; and the operators within `torch.utils.checkpoint` are marked with
their region, so that the backward can compute them again. torch's Transformer layers look into the values of a mask to see
whether it is the causal one, for which there is a faster kernel; here a mask is used as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.modules.transformer as transformer
import torch.utils.checkpoint as checkpointing
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.utils import _pytree as pytree

from zbfx.errors import TraceError

REGION = "zbfx_region"
_library = torch.library.Library("zbfx_function", "FRAGMENT")
_names = count()


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A recorded call of an autograd Function: its arguments, with holes where the tensors go."""

    apply: Callable[..., Any]
    leaves: tuple[Any, ...]  # None at the tensors' places
    places: tuple[int, ...]
    spec: pytree.TreeSpec

    def __call__(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return self.apply(*pytree.tree_unflatten(leaves, self.spec))


calls: dict[Any, Call] = {}  # recorded operator -> the call it stands for


@contextlib.contextmanager
def observed() -> Iterator[None]:
    """While inside: custom functions are recorded as operators, checkpointed regions are marked, masks are taken as they are."""
    function = torch.autograd.Function
    apply = function.__dict__["apply"]
    generator = checkpointing._checkpoint_without_reentrant_generator
    detect = transformer._detect_is_causal_mask
    differentiate = torch.autograd.grad
    enter, leave = torch.inference_mode.__enter__, torch.inference_mode.__exit__
    regions = count(1)

    def recorded(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is None:
            return apply.__get__(None, cls)(*args, **kwargs)
        if cls is checkpointing.CheckpointFunction:
            run, _preserve, *rest = args
            with _region(next(regions)):
                return run(*rest)
        if cls.__module__.partition(".")[0] == "torch":
            return apply.__get__(None, cls)(*args, **kwargs)
        return _record(cls, apply.__get__(None, cls), args)

    def marked(fn: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with _region(next(regions)):
            yield

    function.apply = classmethod(recorded)  # type: ignore[assignment, method-assign]
    checkpointing._checkpoint_without_reentrant_generator = marked
    torch.inference_mode.__enter__, torch.inference_mode.__exit__ = _enter_no_grad, _leave_no_grad  # type: ignore[method-assign]
    torch.autograd.grad = _no_grad_of_grad  # type: ignore[assignment]
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        function.apply = apply  # type: ignore[method-assign]
        checkpointing._checkpoint_without_reentrant_generator = generator
        transformer._detect_is_causal_mask = detect
        torch.inference_mode.__enter__, torch.inference_mode.__exit__ = enter, leave  # type: ignore[method-assign]
        torch.autograd.grad = differentiate


def _enter_no_grad(mode: Any) -> None:
    """Within a trace, inference mode is what no_grad is: export records that, and would lose this."""
    mode.quiet = torch.no_grad() if mode.mode else contextlib.nullcontext()
    mode.quiet.__enter__()


def _leave_no_grad(mode: Any, *error: Any) -> None:
    mode.quiet.__exit__(*error)


def _no_grad_of_grad(*_: Any, **__: Any) -> None:
    raise RuntimeError("a gradient taken in forward (torch.autograd.grad) cannot be differentiated again in a trace")


@contextlib.contextmanager
def _region(number: int) -> Iterator[None]:
    """Mark the operators traced inside; an outer region takes in the inner ones."""
    mode = get_proxy_mode()
    before = len(mode.tracer.graph.nodes) if mode is not None else 0
    yield
    if mode is not None:
        for node in list(mode.tracer.graph.nodes)[before:]:
            node.meta[REGION] = number


def _record(cls: Any, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Define an operator for this one call, with the result types that the function gives, and call it."""
    leaves, spec = pytree.tree_flatten(args)
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    call = Call(apply, tuple(None if i in places else leaf for i, leaf in enumerate(leaves)), places, spec)
    with disable_proxy_modes_tracing(), torch.no_grad():
        result = call(*[_blank(leaves[i]) for i in places])
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    if not outputs or not all(isinstance(out, torch.Tensor) for out in outputs):
        kinds = [type(out).__name__ for out in outputs]
        raise TraceError(
            f"{cls.__qualname__}.forward returns {kinds}: a custom autograd function must return tensors to be split"
        )
    name = f"{cls.__name__.lower()}_{next(_names)}"
    takes = ", ".join(f"Tensor a{i}" for i in range(len(places)))
    gives = "Tensor" if isinstance(result, torch.Tensor) else "(" + ", ".join("Tensor" for _ in outputs) + ")"
    _library.define(f"{name}({takes}) -> {gives}")
    layouts = [(tuple(o.shape), o.stride(), o.dtype, o.device) for o in outputs]

    def shapes(*_: torch.Tensor) -> Any:
        made = tuple(torch.empty_strided(s, st, dtype=d, device=v) for s, st, d, v in layouts)
        return made[0] if isinstance(result, torch.Tensor) else made

    torch.library.register_fake(f"zbfx_function::{name}", shapes, lib=_library)
    operator = getattr(torch.ops.zbfx_function, name).default
    calls[operator] = call
    return operator(*[leaves[i] for i in places])


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """An untraced tensor of the same type."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
