"""Fixed schedules in which a rank returns to several stages (its chunks): interleaved and V placements. Any m unless said
otherwise.

Letters as in order_fixed; v chunks a rank. An interleaved placement is 0..p-1 again and again; a V is 0..p-1 and back. On
a V, `a` is
the rank's first stage and `z` its second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from zbfx.errors import InputError, ScheduleError
from zbfx.ir import Action, Kind, Schedule
from zbfx.verify import verify_schedule

Ranks = list[list[Action]]


def order_chunked(name: str, placement: Sequence[int], microbatches: int) -> Schedule:
    """The named schedule; refuses a placement that it is not made for."""
    p = 1 + max(placement, default=-1)
    build, wanted = CHUNKED[name]
    v = len(placement) // max(p, 1)
    forth = tuple(range(p))
    shape = forth * v if wanted == "interleaved" else forth + forth[::-1]
    if tuple(placement) != shape:
        raise ScheduleError(
            f"{name} needs the {wanted} placement, found {list(placement)}: build_placement({wanted!r}, ranks) makes one"
        )
    ranks = build(p, v, microbatches)
    return verify_schedule(Schedule(tuple(placement), tuple(map(tuple, ranks)), name))


# ---------------------------------------------------------------- interleaved


def interleaved_1f1b(p: int, v: int, m: int) -> Ranks:
    """Interleaved 1F1B: groups of p microbatches go through a rank's chunks in turn; warm-up (v-1)p + 2(p-1-i) on rank i.

    Bubble (p-1)(T_F+T_B+T_W)/v where p divides m; memory ((v-1)p + 2(p-1-i) + 1)*M_B/v on rank i. Source: arXiv 2104.04473.
    """
    return _interleave(p, v, m, lambda i: 2 * (p - 1 - i), whole=True)


def interleaved_zb(p: int, v: int, m: int) -> Ranks:
    """Interleaved ZB-1p: interleaved 1F1B with B alone on the way back, half the extra warm-up, and rank i's Ws i actions late.

    Bubble (p-1)(T_F+T_B-T_W)/v where p divides m; memory ((v-1)p + p-i)*M_B/v and i*M_W/v on rank i. Source: arXiv
    2401.10241 (ZB-1p) with
    the chunks of 2104.04473.
    """
    return _interleave(p, v, m, lambda i: p - 1 - i, whole=False)


def looped_bfs(p: int, v: int, m: int) -> Ranks:
    """Breadth first: each chunk runs all its microbatches before the next chunk does. Memory m*M_B, bubble
    (p-1)(T_F+T_B+T_W)/v.

    Source: arXiv 2211.05953.
    """
    ranks: Ranks = []
    for i in range(p):
        forward = [Action(c * p + i, "F", mb) for c in range(v) for mb in range(m)]
        ranks.append(forward + [Action(c * p + i, "BW", mb) for c in reversed(range(v)) for mb in range(m)])
    return ranks


def _interleave(p: int, v: int, m: int, after: Callable[[int], int], *, whole: bool) -> Ranks:
    count = max(1, m // p)  # groups of at least p where there are as many: a smaller one would come round sooner than it travels
    groups = [range(m * g // count, m * (g + 1) // count) for g in range(count)]
    size = max(map(len, groups))
    forward = [(c, mb) for group in groups for c in range(v) for mb in group]
    backward = [(c, mb) for group in groups for c in reversed(range(v)) for mb in group]
    ranks = []
    for i in range(p):
        warm = (v - 1) * size + after(i)
        ranks.append(list(_take_turns(i, p, forward, backward, min(warm, len(forward)), whole)))
    return ranks


def _take_turns(
    i: int, p: int, forward: Sequence[tuple[int, int]], backward: Sequence[tuple[int, int]], warm: int, whole: bool
) -> Iterator[Action]:
    for c, mb in forward[:warm]:
        yield Action(c * p + i, "F", mb)
    for n, (c, mb) in enumerate(backward):
        if warm + n < len(forward):
            later, its_mb = forward[warm + n]
            yield Action(later * p + i, "F", its_mb)
        yield Action(c * p + i, "BW" if whole else "B", mb)
        if not whole and n >= i:
            late, its_mb = backward[n - i]
            yield Action(late * p + i, "W", its_mb)
    if not whole:
        for c, mb in backward[max(len(backward) - i, 0) :]:
            yield Action(c * p + i, "W", mb)


# ---------------------------------------------------------------- V


class _Counter:
    """Writes a V rank's actions: the n-th call for a kind and chunk is its microbatch n; calls beyond m, or before its F
    or B, do nothing."""

    def __init__(self, p: int, i: int, m: int) -> None:
        self.stage = (i, 2 * p - 1 - i)
        self.m = m
        self.done = {(kind, c): 0 for kind in "FBW" for c in (0, 1)}
        self.actions: list[Action] = []

    def put(self, kind: Kind, c: int) -> None:
        """One action of chunk c (0: a, 1: z)."""
        n = self.done[kind[0], c]
        ready = self.m if kind == "F" else self.done["F" if kind[0] == "B" else "B", c]
        if n < min(ready, self.m) and (kind != "BW" or n == self.done["W", c]):
            self.actions.append(Action(self.stage[c], kind, n))
            for letter in kind:
                self.done[letter, c] += 1

    def finish(self) -> None:
        """All Bs that are left, then all Ws."""
        left: tuple[tuple[Kind, int], ...] = (("B", 1), ("B", 0), ("W", 1), ("W", 0))
        for kind, c in left:
            while self.done[kind, c] < self.m:
                self.put(kind, c)


def zb_v(p: int, v: int, m: int) -> Ranks:
    """ZB-V: warm-up fills p*M_B on every rank, then F and B of both chunks take turns, and the end mirrors the start.

    Bubble of the span 0 where T_F = T_B = T_W; memory p*M_B on every rank. Source: arXiv 2401.10241, section 6.
    """
    ranks = []
    for i in range(p):
        w = _Counter(p, i, m)
        for _ in range(2 * (p - i) - 1):
            w.put("F", 0)
        for _ in range(i):
            w.put("F", 1)
            w.put("F", 0)
        for _ in range(p - i):
            _each(w, (("F", 1), ("B", 1), ("W", 1)))
        while w.done["F", 1] < w.done["F", 0] or w.done["F", 0] < m:
            _each(w, (("F", 0), ("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1)))
        for _ in range(i):
            _each(w, (("B", 0), ("B", 1)))
        for _ in range(p - i):
            _each(w, (("B", 0), ("W", 0)))
        w.finish()
        ranks.append(w.actions)
    return ranks


def dualpipe_v(p: int, v: int, m: int) -> Ranks:
    """DualPipe on one V: eight steps; whole backwards (BW) but at the start and the end, where B alone goes first. Needs m
    >= 2p.

    Bubble (p-1)(T_F + T_BW - 3T_W)/2 with F and backward not overlapped here; memory (p+1)*M_B. Source: the "cut-in-half"
    note to
    DeepSeek-V3, arXiv 2412.19437.
    """
    if m < 2 * p:
        raise InputError(f"dualpipe-v needs at least 2p = {2 * p} microbatches, found {m}: use zb-v, or more microbatches")
    return [_dualpipe_rank(p, i, m) for i in range(p)]


def _dualpipe_rank(p: int, i: int, m: int) -> list[Action]:
    w, late = _Counter(p, i, m), p - i - 1
    for _ in range(2 * late):
        w.put("F", 0)
    for _ in range(i + 1):
        _each(w, (("F", 0), ("F", 1)))
    for _ in range(late):
        _each(w, (("B", 1), ("W", 1), ("F", 1)))
    for _ in range(m - 2 * p + i + 1):
        _each(w, (("F", 0), ("BW", 1), ("F", 1), ("BW", 0)))
    for _ in range(late):
        _each(w, (("BW", 1), ("F", 1), ("BW", 0)))
    for n in range(i + 1):  # from the middle on, Ws are kept for the end
        for c in (1, 0):
            w.put("BW" if n < (i + 1) // 2 + (i + 1) % 2 * c else "B", c)
    for _ in range(late):
        for c in (1, 0):
            w.put("W", c)
        w.put("B", 0)
    w.finish()
    return w.actions


def v_half(p: int, v: int, m: int) -> Ranks:
    """V-Half: a block of actions repeated every 6 slots; F goes down at 2 slots a rank and up at 1, B down at 1 and up at 2.

    Memory about (p/2 + 1)*M_B, half of 1F1B's at p*M_B; built for T_F = T_B = T_W. Source: arXiv 2405.15362.
    """
    return _building_block(p, m, ((2, 1, 1, 2), (1, 2, 2, 1), (2, 1, 2, 1), (1, 2, 1, 2), (3, 1, 1, 1), (1, 1, 1, 3)))


def v_min(p: int, v: int, m: int) -> Ranks:
    """V-Min: the same with every hop in 1 slot, the shortest life of an activation. Memory about (p/3 + 2)*M_B. Source:
    2405.15362."""
    return _building_block(p, m, ((1, 1, 1, 1),))


_SLOTS = 6  # of a period: F, B, W of both chunks


def _building_block(p: int, m: int, shapes: Sequence[tuple[int, int, int, int]]) -> Ranks:
    """Sorts the actions by the slot in which the repeated block has them; each B's W takes the next free slot of the period."""
    starts = next(starts for hops in shapes if (starts := _collision_free(p, hops)))
    ranks = []
    for i in range(p):
        slots: dict[tuple[Kind, int], int] = {("F", i): starts[i], ("F", 2 * p - 1 - i): starts[2 * p - 1 - i]}
        slots |= {("B", 2 * p - 1 - i): starts[2 * p + i], ("B", i): starts[4 * p - 1 - i]}
        taken = {slot % _SLOTS for slot in slots.values()}
        for stage in (2 * p - 1 - i, i):
            slot = slots["B", stage] + 1
            while slot % _SLOTS in taken:
                slot += 1
            taken.add(slot % _SLOTS)
            slots["W", stage] = slot
        timed = [(at + _SLOTS * mb, Action(stage, kind, mb)) for (kind, stage), at in slots.items() for mb in range(m)]
        ranks.append([action for _, action in sorted(timed)])
    return ranks


