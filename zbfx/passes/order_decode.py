"""What the two decoders share. A decoder turns an order of F and B into a whole schedule: `follow` (order_follow) keeps a
given word per rank, `dispatch` (order_dispatch) decides as time goes by.

Both place the Ws: where the next F or B is not ready for long enough, where memory holds an F back, and at the end. Both
never let a rank hold more than its room. They return the span and the makespan in seconds, and the ranks' full words when asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbfx.passes.order_problem import INF, Full, Problem

EPS = 1e-9


@dataclass(frozen=True, slots=True)
class Rules:
    """How W and idle time are treated. Times are in units of the W or of the action concerned.

    fill: run a W when the gap is at least fill * W long (1: never delay; 0: whenever there is a gap); fill_end: the same once a
    rank has no F left. ahead_f, ahead_b: `follow` may pull a ready F (only before the first B, or always) or B into a gap.
    guard: `follow` keeps room for the oldest microbatch. lead, patience, w_first: `dispatch` waits for an action that is more
    urgent by `lead` seconds of key if it comes within patience * the other's time; frees memory by a W if the F held
    back is more urgent by `w_first`; keeps room for `spare` activations for the last F stage of a rank (where the other stages
    may fill the memory to the brim, each of the first Bs has to come back before the F that the next B needs can run).
    """

    fill: float = 0.6
    fill_end: float = 1.0
    ahead_f: int = 0  # 0 never, 1 before the first B of the rank, 2 always
    ahead_b: bool = True
    guard: bool = False
    lead: float = 0.0
    patience: float = 0.0
    w_first: float = 0.0
    spare: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a decoder found: seconds of span and makespan (infinite: it got stuck), and the full words where they were kept."""

    span: float
    makespan: float
    words: tuple[Full, ...] = ()
    letters: int = 0  # Fs and Bs decoded: fewer than all where it stopped early
    period: float = 0.0  # seconds between microbatches in the second half

    def cost(self, objective: str) -> tuple[float, float]:
        """The objective first, the other of the two to break ties."""
        return (self.span, self.makespan) if objective == "span" else (self.makespan, self.span)


@dataclass(frozen=True, slots=True)
class Cutoff:
    """A decoder gives up once a rank has idled so long that the objective must exceed `seconds`."""

    seconds: float = INF
    from_zero: bool = False  # the objective is the makespan: waiting for the first action counts too

    def slack(self, problem: Problem) -> list[float]:
        """Seconds that each rank may idle."""
        return [self.seconds * (1 + 1e-12) + EPS - work for work in problem.work]


NO_CUTOFF = Cutoff()


def settled_period(ends: Sequence[float], microbatches: int) -> float:
    """Seconds from one microbatch to the next, once the start has passed and before the end begins; ends: of the last node."""
    a, b = microbatches // 2, microbatches * 4 // 5
    return (ends[b] - ends[a]) / (b - a) if b > a else 0.0


def fits(problem: Problem, forwards: Sequence[int], count: Sequence[int], v: int, free: float, guard: bool) -> bool:
    """Whether F node v fits into `free` bytes; with guard, so that the oldest microbatch on the rank can still run its
    later Fs."""
    free -= problem.memory[v]
    if free < 0:
        return False
    if not guard or free >= problem.reserve[v]:
        return True
    oldest = count[forwards[-1]]
    if oldest >= count[v]:
        return False  # v itself belongs to the oldest, and its own later Fs would not fit
    last_done = forwards[0]
    for x in forwards:
        if count[x] <= oldest:
            break
        last_done = x
    return free >= problem.reserve[last_done]
