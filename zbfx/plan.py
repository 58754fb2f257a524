"""Plan: everything the compiler decided, open to the reader; and its way to disk and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zbfx.codegen.folder import Folder, read_folder, write_folder
from zbfx.codegen.folder import field as read_field
from zbfx.errors import PlanError
from zbfx.ir import WEIGHTS, CostModel, Program, Schedule, Solution, Stage, Timeline, Value
from zbfx.passes.simulate import simulate
from zbfx.text import (
    costs_from_json,
    format_bytes,
    format_prediction,
    num_parts,
    parse_fields,
    schedule_from_json,
    schedule_to_csv,
    schedule_to_json,
    solution_facts,
)


@dataclass(frozen=True, slots=True, eq=False)
class StoredStage:
    """A stage read back from a plan folder: its functions are in the rank file's text, not graphs. See ir.Stage."""

    index: int
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
    `costs.limit` (activations) has already been reduced by. solution: of a searched schedule, its lower bound, its gap to it
    and why it was chosen.
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
    results: tuple[Value, ...]  # what the last stage gives for one microbatch: the loss, or the model's outputs
    template: Any = None  # to predict: see ir.Captured
    history: tuple[tuple[str, Any], ...] = ()
    parameter_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of a plan that was read from a folder
    solution: Solution | None = None
    weights: str = ""  # when the programs change the weights (ir.WEIGHTS); empty: they do not
    period: float = 0.0  # predicted seconds from one step's start to the next

    @property
    def owners(self) -> dict[str, int]:
        """The user's name of each parameter -> its (first) stage."""
        return {name: s.index for s in reversed(self.stages) for name in s.names}

    @property
    def differentiates(self) -> bool:
        """True for a training step, False for forward only."""
        return any(s.gparams for s in self.stages)

    @property
    def has_no_barrier(self) -> bool:
        """Whether a step begins on one rank while the last one still runs on another."""
        return self.weights not in ("", "synchronous")

    def save(self, folder: str | Path) -> Path:
        """Write the plan folder: plan.json, schedule.json, schedule.csv, rank_*.py and, if there are any, constants.safetensors.

        `zbfx.load(folder, model)` runs it; an edited rank file runs as edited. Raises PlanError.
        """
        path = Path(folder)
        facts = {} if self.solution is None else solution_facts(self.solution)
        schedule = schedule_to_json(self.schedule, self.costs, **facts)
        sources = [p.source for p in self.programs]
        write_folder(path, Folder(self._manifest(), schedule, schedule_to_csv(self.schedule), sources, self.constants))
        return path

    def _manifest(self) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "device": self.device.type,
            "ranks": len(self.programs),
            "microbatches": self.microbatches,
            "reduction": self.reduction,
            "training": self.training,
            "weights": self.weights,
            "period": self.period,
            "stages": [
                {
                    "parameters": list(s.names),
                    "gradients": list(s.gparams),
                    "buffers": list(s.buffers),
                    "constants": list(s.constants),
                    "inputs": list(s.leaves),
                }
                for s in self.stages
            ],
            "parameter_shapes": self._parameter_shapes(),
            "inputs": dict(self.leaves),
            "values": [[i, v] for i, v in self.statics.items()],
            "shapes": [[i, list(shape), dtype] for i, (shape, dtype) in self.shapes.items()],
            "constants": sorted(self.constants),
            "loss": str(self.results[0].dtype).removeprefix("torch."),
            "static_bytes": list(self.static_bytes),
            "peak_bytes": [p.peak for p in self.programs],
        }

    def _parameter_shapes(self) -> dict[str, list[int]]:
        if self.parameter_shapes:
            return {name: list(shape) for name, shape in self.parameter_shapes.items()}
        graphs = [s for s in self.stages if isinstance(s, Stage)]
        return {n: list(s.F.value(p).shape) for s in graphs for n, p in zip(s.names, s.F.takes["p"], strict=False)}

    def __str__(self) -> str:
        peak = max((p.peak for p in self.programs), default=0)
        predicted = format_prediction(self.timeline, self.solution, self.period if self.has_no_barrier else None)
        weights = f", {self.weights} weights" if self.weights else ""
        return (
            f"Plan: {len(self.stages)} stages on {len(self.programs)} ranks, {self.schedule.name}, {self.microbatches} "
            f"microbatches{weights}; predicted {predicted}, peak {format_bytes(peak)} of activations"
        )


