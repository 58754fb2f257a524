"""What the schedulers search over: placement, microbatches and costs as flat lists, one entry per *node*.

A microbatch visits 2S nodes in a row: F of stage 0..S-1 are nodes 0..S-1, B of stage S-1..0 are nodes S..2S-1. Each node
runs its
microbatches in order, so a rank's order of F and B is a *word*: a list of node numbers. W floats: it follows its B and
feeds nobody.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbfx.errors import InputError, MemoryBudgetError
from zbfx.ir import Action, CostModel, Schedule
from zbfx.passes.simulate import hop_seconds
from zbfx.text import format_bytes

INF = float("inf")
Word = list[int]  # nodes of one rank, in order
Full = list[tuple[int, int]]  # (stage, 0 for F, 1 for B, 2 for a part of W) of one rank, in order


@dataclass(frozen=True, slots=True)
class Problem:
    """One instance. Per node: rank, stage, seconds, hop (seconds to the next node), memory (bytes that it adds).

    room is the limit of each rank less the largest temporary; `reserve[f]` are the bytes of the later Fs of a microbatch
    on the rank
    of node f: an F may run only where they still fit, or the oldest microbatch could get stuck.
    """

    placement: tuple[int, ...]
    microbatches: int
    parts: int
    rank: tuple[int, ...]
    stage: tuple[int, ...]
    seconds: tuple[float, ...]
    hop: tuple[float, ...]
    memory: tuple[float, ...]
    w_seconds: tuple[float, ...]  # of one part
    w_memory: tuple[float, ...]  # bytes that one part gives back
    room: tuple[float, ...]
    reserve: tuple[float, ...]
    nodes: tuple[tuple[int, ...], ...]  # of each rank, ascending
    before: tuple[int, ...]  # the previous node on the same rank, -1 for none

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline: half the nodes."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.nodes)

    @property
    def work(self) -> tuple[float, ...]:
        """Seconds of work of each rank."""
        m, stages = self.microbatches, range(self.num_stages)
        whole = [sum(self.seconds[v] for v in nodes) for nodes in self.nodes]
        for s in stages:
            whole[self.placement[s]] += self.parts * self.w_seconds[s]
        return tuple(m * x for x in whole)


def build_problem(placement: Sequence[int], microbatches: int, costs: CostModel, *, parts: int = 1) -> Problem:
    """Checks the arguments and flattens them. A rank's limit that not even one microbatch fits is refused here."""
    placement = tuple(placement)
    check_placement(placement, microbatches, costs, parts)
    stages = len(placement)
    stage = (*range(stages), *reversed(range(stages)))
    rank = tuple(placement[s] for s in stage)
    p = len(costs.limit)
    nodes = tuple(tuple(v for v in range(2 * stages) if rank[v] == r) for r in range(p))
    hop = tuple(hop_seconds(costs, min(stage[v], stage[v + 1]), rank[v], rank[v + 1]) for v in range(2 * stages - 1))
    held = [_reserved(costs, s) for s in range(stages)]
    memory = tuple(held[s][0] for s in range(stages)) + tuple(held[s][1] for s in reversed(range(stages)))
    problem = Problem(
        placement=placement,
        microbatches=microbatches,
        parts=parts,
        rank=rank,
        stage=stage,
        seconds=tuple(costs.stages[s].F if v < stages else costs.stages[s].B for v, s in enumerate(stage)),
        hop=(*hop, 0.0),
        memory=memory,
        w_seconds=tuple(cost.W / parts for cost in costs.stages),
        w_memory=tuple(h[2] / parts for h in held),
        room=tuple(_room(costs, placement, r) for r in range(p)),
        reserve=_reserve(nodes, memory, stages),
        nodes=nodes,
        before=_before(nodes, 2 * stages),
    )
    _refuse_small_limits(problem, costs)
    _refuse_growth(problem, costs)
    return problem


def without_reserves(placement: Sequence[int], costs: CostModel) -> CostModel:
    """The costs with no limit on ranks where a B or W adds bytes: a problem keeps room for these from F on, which a schedule need
    not, so a bound that counts them would not hold."""
    rising = {placement[s] for s, cost in enumerate(costs.stages) if cost.bytes_B > 0 or cost.bytes_W > 0}
    return replace(costs, limit=tuple(None if r in rising else limit for r, limit in enumerate(costs.limit)))


def smallest_limits(placement: Sequence[int], costs: CostModel) -> tuple[int, ...]:
    """Bytes that each rank needs at least, for any schedule: one microbatch's Fs, then its Bs, each followed by its W at
    once."""
    needs = []
    for r in range(1 + max(placement)):
        own = [s for s, home in enumerate(placement) if home == r]
        held, peak = 0, 0
        for s in own:
            peak = max(peak, held + costs.stages[s].peak_F, held + costs.stages[s].bytes_F)
            held += costs.stages[s].bytes_F
        for s in reversed(own):
            cost = costs.stages[s]
            peak = max(peak, held + cost.peak_B, held + cost.bytes_B, held + cost.bytes_B + cost.peak_W)
            held += cost.bytes_B + cost.bytes_W
        needs.append(peak)
    return tuple(needs)


def check_placement(placement: Sequence[int], microbatches: int, costs: CostModel, parts: int) -> None:
    """Raises InputError where placement, microbatches, parts and costs do not fit together."""
    ranks = len(costs.limit)
    if len(placement) != len(costs.stages) or sorted(set(placement)) != list(range(ranks)):
        raise InputError(
            f"placement={list(placement)} must give each of the {len(costs.stages)} stages one of the {ranks} ranks"
            f" 0..{ranks - 1}, and each rank at least one stage"
        )
    if microbatches < 1 or parts < 1:
        raise InputError(f"{microbatches=}, w_parts={parts}: both must be at least 1")


def to_schedule(problem: Problem, ranks: Sequence[Full], name: str) -> Schedule:
    """(stage, kind) words of all ranks -> Schedule; microbatches and parts are counted up in order."""
    return Schedule(problem.placement, tuple(tuple(_number(word, problem.parts)) for word in ranks), name)


def _number(word: Full, parts: int) -> list[Action]:
    count: dict[tuple[int, int], int] = {}
    actions = []
    for key in word:
        n = count.get(key, 0)
        count[key] = n + 1
        stage, kind = key
        if kind == 2:
            actions.append(Action(stage, "W", n // parts, n % parts if parts > 1 else None))
        else:
            actions.append(Action(stage, "F" if kind == 0 else "B", n))
    return actions


def _reserved(costs: CostModel, s: int) -> tuple[int, int, int]:
    """Bytes added by F, added by B (never positive) and given back by W: what B or W would add is reserved by F already."""
    cost = costs.stages[s]
    up_b, up_w = max(cost.bytes_B, 0), max(cost.bytes_W, 0)
    return max(cost.bytes_F, 0) + up_b + up_w, min(cost.bytes_B, 0), max(-cost.bytes_W, 0)


def _room(costs: CostModel, placement: Sequence[int], rank: int) -> float:
    limit = costs.limit[rank]
    if limit is None:
        return INF
    own = [costs.stages[s] for s, home in enumerate(placement) if home == rank]
    over = [
        peak - max(change, 0)
        for c in own
        for peak, change in ((c.peak_F, c.bytes_F), (c.peak_B, c.bytes_B), (c.peak_W, c.bytes_W))
    ]
    return limit - max(0, *over)


def _reserve(nodes: Sequence[Sequence[int]], memory: Sequence[float], stages: int) -> tuple[float, ...]:
    reserve = [0.0] * (2 * stages)
    for own in nodes:
        later = 0.0
        for v in reversed([v for v in own if v < stages]):
            reserve[v] = later
            later += memory[v]
    return tuple(reserve)


def _before(nodes: Sequence[Sequence[int]], count: int) -> tuple[int, ...]:
    before = [-1] * count
    for own in nodes:
        for a, b in itertools.pairwise(own):
            before[b] = a
    return tuple(before)


def _refuse_small_limits(problem: Problem, costs: CostModel) -> None:
    stages = problem.num_stages
    short = [r for r, own in enumerate(problem.nodes) if sum(problem.memory[v] for v in own if v < stages) > problem.room[r]]
    if not short:
        return
    needs = smallest_limits(problem.placement, costs)
    taken = [costs.limit[r] or 0 for r in short]
    if all(limit >= needs[r] for r, limit in zip(short, taken, strict=True)):
        needs = tuple(
            int(sum(problem.memory[v] for v in own if v < stages) + (costs.limit[r] or 0) - problem.room[r]) if r in short else 0
            for r, own in enumerate(problem.nodes)
        )
    listed = ", ".join(f"rank {r}: {needs[r]} bytes ({format_bytes(needs[r])}), its limit is {costs.limit[r]}" for r in short)
    raise MemoryBudgetError(
        f"no schedule fits: one microbatch alone needs more than the limit. The smallest that would do: {listed}"
    )


def _refuse_growth(problem: Problem, costs: CostModel) -> None:
    """A rank whose F, B and W together leave bytes behind holds more with every microbatch: all of them must fit."""
    listed = []
    for r, own in enumerate(problem.nodes):
        stages = [s for s, home in enumerate(problem.placement) if home == r]
        left = sum(problem.memory[v] for v in own) - problem.parts * sum(problem.w_memory[s] for s in stages)
        once = sum(problem.memory[v] for v in own if v < problem.num_stages)
        limit = costs.limit[r] or 0
        need = int(max(0.0, left) * (problem.microbatches - 1) + once + limit - min(problem.room[r], limit))
        if left > 0 and costs.limit[r] is not None and need > limit:
            listed.append(f"rank {r}: {need} bytes ({format_bytes(need)}), its limit is {costs.limit[r]}")
    if listed:
        raise MemoryBudgetError(
            "no schedule fits: the bytes of F, B and W do not add up to 0, so each microbatch leaves some behind. The smallest "
            f"limit that would do for {problem.microbatches} microbatches: {', '.join(listed)}"
        )
