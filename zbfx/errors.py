"""Every error a user can meet, each with the value, the place and the way out in its text."""

from __future__ import annotations


class ZbfxError(Exception):
    """Base of all errors zbfx raises on purpose."""


class TraceError(ZbfxError):
    """The model cannot be traced; names the source line and what to change."""


class PartitionError(ZbfxError):
    """The graph cannot be cut as asked (too many stages, an impossible pin)."""


class ScheduleError(ZbfxError):
    """A schedule is incomplete, out of order, deadlocks, or cannot be parsed."""


class MemoryBudgetError(ZbfxError):
    """A rank would hold more bytes than its limit; says by how much."""


class InputError(ZbfxError):
    """The arguments of compile, step or the command line do not fit."""


class PlanError(ZbfxError):
    """A plan folder is damaged, of another version, or for another model."""


class VerifyError(ZbfxError):
    """A pass produced an invalid program: a bug in zbfx or in a hand edit; shows the program around the fault."""


class RankError(ZbfxError):
    """A rank failed while running; names the rank, the action and the cause."""
