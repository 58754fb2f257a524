"""Plan: everything the compiler decided, open to the reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zbfx.ir import CostModel, Program, Schedule, Stage, Timeline


@dataclass(frozen=True, slots=True, eq=False)
class StoredStage:
    """A stage read back from a plan folder: its functions are text (the rank file's), not graphs. See ir.Stage."""

    index: int
    F: str
    B: str | None
    W: str | None
    names: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    leaves: tuple[str, ...]
    gparams: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The result of compiling for one set of input shapes.

    stages[k].F, .B, .W: printable functions with shapes and source lines (B or W is None where empty). schedule: the order
    on every rank. programs[r].source: the Python that rank r runs. timeline: the schedule simulated on `costs`. history:
    (pass name, its result) for every pass, in order. static_bytes[r]: parameters, gradients and buffers of rank r, which
    `costs.limit` (activations) has already been reduced by.
    """

    stages: tuple[Stage | StoredStage, ...]
    costs: CostModel
    schedule: Schedule
    timeline: Timeline
    programs: tuple[Program, ...]
    device: torch.device
    microbatches: int
    reduction: str
    training: bool
    leaves: Mapping[str, int]  # placeholder -> index among the flattened (args, kwargs, target)
    statics: Mapping[int, Any]  # non-tensor leaves
    shapes: Mapping[int, tuple[tuple[int, ...], str]]  # tensor leaves of one microbatch: shape, dtype
    constants: Mapping[str, torch.Tensor]
    static_bytes: tuple[int, ...]
    history: tuple[tuple[str, Any], ...] = ()

    @property
    def owners(self) -> dict[str, int]:
        """The user's parameter name -> its (first) stage."""
        return {name: s.index for s in reversed(self.stages) for name in s.names}

    def save(self, folder: str | Path) -> Path:
        """Write the plan folder: plan.json, schedule.json, schedule.csv, rank_*.py and, if there are any, constants.safetensors.

        `zbfx.load(folder, model)` runs it; an edited rank file runs as edited. Raises PlanError.
        """
        from zbfx.folder import save_plan

        return save_plan(self, Path(folder))

    def __str__(self) -> str:
        t = self.timeline
        return (
            f"Plan of {len(self.stages)} stages on {len(self.programs)} ranks, {self.schedule.name}, {self.microbatches} microbatches: "
            f"predicted bubble {t.bubble_makespan:.1%}, peak {max((p.peak for p in self.programs), default=0)} bytes of activations"
        )