def _collision_free(p: int, hops: Sequence[int]) -> list[int]:
    """Slot of each of the 4p nodes: hops within a leg, at the turns the shortest waits with which no rank has two at once;
    or []."""
    for waits in sorted(product(range(1, _SLOTS + 1), repeat=3), key=lambda w: (sum(w), w)):
        starts = [0]
        for node in range(1, 4 * p):
            leg, at = divmod(node, p)
            starts.append(starts[-1] + (waits[leg - 1] if at == 0 else hops[leg]))
        if all(len({starts[n] % _SLOTS for n in (i, 2 * p - 1 - i, 2 * p + i, 4 * p - 1 - i)}) == 4 for i in range(p)):
            return starts
    return []


def _each(writer: _Counter, steps: Sequence[tuple[Kind, int]]) -> None:
    for kind, c in steps:
        writer.put(kind, c)


CHUNKED: dict[str, tuple[Callable[[int, int, int], Ranks], str]] = {
    "interleaved-1f1b": (interleaved_1f1b, "interleaved"),
    "looped-bfs": (looped_bfs, "interleaved"),
    "interleaved-zb": (interleaved_zb, "interleaved"),
    "zb-v": (zb_v, "v"),
    "v-half": (v_half, "v"),
    "v-min": (v_min, "v"),
    "dualpipe-v": (dualpipe_v, "v"),
}
