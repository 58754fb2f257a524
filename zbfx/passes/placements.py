"""Placements by name: which rank holds each stage. p ranks, v stages a rank.

linear: blocks in order; interleaved: 0..p-1 again and again; v: 0..p-1..0; zigzag: v, then v again (4 stages a rank, or
any even number).
"""

from __future__ import annotations

from zbfx.errors import InputError

NAMES = ("linear", "interleaved", "v", "zigzag")


def build_placement(name: str, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """placement[stage] -> rank. chunks: stages a rank (default: linear 1, interleaved 2, v 2, zigzag 4)."""
    if name not in NAMES:
        raise InputError(f"{name!r} is no placement; there are {', '.join(NAMES)}, or a list with the rank of each stage")
    if ranks < 1:
        raise InputError(f"{ranks=}: a pipeline needs at least one rank")
    v = chunks if chunks is not None else {"linear": 1, "interleaved": 2, "v": 2, "zigzag": 4}[name]
    if v < 1 or (name in ("v", "zigzag") and v % 2) or (name == "v" and v != 2):
        raise InputError(f"{name} with {v} stages a rank: linear and interleaved take any, v takes 2, zigzag an even number")
    forth = tuple(range(ranks))
    if name == "linear":
        return tuple(stage // v for stage in range(v * ranks))
    if name == "interleaved":
        return forth * v
    return (forth + forth[::-1]) * (v // 2)


def name_placement(placement: tuple[int, ...]) -> str:
    """The name of a placement that `build_placement` makes, with its chunks where they are not the usual; else "custom"."""
    ranks = 1 + max(placement)
    chunks, odd = divmod(len(placement), ranks)
    if odd:
        return "custom"
    for name in NAMES:
        usual = {"linear": 1, "interleaved": 2, "v": 2, "zigzag": 4}[name]
        allowed = chunks % 2 == 0 if name == "zigzag" else (chunks == 2 if name == "v" else True)
        if allowed and build_placement(name, ranks, chunks) == placement:
            return name if chunks == usual else f"{name}-{chunks}"
    return "custom"
