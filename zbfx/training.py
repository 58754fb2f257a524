"""How the user wants weights to change: the optimizer, when it steps, what its gradients are scaled, clipped and checked by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from zbfx.errors import InputError
from zbfx.ir import WEIGHTS
from zbfx.runtime.inverse import Inverse
from zbfx.runtime.share import Snapshot
from zbfx.runtime.verdict import LossScale
from zbfx.runtime.versions import CORRECTIONS, PREDICT

MakeOptimizer = Callable[[list[torch.nn.Parameter]], Optimizer]
ROLLBACKS = {"exact": Snapshot, "inverse": Inverse}
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Training:
    """See zbfx.compile. optimizer(parameters) makes any torch optimizer. Raises InputError for what cannot be."""

    optimizer: MakeOptimizer
    weights: str = "synchronous"
    max_norm: float | None = None
    loss_scale: float | str | None = None
    rollback: str = "exact"
    masters: bool = False
    correction: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.optimizer):
            raise InputError(
                f"optimizer={self.optimizer!r}: give a function of the parameters, such as "
                "lambda params: torch.optim.AdamW(params, lr=1e-3): each rank makes its own"
            )
        for name, value, known in (
            ("weights", self.weights, WEIGHTS),
            ("rollback", self.rollback, tuple(ROLLBACKS)),
            ("correction", self.correction, (None, *CORRECTIONS, PREDICT)),
        ):
            if value not in known:
                raise InputError(f"{name}={value!r}: choose one of {', '.join(map(repr, known))}")
        if self.max_norm is not None and not self.max_norm > 0:
            raise InputError(f"max_norm={self.max_norm!r}: give a positive number, or None not to clip")
        if self.rollback != "exact" and self.weights != "post-validation":
            raise InputError(f"rollback={self.rollback!r}: with weights={self.weights!r} no step is ever taken back")
        if self.correction is not None and self.weights != "2bw":
            raise InputError(f"correction={self.correction!r} corrects 2BW's delay; weights={self.weights!r} has none")
        LossScale(self.loss_scale)

    @property
    def checked(self) -> bool:
        """Whether steps are clipped or skipped, for which all ranks must know the state of all gradients."""
        return self.max_norm is not None or self.loss_scale is not None

    @property
    def validates(self) -> bool:
        """Whether steps go ahead on what a rank knows, and are validated later."""
        return self.weights == "post-validation" and self.checked

    def has_master(self, dtype: torch.dtype) -> bool:
        """Whether a parameter of this type is stepped as a copy: in float32 for a half-precision one, and where the versions that
        run are not the weights."""
        return (self.masters and dtype in _HALF) or self.correction == PREDICT

    def master_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type of that copy, or of the parameter where there is none."""
        return torch.float32 if dtype in _HALF and self.has_master(dtype) else dtype


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that a rank holds from step to step: parameters (a 2BW stage's two versions), float32 masters, gradients,
    the optimizer's state, and what an exact rollback keeps."""

    parameters: int
    gradients: int
    masters: int = 0
    state: int = 0
    rollback: int = 0
    others: int = 0  # buffers, constants

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.masters + self.state + self.rollback + self.others


def resident_bytes(
    trained: Sequence[torch.Tensor],
    frozen: int,
    gradients: Sequence[torch.Tensor],
    others: int,
    training: Training | None,
    knows: bool = False,
    overlap: bool = False,
) -> Resident:
    """What a rank holds: trained parameters (each once), bytes of frozen ones, parameters once per gradient that is gathered
    (a tied one gathers several), bytes of buffers and constants. knows: never takes a step back. overlap: gradients of
    two 2BW steps may be held at once, one complete, one on its way. Tensors may be fake."""
    parameters = sum(p.nbytes for p in trained) + frozen
    if training is None:
        return Resident(parameters, sum(p.nbytes for p in gradients), others=others)
    grads = sum(_stepped_bytes(p, training) for p in gradients)
    masters = sum(_stepped_bytes(p, training) for p in trained if training.has_master(p.dtype))
    state = sum(state_bytes(training, p)[0] for p in trained)
    versions = sum(p.nbytes for p in trained) if training.weights == "2bw" else 0
    late = sum(_stepped_bytes(p, training) for p in trained) if training.weights == "2bw" and (training.checked or overlap) else 0
    kept = training.validates and training.rollback == "exact" and not knows
    rollback = state + sum(_stepped_bytes(p, training) * (1 + state_bytes(training, p)[1]) for p in trained) if kept else 0
    return Resident(parameters + versions, grads + late, masters, state, rollback, others)


def _stepped_bytes(parameter: torch.Tensor, training: Training) -> int:
    return parameter.numel() * training.master_dtype(parameter.dtype).itemsize


_known: dict[tuple[Any, ...], tuple[int, bool]] = {}


def state_bytes(training: Training, parameter: torch.Tensor) -> tuple[int, bool]:
    """Bytes of what the user's optimizer keeps for a parameter, and whether it writes into the gradient: found by a step of it
    on a blank parameter of the same shape."""
    dtype = training.master_dtype(parameter.dtype)
    key = (training.optimizer, tuple(parameter.shape), dtype)
    if key not in _known:
        _known[key] = _probed(training, tuple(parameter.shape), dtype)
    return _known[key]


def _probed(training: Training, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, bool]:
    for device in ("meta", "cpu"):  # some optimizers read numbers off their parameters, which meta tensors have none of
        blank = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        blank.grad = torch.zeros_like(blank)
        before = blank.grad._version
        try:
            optimizer = training.optimizer([blank])
            optimizer.step()
        except Exception as error:
            if device == "cpu":
                raise InputError(
                    f"the optimizer cannot step a single parameter of shape {list(shape)}, as each rank must be able to: "
                    f"{type(error).__name__}: {error}"
                ) from error
            continue
        kept = pytree.tree_leaves(dict(optimizer.state.get(blank, {})))
        return sum(v.nbytes for v in kept if isinstance(v, torch.Tensor)), blank.grad._version != before
    return 0, False