def load_plan(folder: Path) -> Plan:
    """Read a plan folder. Raises PlanError, ScheduleError."""
    content = read_folder(folder)
    data, where = content.manifest, str(folder / "plan.json")
    schedule = schedule_from_json(content.schedule, str(folder / "schedule.json"))
    costs = costs_from_json(content.schedule, str(folder / "schedule.json"))
    if costs is None:
        raise PlanError(f"{folder / 'schedule.json'}: has no costs: save the plan again")
    peaks = read_field(data, "peak_bytes", list, where)
    if len(schedule.ranks) != len(content.sources) or len(peaks) != len(content.sources):
        raise PlanError(f"{where}: {len(content.sources)} ranks, but the schedule has {len(schedule.ranks)}")
    programs = tuple(
        Program(r, (), source=text, path=str(folder / f"rank_{r}.py"), peak=int(peaks[r]))
        for r, text in enumerate(content.sources)
    )
    missing = [c for c in read_field(data, "constants", list, where) if c not in content.constants]
    if missing:
        raise PlanError(f"{folder / 'constants.safetensors'}: lacks {missing}")
    timeline = simulate(schedule, costs)
    return Plan(
        tuple(_stage(k, s, where) for k, s in enumerate(read_field(data, "stages", list, where))),
        costs,
        schedule,
        timeline,
        programs,
        torch.device(read_field(data, "device", str, where)),
        read_field(data, "microbatches", int, where),
        read_field(data, "reduction", str, where),
        read_field(data, "training", bool, where),
        read_field(data, "inputs", dict, where),
        {i: v for i, v in read_field(data, "values", list, where)},
        {i: (tuple(shape), dtype) for i, shape, dtype in read_field(data, "shapes", list, where)},
        content.constants,
        tuple(read_field(data, "static_bytes", list, where)),
        (Value("loss", _dtype(read_field(data, "loss", str, where), where), (), ()),),
        weights=_weights(data.get("weights", ""), where),
        period=float(data.get("period", 0.0)),
        parameter_shapes={n: tuple(shape) for n, shape in read_field(data, "parameter_shapes", dict, where).items()},
        solution=_solution(parse_fields(content.schedule, "schedule.json"), schedule, costs, timeline),
    )


def _solution(fields: Mapping[str, Any], schedule: Schedule, costs: CostModel, timeline: Timeline) -> Solution | None:
    """What schedule.json says of the search; None where there was none."""
    if "lower_bound" not in fields:
        return None
    where = "schedule.json"
    bounds = {n: float(read_field(fields["lower_bound"], n, (int, float), where)) for n in ("span", "makespan")}
    objective = read_field(fields, "objective", str, where)
    if objective not in bounds:
        raise PlanError(f"{where}: objective={objective!r} is neither span nor makespan: save the plan again")
    return Solution(
        schedule,
        costs,
        timeline,
        bounds["span"],
        bounds["makespan"],
        objective,
        num_parts(schedule),
        read_field(fields, "why", str, where),
        float(read_field(fields, "seconds", (int, float), where)),
    )


def _weights(mode: Any, where: str) -> str:
    if mode not in ("", *WEIGHTS):
        raise PlanError(f"{where}: weights={mode!r} is none of {', '.join(WEIGHTS)}")
    return str(mode)


def _dtype(name: str, where: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"{where}: {name!r} is no dtype of torch")
    return dtype


def _stage(index: int, data: Any, where: str) -> StoredStage:
    place = f"{where}, stage {index}"
    parts = [tuple(read_field(data, name, list, place)) for name in ("parameters", "buffers", "constants", "inputs", "gradients")]
    return StoredStage(index, *parts)
