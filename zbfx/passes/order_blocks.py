"""Blocks of consecutive stages on one rank, scheduled as one stage: fewer letters to search, the same timeline.

merge_blocks(placement, costs) -> (placement', costs', size); split_blocks(schedule', placement, size) -> schedule. A rank with
several stages in a row gains nothing by pausing between them: the message leaves after the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zbfx.ir import Action, Cost, CostModel, Schedule


def merge_blocks(placement: Sequence[int], costs: CostModel) -> tuple[tuple[int, ...], CostModel, int]:
    """Merges every `size` stages into one, for the largest size at which all blocks lie on one rank each and each rank
    keeps one."""
    stages, ranks = len(placement), len(set(placement))
    for size in range(stages // max(ranks, 1), 1, -1):
        blocks = [placement[k : k + size] for k in range(0, stages, size)]
        if stages % size == 0 and all(len(set(block)) == 1 for block in blocks):
            merged = tuple(_merge(costs.stages[k : k + size]) for k in range(0, stages, size))
            edges = costs.edge_bytes[size - 1 :: size]
            return tuple(block[0] for block in blocks), replace(costs, stages=merged, edge_bytes=edges), size
    return tuple(placement), costs, 1


def split_blocks(schedule: Schedule, placement: Sequence[int], size: int) -> Schedule:
    """Each action of a merged stage becomes its stages' actions: F first to last, B and W last to first."""
    if size == 1:
        return schedule
    ranks = []
    for actions in schedule.ranks:
        rank: list[Action] = []
        for a in actions:
            within = range(size) if a.kind == "F" else range(size - 1, -1, -1)
            rank += [Action(a.stage * size + k, a.kind, a.mb, a.part) for k in within]
        ranks.append(tuple(rank))
    return Schedule(tuple(placement), tuple(ranks), schedule.name)


def _merge(block: Sequence[Cost]) -> Cost:
    """Seconds and bytes add up; the temporaries are those of the stage at which the block stands highest."""
    last_first = list(reversed(block))
    return Cost(
        F=sum(c.F for c in block),
        B=sum(c.B for c in block),
        W=sum(c.W for c in block),
        bytes_F=sum(c.bytes_F for c in block),
        bytes_B=sum(c.bytes_B for c in block),
        bytes_W=sum(c.bytes_W for c in block),
        peak_F=_highest([(c.peak_F, c.bytes_F) for c in block]),
        peak_B=_highest([(c.peak_B, c.bytes_B) for c in last_first]),
        peak_W=_highest([(c.peak_W, c.bytes_W) for c in last_first]),
    )


def _highest(steps: Sequence[tuple[int, int]]) -> int:
    """Largest bytes above the start while the steps, (temporary, change) each, follow one another."""
    held = highest = 0
    for temporary, change in steps:
        highest = max(highest, held + temporary, held + change)
        held += change
    return highest
