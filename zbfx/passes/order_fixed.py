"""Fixed schedules by name. Same input, same order; costs matter to none of them, only placement and microbatches.

This file: the schedules in which a rank does one thing per microbatch: gpipe, 1f1b, zb-h1, zb-h2. A rank that holds a block of
consecutive stages treats it as one: F runs the block's stages first to last, B and W follow last to first. So they take any
placement made of one block per rank (`block_placement`), and any m >= 1, m < p included. `order_chunks` has the schedules
in which a
rank returns to several stages.
Letters: p ranks, m microbatches, T_F, T_B, T_W seconds and M_B, M_W bytes of one rank's whole part; the formulas leave
communication out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbfx.errors import InputError, ScheduleError
from zbfx.ir import Action, CostModel, Kind, Schedule
from zbfx.passes.order_chunks import CHUNKED, order_chunked

Word = list[tuple[Kind, int]]  # (kind, microbatch) of one rank's whole block


def order_fixed(name: str, placement: Sequence[int], microbatches: int, *, costs: CostModel | None = None) -> Schedule:
    """The named schedule for `placement[stage] -> rank`; `costs` is accepted so that all schedulers are called alike."""
    if name not in FIXED:
        raise InputError(f"{name!r} is no fixed schedule; there are {', '.join(FIXED)}")
    if microbatches < 1:
        raise InputError(f"{microbatches=}: a schedule needs at least one")
    if name in CHUNKED:
        return order_chunked(name, placement, microbatches)
    blocks = _blocks(name, placement)
    words = {rank: _WORDS[name](len(blocks), depth, microbatches) for depth, (rank, _) in enumerate(blocks)}
    stages = dict(blocks)
    ranks = tuple(tuple(_expand(words[rank], stages[rank])) for rank in range(len(blocks)))
    return Schedule(tuple(placement), ranks, name)


def block_placement(num_stages: int, ranks: int) -> tuple[int, ...]:
    """Consecutive blocks, as even as can be: stage -> stage * ranks // num_stages."""
    if not 1 <= ranks <= num_stages:
        raise InputError(f"{ranks=} must lie between 1 and {num_stages=}: every rank holds at least one stage")
    return tuple(stage * ranks // num_stages for stage in range(num_stages))


def gpipe(p: int, depth: int, m: int) -> Word:
    """All Fs, then all backwards. Bubble (p-1)(T_F+T_B+T_W); memory m*M_B on every rank. Source: GPipe, arXiv 1811.06965."""
    return [*_run("F", 0, m), *_run("BW", 0, m)]


def one_f_one_b(p: int, depth: int, m: int) -> Word:
    """1F1B, also PipeDream-Flush: rank i warms up with p-1-i Fs, then F and backward take turns, then the backwards left.

    Bubble (p-1)(T_F+T_B+T_W); memory min(m, p-i)*M_B on rank i. Source: PipeDream, arXiv 1806.03377 and 2006.09503.
    """
    warm = min(p - 1 - depth, m)
    return [*_run("F", 0, warm), *_turns(warm, m, "BW", delay=0)]


def zb_h1(p: int, depth: int, m: int) -> Word:
    """ZB-H1: 1F1B's order of F and B; rank i starts its Ws i microbatches late, which fills the end of the pipeline.

    Bubble (p-1)(T_F+T_B-T_W); memory (p-i)*M_B + i*M_W on rank i, at most p*M_B. Source: arXiv 2401.10241, section 2.
    """
    warm = min(p - 1 - depth, m)
    return [*_run("F", 0, warm), *_turns(warm, m, "B", delay=depth)]


def zb_h2(p: int, depth: int, m: int) -> Word:
    """ZB-H2: twice ZB-H1's warm-up, so that the first gradient is back when the Fs end; rank i's Ws start 2i microbatches late.

    Bubble of the span (p-1)(T_F+T_B-2T_W) where that is positive; memory (2(p-i)-1)*M_B + 2i*M_W on rank i, at most (2p-1)*M_B.
    Source: arXiv 2401.10241, section 2.
    """
    warm = min(2 * (p - 1 - depth), m)
    return [*_run("F", 0, warm), *_turns(warm, m, "B", delay=2 * depth)]


_WORDS = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-h2": zb_h2}
FIXED = (*_WORDS, *CHUNKED)


def _run(kind: Kind, first: int, end: int) -> Word:
    return [(kind, mb) for mb in range(first, end)]


def _turns(warm: int, m: int, backward: Kind, *, delay: int) -> Iterator[tuple[Kind, int]]:
    """F of mb warm+j, then B of mb j, then W of mb j-delay, for every j; what is left of W comes last."""
    for mb in range(m):
        if warm + mb < m:
            yield "F", warm + mb
        yield backward, mb
        if backward == "B" and mb >= delay:
            yield "W", mb - delay
    if backward == "B":
        yield from _run("W", max(m - delay, 0), m)


def _blocks(name: str, placement: Sequence[int]) -> list[tuple[int, list[int]]]:
    """(rank, its stages) in pipeline order; refuses a placement in which a rank's stages are not one block."""
    blocks: list[tuple[int, list[int]]] = []
    for stage, rank in enumerate(placement):
        if blocks and blocks[-1][0] == rank:
            blocks[-1][1].append(stage)
        else:
            blocks.append((rank, [stage]))
    ranks = [rank for rank, _ in blocks]
    if not ranks or sorted(ranks) != list(range(len(ranks))):
        raise ScheduleError(
            f"{name} needs each of the ranks 0..n-1 to hold one block of consecutive stages, found placement={list(placement)};"
            " use block_placement(num_stages, ranks), or a schedule for placements that return to a rank"
        )
    return blocks


def _expand(word: Word, stages: Sequence[int]) -> Iterator[Action]:
    for kind, mb in word:
        for stage in stages if kind == "F" else reversed(stages):
            yield Action(stage, kind, mb)
