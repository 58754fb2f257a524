"""One rank's share of the user's optimizer: the same settings and state, some of the parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from zbfx.errors import InputError

Settings = Sequence[Mapping[str, Any]]


def settings_of(optimizer: Optimizer) -> Settings:
    """Each group's learning rate and the like, as they are now: a scheduler may change them before a late step is taken."""
    return [{k: _copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


class Share:
    """Steps the user's optimizer on some of its parameters. Works for every optimizer whose `step` reads param_groups, state."""

    def __init__(self, whole: Optimizer, parameters: Collection[Tensor]) -> None:
        self.whole = whole
        self._wanted = {id(p) for p in parameters}
        self.last: Settings = ()  # what the last step was taken with
        self.spoils = True  # whether a step writes into the gradients, as far as is known
        self._part: Optimizer = object.__new__(type(whole))
        self._part.__dict__.update(whole.__dict__)
        self._part.__dict__.pop("step", None)  # a learning-rate scheduler has put its own wrapper there

    def step(self, settings: Settings) -> None:
        """Step on the gradients in `.grad`, with the given settings of each of the optimizer's groups."""
        groups = []
        self.last = settings
        for group, values in zip(self.whole.param_groups, settings, strict=True):
            chosen = [p for p in group["params"] if id(p) in self._wanted]
            if chosen:
                groups.append({**group, **values, "params": chosen})
        if groups:
            self._part.state = self.whole.state
            self._part.param_groups = groups
            grads = [(p.grad, p.grad._version) for group in groups for p in group["params"] if p.grad is not None]
            before_step = [dict(group) for group in groups]
            with torch.no_grad():
                self._part.step()
            self.spoils = any(grad._version != before for grad, before in grads)
            self._refuse_changed(groups, before_step)
        self.whole._opt_called = True  # type: ignore[attr-defined]  # what learning-rate schedulers look at, to warn

    def _refuse_changed(self, groups: Settings, before: Settings) -> None:
        """Raises InputError where a step has changed its own settings: ranks each have a part of a group, and would disagree."""
        for group, given in zip(groups, before, strict=True):
            changed = [k for k, v in group.items() if k not in given or v is not given[k]]
            if changed:
                raise InputError(
                    f"{type(self.whole).__name__} writes {changed[0]!r} into its param_groups as it steps, which ranks that each "
                    "hold a part of the parameters cannot do alike: keep it in the state of each parameter"
                )

    def settings(self, parameter: Tensor) -> Mapping[str, Any]:
        """What the last step of a parameter was taken with: its group's settings."""
        groups = zip(self.whole.param_groups, self.last, strict=True)
        return next((values for group, values in groups if any(p is parameter for p in group["params"])), {})

    def state(self, parameter: Tensor) -> dict[str, Any]:
        """What the optimizer keeps for a parameter; empty before its first step."""
        return self.whole.state.get(parameter, {})


class Snapshot:
    """Parameters and their optimizer state before a step that may have to be taken back, bit for bit; and their gradients, where
    the optimizer writes into them."""

    def __init__(self, share: Share, parameters: Sequence[Tensor]) -> None:
        self._share = share
        self._values = [(p, p.detach().clone(), {k: _copied(v) for k, v in share.state(p).items()}) for p in parameters]
        self._grads = [(p.grad, p.grad.clone()) for p in parameters if p.grad is not None] if share.spoils else []

    def stepped(self) -> None:
        """The step is taken: gradients that it left alone need no copy."""
        if not self._share.spoils:
            self._grads = []

    def restore(self) -> None:
        """Put everything back."""
        state = self._share.whole.state
        for grad, value in self._grads:
            grad.copy_(value)
        for parameter, value, kept in self._values:
            with torch.no_grad():
                parameter.copy_(value)
            if kept:
                state[parameter] = kept
            else:
                state.pop(parameter, None)


def _copied(value: Any) -> Any:
    """Its own tensors, and its own lists and dicts around them."""
    return pytree.tree_map_only(Tensor, Tensor.clone, value)
