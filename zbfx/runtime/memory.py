"""Exact bytes of what a step creates: counted by storage, from creation to death.

What is counted. A storage, when it first appears as the storage of a tensor that an operator returns on this thread while
the step runs, and when `post` allocates it for a message; never one that existed before the step (parameters, buffers,
constants, inputs, weights of microbatches, gradients: the static set), whatever views of them operators return. Its bytes
are `untyped_storage().nbytes()`: what was asked for, before any allocator rounds it up, and for a view the whole storage
that the view keeps alive. Many tensors on one storage count once.

When. From the return of the operator (from `post`, for buffers) to the death of the last tensor on it: the program's
`del`, or the channel's `sent` for what is being sent, whichever is later. What `accumulate` takes as a first gradient
turns static at that moment and counts no more. `loss` copies the loss into a static buffer, so a loss dies like any tensor.

Peak. The largest `current` at any moment, and `current` grows only at the return of an operator and at a `post`; at the
return of an operator its outputs are alive, and so are its arguments and all that the frames above it hold: values in the
local variables of `step` and of the stage function, and the arguments of the call under way.
`held` has `current` at each `begin`.

What is not counted: workspaces inside a kernel, and tensors that a composite kernel makes and frees below the
dispatcher's Python level; tensors on the meta device; what the channel allocates for itself (none does on CPU).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Counts the storages of one rank's step, in its thread. `current`, `peak`: bytes; held: (action, bytes at its begin)."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()  # a storage may die in another thread, and in the middle of anything
        self.reset(())

    def reset(self, static: Iterable[Tensor]) -> None:
        """Forget everything; `static` tensors exist already."""
        self.current = self.peak = 0
        self.held: list[tuple[str, int]] = []
        self._paused = False
        # Storages by address; a static one is held here, so that its address cannot become another's.
        self._static = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in static)}
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def release(self) -> None:
        """The step is over: the figures stay, no storage is watched or held any more."""
        self._static, self._alive = {}, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            self.count(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operators that run within are not looked at."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that have just come to be; the new storages among them are counted."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            with self._lock:
                if storage._cdata not in self._static and storage._cdata not in self._alive:
                    self._add(storage)
        self.peak = max(self.peak, self.current)

    def begin(self, action: str) -> None:
        """An action begins."""
        self.held.append((action, self.current))

    def keep(self, tensor: Tensor) -> None:
        """The tensor's storage is static from now on."""
        storage = tensor.untyped_storage()
        with self._lock:
            self._drop(storage._cdata)
            self._static[storage._cdata] = storage

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        myself = weakref.ref(self)

        def died(reference: weakref.ref[torch.UntypedStorage]) -> None:
            memory = myself()
            if memory is not None:
                memory._died(key, reference)

        self._alive[key] = (weakref.ref(storage, died), nbytes)
        self.current += nbytes

    def _died(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        with self._lock:
            entry = self._alive.get(key)
            if entry is not None and entry[0] is reference:  # not one of an earlier step
                self._drop(key)

    def _drop(self, key: int) -> None:
        entry = self._alive.pop(key, None)
        if entry is not None:
            self.current -= entry[1]
