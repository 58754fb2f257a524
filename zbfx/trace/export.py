"""nn.Module -> torch.export's program: parameters stand in as fakes, what export would lose is observed (see regions)."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from zbfx.errors import InputError, TraceError, ZbfxError
from zbfx.trace.explain import explain, refuse_symbols
from zbfx.trace.regions import observed
from zbfx.trace.state import numbers_as_left, numbers_read, refuse_counted, refuse_read
from zbfx.trace.whole import Whole


def export(whole: Whole, inputs: Any, device: torch.device) -> tuple[torch.export.ExportedProgram, Any]:
    """The program and the fake inputs it was traced with. Raises TraceError with the user's source line.

    No parameter is read: the model may lie on the meta device, or be larger than memory.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    inputs = pytree.tree_map_only(torch.Tensor, lambda t: _fake(t, mode, device), inputs)
    with _fake_parameters(whole.model, mode, device):
        with numbers_read(whole.model) as whole.seen.read:
            exported = _exported(whole, inputs)
        if whole.assigned:  # traced again, so that what forward assigns is kept
            whole.copied = frozenset(whole.assigned)
            exported = _exported(whole, inputs)
        _refuse_state(whole, inputs, exported)
    refuse_symbols(exported.graph_module)
    torch.clear_autocast_cache()  # it may hold casts of the fake parameters
    return exported, inputs


def _refuse_state(whole: Whole, inputs: Any, exported: torch.export.ExportedProgram) -> None:
    """Raises TraceError where forward computes with plain attributes that it changes."""
    changed = whole.seen.changed
    refuse_read(whole.model, changed, exported.constants)
    with numbers_as_left(whole.model, changed) as keys:
        if keys:
            refuse_counted(whole.model, keys, exported.graph_module.code, _code_of_another(whole, inputs))


def _code_of_another(whole: Whole, inputs: Any) -> str | None:
    """What a second trace computes; None where it fails, as with a flag for a cache that the first trace took back."""
    with contextlib.suppress(TraceError):
        return _exported(whole, inputs).graph_module.code
    return None


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_floating_point())


@contextlib.contextmanager
def _fake_parameters(model: torch.nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Swap every parameter and buffer for a fake one (a shared one stays shared); put the real ones back after."""
    swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    fakes: dict[int, torch.Tensor] = {}
    try:
        for module in model.modules():
            both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for slots in both:
                for name, real in slots.items():
                    if real is None:
                        continue
                    if is_lazy(real):
                        raise InputError(
                            f"{name!r} of a {type(module).__name__} has no shape yet: call the model once on a batch, which "
                            "gives lazy modules their shapes, before compiling"
                        )
                    if id(real) not in fakes:
                        fake = _fake(real.detach(), mode, device)
                        is_parameter = isinstance(real, torch.nn.Parameter)
                        fakes[id(real)] = torch.nn.Parameter(fake, requires_grad=real.requires_grad) if is_parameter else fake
                    swapped.append((slots, name, real))
                    slots[name] = fakes[id(real)]
        yield
    finally:
        for slots, name, real in swapped:
            slots[name] = real


def _exported(whole: Whole, inputs: tuple[Any, ...]) -> torch.export.ExportedProgram:
    said = io.StringIO()  # on failure torch prints the whole partial graph: the error below says what matters
    shapes = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = shapes.level
    shapes.setLevel(logging.ERROR)
    try:
        with torch.enable_grad(), observed(), contextlib.redirect_stderr(said):
            exported = torch.export.export(whole, inputs, strict=False)
    except ZbfxError:
        raise
    except Exception as error:
        raise TraceError(explain(error)) from error
    finally:
        shapes.setLevel(level)
    sys.stderr.write(said.getvalue())
    return exported
