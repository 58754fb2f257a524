"""Cuts of a line of weights: the optimum equals brute force over all cuts, down to the tie-break on crossing."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbfx.errors import PartitionError
from zbfx.passes.balance import best_cuts


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[float], list[float], list[bool], int, tuple[int, ...]]:
    """work, crossing, allowed, pieces, pinned: whole numbers, so that sums are exact and ties happen."""
    n = draw(st.integers(1, 9))
    work = draw(st.lists(st.integers(0, 6), min_size=n, max_size=n))
    crossing = [0, *draw(st.lists(st.integers(0, 4), min_size=n - 1, max_size=n - 1)), 0]
    allowed = [False, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1)), False]
    pieces = draw(st.integers(1, n))
    pinned = draw(st.sets(st.integers(1, n - 1), max_size=2)) if n > 1 else set()
    return list(map(float, work)), list(map(float, crossing)), allowed, pieces, tuple(sorted(pinned))


def score(work: list[float], crossing: list[float], cuts: tuple[int, ...]) -> tuple[float, float]:
    """(largest load, sum of crossing): what is to be smallest, in this order."""
    ends = [0, *cuts, len(work)]
    loads = [sum(work[a:b]) + crossing[a] + crossing[b] for a, b in pairwise(ends)]
    return max(loads), sum(crossing[c] for c in cuts)


def all_cuts(allowed: list[bool], pieces: int, pinned: tuple[int, ...]) -> list[tuple[int, ...]]:
    places = [c for c in range(1, len(allowed) - 1) if allowed[c] or c in pinned]
    return [cuts for cuts in combinations(places, pieces - 1) if set(pinned) <= set(cuts)]


@given(lines())
def test_equals_brute_force(line: tuple[list[float], list[float], list[bool], int, tuple[int, ...]]) -> None:
    work, crossing, allowed, pieces, pinned = line
    options = all_cuts(allowed, pieces, pinned)
    if not options:
        with pytest.raises(PartitionError):
            best_cuts(work, crossing, allowed, pieces, pinned=pinned)
        return
    cuts = best_cuts(work, crossing, allowed, pieces, pinned=pinned)
    assert cuts in options
    assert score(work, crossing, cuts) == min(score(work, crossing, c) for c in options)


@given(st.lists(st.floats(1e-9, 1e3), min_size=2, max_size=8), st.integers(1, 4), st.data())
def test_the_largest_load_is_optimal_for_any_floats(work: list[float], pieces: int, data: st.DataObject) -> None:
    n = len(work)
    crossing = [0.0, *data.draw(st.lists(st.floats(0, 10), min_size=n - 1, max_size=n - 1)), 0.0]
    allowed = [False, *[True] * (n - 1), False]
    pieces = min(pieces, n)
    got = score(work, crossing, best_cuts(work, crossing, allowed, pieces))[0]
    best = min(score(work, crossing, c)[0] for c in all_cuts(allowed, pieces, ()))
    assert got == pytest.approx(best, rel=1e-12)


def test_a_greedy_walk_would_do_worse() -> None:
    work = [3.0, 3.0, 4.0, 3.0, 3.0, 4.0]
    cuts = best_cuts(work, [0.0] * 7, [False] + [True] * 5 + [False], 3)
    assert score(work, [0.0] * 7, cuts)[0] == 7.0  # filling each piece up to the average (6.67) leaves the last one with 10


def test_crossing_bytes_move_a_cut() -> None:
    work, allowed = [1.0] * 4, [False, True, True, True, False]
    assert best_cuts(work, [0, 0, 0, 0, 0], allowed, 2) == (2,)
    assert best_cuts(work, [0, 0, 9, 1, 0], allowed, 2) == (1,)
    assert best_cuts(work, [0, 2, 2, 0.5, 0], allowed, 2) == (3,)


@pytest.mark.parametrize(
    "pieces, pinned, message",
    [
        (4, (), "num_stages=4, but the graph can be cut into at most 3 stages: pass num_stages=3 or fewer"),
        (2, (1, 3), "does not fit the pinned cuts: pin at most 1 modules"),
    ],
)
def test_refuses_what_cannot_be_cut(pieces: int, pinned: tuple[int, ...], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        best_cuts([1.0] * 4, [0.0] * 5, [False, True, False, True, False], pieces, pinned=pinned)


def test_ten_thousand_nodes_take_less_than_a_few_seconds() -> None:
    n = 10_000
    work = [float(i % 7) for i in range(n)]
    cuts = best_cuts(work, [0.0, *[float(i % 3) for i in range(1, n)], 0.0], [False, *[True] * (n - 1), False], 16)
    assert score(work, [0.0] * (n + 1), cuts)[0] == pytest.approx(sum(work) / 16, rel=0.01)
