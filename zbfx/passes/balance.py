"""Where to cut a line of weighted nodes so that the slowest piece is as fast as can be: the optimum, not a greedy walk.

A piece from cut i to cut j costs load(i, j) = work between them + crossing[i] + crossing[j]. With P the prefix sums of the
work, load(i, j) <= t is P[j] + crossing[j] - t <= P[i] - crossing[i]: a bound on t is checked for all j at once with a
running maximum, so the optimum takes O(cuts * pieces) per probe, and the cheapest of the optima O(cuts * log(cuts) * pieces).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import torch

from zbfx.errors import PartitionError


def best_cuts(
    work: Sequence[float],
    crossing: Sequence[float],
    allowed: Sequence[bool],
    pieces: int,
    *,
    pinned: Sequence[int] = (),
) -> tuple[int, ...]:
    """Positions of the pieces - 1 cuts with the smallest largest load; among those, the smallest sum of crossing.

    work[n] is node n's seconds; a cut at position c (1 <= c < len(work)) separates nodes c-1 and c; crossing[c] and allowed[c]
    are of length len(work) + 1 (ends included: crossing there is 0). Cuts at `pinned` positions are always made.
    Raises PartitionError if there are too few allowed positions.
    """
    n = len(work)
    places = [0, *[c for c in range(1, n) if allowed[c] or c in pinned], n]
    if len(places) - 1 < pieces:
        raise PartitionError(
            f"num_stages={pieces}, but the graph can be cut into at most {len(places) - 1} stages: "
            f"pass num_stages={len(places) - 1} or fewer"
        )
    prefix = torch.zeros(n + 1, dtype=torch.float64)
    prefix[1:] = torch.cumsum(torch.tensor(work, dtype=torch.float64), 0)
    index = torch.tensor(places)
    cross = torch.tensor(crossing, dtype=torch.float64)[index]
    left = prefix[index] - cross  # what a piece's left end gives
    right = prefix[index] + cross  # what its right end takes
    fences = [i for i, c in enumerate(places) if c in pinned]
    bound = _smallest_bound(left, right, pieces, fences)
    chosen = _cheapest(left, right, cross.tolist(), bound, pieces, fences)
    return tuple(places[i] for i in chosen)


def _reachable(left: torch.Tensor, right: torch.Tensor, bound: float, pieces: int, fences: list[int]) -> list[torch.Tensor]:
    """reach[k][j]: the first k pieces can end at place j with every load <= bound."""
    size = len(left)
    reach = [torch.zeros(size, dtype=torch.bool)]
    reach[0][0] = True
    edges = [0, *fences, size - 1]
    for _ in range(pieces):
        now = torch.zeros(size, dtype=torch.bool)
        best = torch.where(reach[-1], left, torch.tensor(float("-inf"), dtype=torch.float64))
        for a, b in pairwise(edges):  # a piece lies between two neighbouring fences
            running = torch.cummax(best[a:b], 0).values
            now[a + 1 : b + 1] = running >= right[a + 1 : b + 1] - bound
        reach.append(now)
    return reach


def _smallest_bound(left: torch.Tensor, right: torch.Tensor, pieces: int, fences: list[int]) -> float:
    """The optimum to the last bits: bisection over the value of the largest load."""
    low, high = 0.0, float((right.max() - left.min()).item()) + 1.0

    def feasible(bound: float) -> bool:
        return bool(_reachable(left, right, bound, pieces, fences)[pieces][-1])

    if not feasible(high):
        raise PartitionError(
            f"num_stages={pieces} does not fit the pinned cuts: pin at most {pieces - 1} modules, at different places"
        )
    for _ in range(100):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return high


def _cheapest(
    lefts: torch.Tensor, rights: torch.Tensor, cross: list[float], bound: float, pieces: int, fences: list[int]
) -> tuple[int, ...]:
    """Among the cuts within `bound`, those with the smallest sum of crossing, by dynamic programming."""
    reach = [r.tolist() for r in _reachable(lefts, rights, bound, pieces, fences)]
    left, right = lefts.tolist(), rights.tolist()
    size, starts_anew = len(left), {f + 1 for f in fences}
    levels = sorted(set(left))
    cost = {0: 0.0}
    back: list[dict[int, int]] = []
    for k in range(1, pieces + 1):
        now: dict[int, float] = {}
        came: dict[int, int] = {}
        open_ = _Cheapest(levels)
        for j in range(1, size):  # a piece ends at j and starts at i < j, no fence between them
            if j in starts_anew:
                open_ = _Cheapest(levels)
            if j - 1 in cost:
                open_.add(left[j - 1], cost[j - 1], j - 1)
            found = open_.find(right[j] - bound) if reach[k][j] else None
            if found is not None:
                now[j], came[j] = found[0] + cross[j], -found[1]
        cost = now
        back.append(came)
    cuts = [size - 1]
    for came in reversed(back):
        cuts.append(came[cuts[-1]])
    return tuple(reversed(cuts[1:-1]))


class _Cheapest:
    """Places by level: the cheapest (the later of equals) among those at or above one, in O(log n): a Fenwick tree of minima."""

    def __init__(self, levels: Sequence[float]) -> None:
        self.levels = levels
        self.best: list[tuple[float, int] | None] = [None] * (len(levels) + 1)

    def add(self, level: float, cost: float, place: int) -> None:
        """`level` is one of `levels`."""
        at = len(self.levels) - bisect_left(self.levels, level)  # 1 for the highest
        while at < len(self.best):
            now = self.best[at]
            self.best[at] = (cost, -place) if now is None else min(now, (cost, -place))
            at += at & -at

    def find(self, level: float) -> tuple[float, int] | None:
        """(cost, -place)."""
        at = len(self.levels) - bisect_left(self.levels, level)
        found: tuple[float, int] | None = None
        while at:
            here = self.best[at]
            if here is not None and (found is None or here < found):
                found = here
            at -= at & -at
        return found
