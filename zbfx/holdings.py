"""Which of the user's parameters and buffers this process holds, under the user's own names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from zbfx.errors import InputError

Init = Callable[[str, torch.Tensor], Any] | Mapping[str, torch.Tensor]


class Holdings:
    """The model's tensors by name. In one process all of them; in several, this rank's own, once `release` has been told.

    Parameters stay the user's objects: an optimizer made before compiling goes on working.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, init: Init | None) -> None:
        self.model, self.device, self.init = model, device, init
        self.is_partial = False
        self._settled: tuple[str, ...] = ()
        self._bound: dict[str, torch.Tensor] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """A parameter or buffer by the user's name."""
        module, _, leaf = name.rpartition(".")
        found: torch.Tensor | None = None
        with suppress(AttributeError):  # no such module
            owner = self.model.get_submodule(module)
            found = owner._parameters.get(leaf)
            found = owner._buffers.get(leaf) if found is None else found
        if found is None:
            raise InputError(
                f"the model has no parameter or buffer {name!r}: is the plan for another model, "
                "or was the model changed after compiling?"
            )
        return found

    def settle(self, parameters: Sequence[str], buffers: Sequence[str]) -> None:
        """Bring the named tensors to the device and make the ones on the meta device real."""
        missing = []
        self._settled = (*parameters, *buffers)
        for name in self._settled:
            tensor = self.tensor(name)
            if tensor.is_meta:
                missing += self._materialize(name, tensor)
            elif tensor.device != self.device:
                with torch.no_grad():
                    tensor.data = tensor.data.to(self.device)
        if missing:
            raise InputError(
                f"{len(missing)} tensors lie on the meta device and have no values, {missing[0]!r} first: pass init= to "
                "zbfx.compile, a function fn(name, tensor) that fills each in place, or a state dict"
            )
        self._bound = {name: self.tensor(name) for name in self._settled}

    def refuse_replaced(self) -> None:
        """Raises InputError where the model has another tensor now in the place of one that the programs use."""
        for name, tensor in self._bound.items():
            if self.tensor(name) is not tensor:
                raise InputError(
                    f"{name!r} is another tensor than when the model was compiled, and the programs would go on with the old "
                    "one: copy new values into it (with torch.no_grad(): p.copy_(...)), or compile again"
                )

    def _materialize(self, name: str, tensor: torch.Tensor) -> list[str]:
        """Allocate a meta tensor and fill it from init. Returns [name] if there is nothing to fill it from."""
        if self.init is None or (not callable(self.init) and name not in self.init):
            return [name]
        real = torch.empty_like(tensor, device=self.device)
        with torch.no_grad():
            if callable(self.init):
                self.init(name, real)
            else:
                real.copy_(self.init[name])
        self._replace(tensor, real)
        return []

    def _replace(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Put a new tensor wherever the model has the old one (a shared one stays shared)."""
        if isinstance(old, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
        for module in self.model.modules():
            for slots in _slots(module):
                for leaf, value in slots.items():
                    if value is old:
                        slots[leaf] = new

    def release(self, names: Collection[str], *, unused: bool) -> None:
        """Give back the memory of what other ranks' stages use: the model keeps a meta tensor in its place.

        unused: and of the parameters that no stage uses, which one rank alone keeps for its state dict. A buffer that no
        stage uses stays on all ranks: evaluation may need it.
        """
        gone = {id(self.tensor(name)) for name in names}
        tensors = {id(p): p for p in self.model.parameters()} | {id(b): b for b in self.model.buffers()}
        if unused:
            used = {id(self.tensor(name)) for name in self._settled}
            gone |= {id(p) for p in self.model.parameters() if id(p) not in used}
        windows = {t.untyped_storage()._cdata for key, t in tensors.items() if key not in gone}
        for tensor in [tensors[key] for key in gone if not tensors[key].is_meta]:
            self._replace(tensor, torch.empty_like(tensor, device="meta"))
            tensor.grad = None
            storage = tensor.untyped_storage()
            if storage._cdata not in windows and storage.resizable():
                storage.resize_(0)  # an optimizer may still hold the parameter: it has no gradient, and is skipped

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(the user's name, parameter), each parameter once."""
        for name, parameter in self.model.named_parameters():
            if not self.is_partial or not parameter.is_meta:
                yield name, parameter

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers held here."""
        return {name: value for name, value in self.model.state_dict().items() if not value.is_meta}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy values in; every tensor held here must be in `state` with its shape."""
        mine = self.state_dict()
        missing = [name for name in mine if name not in state]
        if missing:
            raise InputError(f"the state dict lacks {len(missing)} of this rank's tensors, {missing[0]!r} first")
        for name, tensor in mine.items():
            if tensor.shape != state[name].shape:
                raise InputError(f"{name!r} has shape {list(tensor.shape)} here, {list(state[name].shape)} in the state dict")
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(state[name])


def refuse_several_devices(model: torch.nn.Module, *, filled: bool) -> None:
    """Raises InputError where a model's tensors lie on several devices: zbfx brings each stage to its rank's device itself.

    Either all parameters lie on the meta device or none, unless those are `filled` (by an init, or on other ranks). Buffers
    with values beside parameters without are common: __init__ computed them.
    """
    parameters = dict(model.named_parameters())
    places: dict[str, str] = {}  # device -> the first tensor on it
    for name, tensor in {**parameters, **dict(model.named_buffers())}.items():
        if not tensor.is_meta:
            places.setdefault(str(tensor.device), name)
    if len(places) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in places.items())
        raise InputError(
            f"the model lies on several devices: {where}. Put it on one before compiling, with model.cpu() or "
            f'model.to({next(iter(places))!r}), and load it without device_map="auto": zbfx brings each stage to its '
            "rank's device"
        )
    empty = next((name for name, p in parameters.items() if p.is_meta), None)
    full = next((name for name, p in parameters.items() if not p.is_meta), None)
    if empty is not None and full is not None and not filled:
        raise InputError(
            f"the model lies on several devices: {empty!r} on meta, without values, and {full!r} on {parameters[full].device}. "
            "Pass init= to zbfx.compile, a function fn(name, tensor) that fills each in place, or a state dict"
        )


def _slots(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers
