"""Random numbers that do not depend on who draws them: each operator has a stream of its own.

A stream is named by the seed, the step, the microbatch and the operator's place in the unsplit model, so that dropout masks
are the same whatever the stages, ranks and schedule, and the same again when an operator is computed a second time.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch

_lock = threading.Lock()  # of torch's default generators, which the ranks of one process share


class Random:
    """The source of one microbatch of one step; calling it runs an operator on the stream of its place."""

    def __init__(self, seed: int, step: int, mb: int, device: torch.device) -> None:
        self.key = (seed, step, mb)
        self.device = device

    def __call__(self, place: tuple[int, int], op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """op(*args, **kwargs) with the stream of `place`; torch's own generators are left as they were."""
        seed = stream(*self.key, *place)
        if takes_generator(op):
            generator = torch.Generator(self.device)
            generator.manual_seed(seed)
            return op(*args, **{**kwargs, "generator": generator})
        with _lock:
            default = _default_generator(self.device)
            before = default.get_state()
            default.manual_seed(seed)
            try:
                return op(*args, **kwargs)
            finally:
                default.set_state(before)


def stream(*key: int) -> int:
    """A 63-bit seed that depends on every number of the key."""
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def takes_generator(op: Any) -> bool:
    """True if the operator has a generator argument."""
    return any(a.name == "generator" for a in op._schema.arguments)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator
