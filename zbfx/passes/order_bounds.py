"""Lower bounds on span and makespan: what no schedule can beat, for the given placement, costs and limits.

For a rank with first stage a and last stage d, in the words of this file:
- *idle_start*: the first B on the rank is B of d for microbatch 0. Between the start of F(a, 0) and it lie all Fs and Bs
  of the later
  stages; meanwhile the rank has only the Fs that fit into its memory.
- *idle_end*: the last F on the rank is F of d for the last microbatch. From its start to the end of B(a, last) lie all
  later Fs and
  Bs; meanwhile the rank has what was left to do: n Bs with their Ws, and y Ws alone, where n activations and y kept inputs
  of W fit into
  its memory together. After that B comes at least its own W.
- Through the rank of stage 0, which starts `head` before and ends `tail` after the rank: it cannot end before the last B
  has come back.
- Memory times time: each microbatch holds bytes for at least its round trip.
All of it counts hops, and takes the best case over what the memory allows, so each bound holds for every order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zbfx.passes.order_problem import INF, Problem


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds that no schedule's span, or makespan, falls below."""

    span: float
    makespan: float

    def of(self, objective: str) -> float:
        """The bound on the objective."""
        return self.span if objective == "span" else self.makespan


def lower_bounds(problem: Problem) -> Bounds:
    """The largest of the bounds above over all ranks."""
    path = _Path(problem)
    home0 = problem.placement[0]
    first_w = problem.parts * problem.w_seconds[0]
    span = makespan = path.between(0, 2 * problem.num_stages) + first_w
    for r in range(problem.num_ranks):
        rank = _rank_bound(problem, path, r)
        span = max(span, rank.own, _memory_time(problem, path, r))
        makespan = max(makespan, rank.head + rank.own)
        through = rank.head + rank.last_b + rank.tail + first_w
        makespan = max(makespan, through)
        if r != home0:
            span = max(span, through)
    return Bounds(span, max(span, makespan))


class _Path:
    """Seconds along the chain of nodes: starts[v] is when node v starts on an empty pipeline."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.starts = [0.0]
        for seconds, hop in zip(problem.seconds, problem.hop, strict=True):
            self.starts.append(self.starts[-1] + seconds + hop)

    def between(self, first: int, end: int) -> float:
        """From the start of node `first` to the end of node `end - 1`."""
        return self.starts[end - 1] + self.problem.seconds[end - 1] - self.starts[first]


@dataclass(frozen=True, slots=True)
class _Rank:
    own: float  # span of this rank
    last_b: float  # from its first start to the end of its last B
    head: float  # from the pipeline's start to its first F, at least
    tail: float  # from the end of its last B to the end of B(0, last), at least


def _rank_bound(problem: Problem, path: _Path, r: int) -> _Rank:
    own, work, m = problem.nodes[r], problem.work[r], problem.microbatches
    f_nodes = [v for v in own if v < problem.num_stages]
    a, d = f_nodes[0], f_nodes[-1]
    b_first, b_last = own[len(f_nodes)], own[-1]
    all_fit = m * sum(problem.memory[v] for v in f_nodes) <= problem.room[r]
    idle_start = max(0.0, path.starts[b_first] - path.starts[a] - _most_forward(problem, r, f_nodes))
    way_back = path.between(d, b_last + 1)
    w_of_a = problem.parts * problem.w_seconds[a]
    idle_end = after_b = INF
    for left, w_left in _left_over(problem, r, f_nodes):
        idle_end = min(idle_end, max(0.0, way_back + w_of_a - left))
        after_b = min(after_b, max(-w_left, way_back - left))
    # The two gaps lie apart unless the last F can start before the first B, which takes room for all activations.
    idle = max(idle_start, idle_end) if all_fit else idle_start + idle_end
    last_b = work + after_b + (0.0 if all_fit else idle_start)
    head = path.starts[a]
    tail = path.starts[2 * problem.num_stages - 1] + problem.seconds[-1] - path.starts[b_last] - problem.seconds[b_last]
    return _Rank(work + idle, last_b, head, tail)


def _most_forward(problem: Problem, r: int, f_nodes: list[int]) -> float:
    """Seconds of the most Fs that fit into the rank's memory."""
    m = problem.microbatches
    everything = m * sum(problem.seconds[v] for v in f_nodes)
    least, longest = min(problem.memory[v] for v in f_nodes), max(problem.seconds[v] for v in f_nodes)
    if least <= 0 or problem.room[r] == INF:
        return everything
    by_count = int(problem.room[r] / least + 1e-9) * longest
    by_bytes = problem.room[r] * max(problem.seconds[v] / problem.memory[v] for v in f_nodes)
    return min(everything, by_count, by_bytes)


def _left_over(problem: Problem, r: int, f_nodes: list[int]) -> Iterator[tuple[float, float]]:
    """(seconds left to do when the last F starts, seconds of W left when the last B ends) for each number of activations held.

    Where the rank's stages differ, the smallest bytes and the largest seconds stand for all: more is left, the bound is lower.
    """
    stages, m, room = problem.num_stages, problem.microbatches, problem.room[r]
    mine = f_nodes
    total = m * len(mine)
    b = max(problem.seconds[2 * stages - 1 - s] for s in mine)
    w = max(problem.w_seconds[s] for s in mine) * problem.parts
    held = min(problem.memory[s] for s in mine)
    kept = min(problem.w_memory[s] for s in mine) * problem.parts
    last_f = problem.seconds[mine[-1]]
    most = total if held <= 0 or room == INF else min(total, int(room / held + 1e-9))
    most_w = total if kept <= 0 or room == INF else int(room / kept * (1 + 1e-12) + 1e-9)
    if problem.parts > 1:
        most_w += 1  # Ws may be done in part: round up
    for n in range(1, most + 1):
        spare = total - n
        if kept > 0 and room < INF:
            y = (
                min(float(spare), (room - n * held) / kept)
                if problem.parts > 1
                else min(spare, int((room - n * held) / kept + 1e-9))
            )
        else:
            y = spare
        yield last_f + n * (b + w) + y * w, min(n + y, most_w) * w


def _memory_time(problem: Problem, path: _Path, r: int) -> float:
    """Bytes times seconds that all microbatches need, over the rank's bytes."""
    room = problem.room[r]
    if room == INF or room <= 0:
        return 0.0
    stages, parts, total = problem.num_stages, problem.parts, 0.0
    for s in (v for v in problem.nodes[r] if v < stages):
        back = 2 * stages - 1 - s
        kept = max(0.0, problem.memory[s] + problem.memory[back])
        total += (
            problem.memory[s] * path.between(s, back + 1)
            + min(kept, problem.w_memory[s] * parts) * problem.w_seconds[s] * (parts + 1) / 2
        )
    return problem.microbatches * total / room
