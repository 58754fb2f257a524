"""zbfx: a pipeline-parallel compiler. `zbfx.compile(model, num_stages)` returns a Pipeline that trains the model."""

from zbfx.errors import (
    InputError,
    MemoryBudgetError,
    PartitionError,
    PlanError,
    RankError,
    ScheduleError,
    TraceError,
    VerifyError,
    ZbfxError,
)
from zbfx.pipeline import Pipeline, compile, load
from zbfx.plan import Plan
from zbfx.target import Target

__version__ = "0.1.0"

__all__ = [
    "InputError",
    "MemoryBudgetError",
    "PartitionError",
    "Pipeline",
    "Plan",
    "PlanError",
    "RankError",
    "ScheduleError",
    "Target",
    "TraceError",
    "VerifyError",
    "ZbfxError",
    "compile",
    "load",
]
