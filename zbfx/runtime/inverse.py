"""The inverse of an optimizer's step, computed in place (Zero Bubble, section 4): it takes no memory, and is not exact.

With gradient g still there, SGD's and AdamW's updates can be solved for what they were applied to. Rounding leaves a
difference of some units in the last place, more where a weight decay or a second moment has absorbed most of a small value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zbfx.errors import InputError
from zbfx.runtime.share import Share


def refuse_without_inverse(optimizer: Optimizer) -> None:
    """Raises InputError for an optimizer whose step cannot be solved for what it was applied to."""
    _inverse_of(optimizer)
    for group in optimizer.param_groups:
        if group.get("nesterov"):
            raise InputError(_refusal("SGD with nesterov=True"))
        if group.get("amsgrad"):
            raise InputError(_refusal("amsgrad=True, which forgets what it was"))
        if 0 in group.get("betas", ()):
            raise InputError(_refusal(f"betas={group['betas']}: a moment times 0 is lost"))


class Inverse:
    """Stands in for a Snapshot: notes nothing but which parameters step for the first time."""

    def __init__(self, share: Share, parameters: Sequence[Tensor]) -> None:
        self._share, self._parameters = share, [p for p in parameters if p.grad is not None]
        self._undo = _inverse_of(share.whole)
        refuse_without_inverse(share.whole)
        self._new = {id(p) for p in parameters if not any(isinstance(v, Tensor) for v in share.state(p).values())}

    def stepped(self) -> None:
        """The step is taken."""
        if self._share.spoils:
            raise InputError(_refusal("an optimizer that writes into the gradients (foreach=True with maximize=True does)"))

    def restore(self) -> None:
        """Take the step back."""
        state = self._share.whole.state
        with torch.no_grad():
            for parameter in self._parameters:
                is_new = id(parameter) in self._new
                self._undo(parameter, parameter.grad, state.get(parameter, {}), self._share.settings(parameter), is_new)
                if is_new:
                    state.pop(parameter, None)


def _inverse_of(optimizer: Optimizer) -> Any:
    if type(optimizer) in (torch.optim.AdamW, torch.optim.Adam):
        return _undo_adam
    if type(optimizer) is torch.optim.SGD:
        return _undo_sgd
    raise InputError(_refusal(f"{type(optimizer).__name__}; it knows those of SGD, Adam and AdamW"))


def _refusal(what: str) -> str:
    return f'rollback="inverse" has no inverse of {what}: use rollback="exact"'


def _undo_sgd(parameter: Tensor, grad: Tensor, state: dict[str, Any], given: Mapping[str, Any], is_new: bool) -> None:
    """p' = p - lr b', b' = mu b + (1 - damp) (g + wd p): solved for p, then for b. A first step's b' is g + wd p itself."""
    lr, mu, decay = float(given["lr"]), given["momentum"], given["weight_decay"]
    sign = -1.0 if given["maximize"] else 1.0
    if mu == 0:
        parameter.add_(grad, alpha=sign * lr).div_(1 - lr * decay)
        return
    buffer = state["momentum_buffer"]
    parameter.add_(buffer, alpha=lr)
    if not is_new:
        buffer.sub_(sign * grad + decay * parameter, alpha=1 - given["dampening"]).div_(mu)


def _undo_adam(parameter: Tensor, grad: Tensor, state: dict[str, Any], given: Mapping[str, Any], is_new: bool) -> None:
    """p' = (1 - lr wd) p - lr m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps), then the moments by their own recurrences."""
    (b1, b2), lr, decay = given["betas"], float(given["lr"]), given["weight_decay"]
    grad = -grad if given["maximize"] else grad
    step = float(state["step"])
    m, v = state["exp_avg"], state["exp_avg_sq"]
    moved = (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + given["eps"])
    parameter.add_(moved, alpha=lr)
    if given.get("decoupled_weight_decay"):
        parameter.div_(1 - lr * decay)
    elif decay:
        grad = grad + decay * parameter
    if not is_new:
        m.sub_(grad, alpha=1 - b1).div_(b1)
        v.sub_(grad.square(), alpha=1 - b2).div_(b2).clamp_min_(0.0)
        state["step"] -= 1
