"""Where to cut a line of weighted nodes so that the slowest piece is as fast as can be: the optimum, not a greedy walk.

A piece from cut i to cut j costs load(i, j) = work between them + crossing[i] + crossing[j]. With P the prefix sums of the
work, load(i, j) <= t is P[j] + crossing[j] - t <= P[i] - crossing[i]: a bound on t is checked for all j at once with a
running maximum, so the optimum takes O(cuts * pieces) per probe.
"""

from __future__ import annotations

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
    size = len(left)
    fence_before = [0] * size
    last = 0
    for j in range(size):
        fence_before[j] = last
        if j in fences:
            last = j
    cost = {0: 0.0}
    back: list[dict[int, int]] = []
    for k in range(1, pieces + 1):
        now: dict[int, float] = {}
        came: dict[int, int] = {}
        starts = sorted(cost)
        for j in (j for j in range(size) if reach[k][j]):
            options = [i for i in starts if fence_before[j] <= i < j and right[j] - bound <= left[i]]
            if options:
                came[j] = min(options, key=lambda i: (cost[i], -i))
                now[j] = cost[came[j]] + cross[j]
        cost = now
        back.append(came)
    cuts = [size - 1]
    for came in reversed(back):
        cuts.append(came[cuts[-1]])
    return tuple(reversed(cuts[1:-1]))
