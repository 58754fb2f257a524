"""A target: what the command line compiles and runs, named as `file.py:function` or `module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from zbfx.errors import InputError
from zbfx.holdings import Init
from zbfx.trace.whole import Loss

Batch = tuple[Sequence[Any], Mapping[str, Any], Any]  # args, kwargs, target of one step
_FORMS = "write file.py:function or module:function, such as examples/gpt2.py:tiny"


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A model with what it takes to compile and train it. Only the model and example inputs (or kwargs) are needed.

    example_inputs, example_kwargs, example_target, loss, shared, init: as in zbfx.compile. batches: called once per process,
    gives (args, kwargs, target) for every step, the same on all ranks; without it each step trains on the example.
    optimizer: fn(parameters) -> optimizer; AdamW(lr=1e-3) without it.
    """

    model: torch.nn.Module
    example_inputs: Sequence[Any] = ()
    example_kwargs: Mapping[str, Any] = field(default_factory=dict)
    example_target: Any = None
    loss: Loss | None = None
    shared: Sequence[str] = ()
    init: Init | None = None
    batches: Callable[[], Iterable[Batch]] | None = None
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None

    @property
    def example(self) -> Batch:
        """The example as a batch."""
        return self.example_inputs, self.example_kwargs, self.example_target

    def steps(self) -> Iterator[Batch]:
        """A batch for every step; without `batches` the example, again and again."""
        if self.batches is not None:
            yield from self.batches()
            return
        while True:
            yield self.example


def load_target(spec: str) -> Target:
    """Import and call what `spec` names. Raises InputError with the place of whatever went wrong in it."""
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        raise InputError(f"{spec!r} is no target: {_FORMS}")
    module = _load_file(spec, Path(module_name)) if module_name.endswith(".py") else _load_module(spec, module_name)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{spec}: {module_name} defines no function {name!r}; {_functions(module)}")
    try:
        made = function()
    except Exception as error:
        raise InputError(f"{spec}: the function raised {_describe(error)}") from error
    return _as_target(spec, made)


def _load_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{spec}: no such file: {path}")
    sys.path.insert(0, str(path.parent.resolve()))  # as `python file.py` would: it may import its neighbours
    module_spec = importlib.util.spec_from_file_location(f"zbfx_target_{path.stem}", path.resolve())
    if module_spec is None or module_spec.loader is None:
        raise InputError(f"{spec}: {path} cannot be imported")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{spec}: importing {path} raised {_describe(error)}") from error
    return module


def _load_module(spec: str, name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` would
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise InputError(f"{spec}: no module {name!r}; for a file, {_FORMS}") from error
        raise InputError(f"{spec}: importing {name} raised {_describe(error)}") from error
    except Exception as error:
        raise InputError(f"{spec}: importing {name} raised {_describe(error)}") from error


def _as_target(spec: str, made: Any) -> Target:
    if isinstance(made, Target):
        _check_model(spec, made.model)
        return made
    if not isinstance(made, tuple) or len(made) != 2:
        raise InputError(f"{spec}: returned {type(made).__name__}; return (model, example_inputs) or a zbfx.Target")
    model, inputs = made
    _check_model(spec, model)
    if isinstance(inputs, Mapping):
        return Target(model, example_kwargs=inputs)
    return Target(model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,))


def _check_model(spec: str, model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"{spec}: the model it returned is a {type(model).__name__}, not a torch.nn.Module")


def _functions(module: ModuleType) -> str:
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__ and n[0] != "_"]
    return f"it defines {', '.join(own)}" if own else "it defines no functions"


def _describe(error: BaseException) -> str:
    """`ValueError: what (file.py:12)`: the innermost line of the user's own code, not of a library's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and "importlib" not in f.filename]
    own = [f for f in frames if "site-packages" not in f.filename] or frames
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError):
        place = f" ({Path(error.filename or '?').name}:{error.lineno})"
        return f"SyntaxError: {error.msg}{place}"
    return f"{type(error).__name__}: {error}{place}"
