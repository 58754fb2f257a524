"""Plans and priorities: known plans are whole, keys never deadlock, woven trains never meet, spare room is kept, the pace of a
short run is read off."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbfx.ir import Cost, CostModel
from zbfx.passes.order_decode import Rules, settled_period
from zbfx.passes.order_dispatch import dispatch
from zbfx.passes.order_patterns import Candidate, decode, seeds
from zbfx.passes.order_plan import mutate_plan, plain_plan, plan_keys, sample_plan, sort_words
from zbfx.passes.order_problem import Problem, build_problem
from zbfx.passes.order_seeds import known_plans
from zbfx.passes.order_weave import mutate_weave, plain_weaves, weave_keys
from zbfx.passes.placements import build_placement

SHAPES = (("linear", 1, 2), ("v", 2, 4), ("zigzag", 4, 8))


def problem_on(place: str, chunks: int, microbatches: int, share: float = 1.0, ranks: int = 4) -> Problem:
    cost = Cost(10 / chunks, 10 / chunks, 7 / chunks, 12 // chunks, -7 // chunks, -(12 // chunks) - (-7 // chunks))
    comm = tuple(tuple(0.5 * (a != b) for b in range(ranks)) for a in range(ranks))
    costs = CostModel((cost,) * (ranks * chunks), comm, (int(share * ranks * 12),) * ranks)
    return build_problem(build_placement(place, ranks), microbatches, costs)


@pytest.mark.parametrize("place, chunks, legs", SHAPES)
def test_known_plans_are_whole_and_decode(place: str, chunks: int, legs: int) -> None:
    assert all(len(x) == (10 + legs if family == "weave" else len(plain_plan(legs))) for family, _, x in known_plans(legs))
    problem = problem_on(place, chunks, 12)
    spans = [decode(problem, candidate).span for candidate in seeds(problem)]
    assert min(spans) < 1.2 * max(problem.work)


@pytest.mark.parametrize("place, chunks, legs", SHAPES)
def test_keys_rise_along_the_nodes(place: str, chunks: int, legs: int) -> None:
    problem, rng = problem_on(place, chunks, 9), Random(0)
    x = sample_plan(problem, rng)
    for _ in range(50):
        x = mutate_plan(problem, x, rng)
        keys = plan_keys(problem, x)
        assert all(a[mb] <= b[mb] for a, b in pairwise(keys) for mb in range(9))
        words = sort_words(problem, keys)
        assert all(
            sorted(word) == sorted(v for v in own for _ in range(9)) for word, own in zip(words, problem.nodes, strict=True)
        )


@pytest.mark.parametrize("spare", [1.0, 2.0])
def test_spare_room_is_kept_for_the_last_forward_stage(spare: float) -> None:
    problem = problem_on("zigzag", 4, 16)
    found = dispatch(problem, plan_keys(problem, plain_plan(8, 2.0)), Rules(fill=0.3, spare=spare), keep=True)
    change = {0: problem.memory[0], 1: problem.memory[-1], 2: -problem.w_memory[0]}
    for own, word in zip(problem.nodes, found.words, strict=True):
        last = max(v for v in own if v < problem.num_stages)
        held, done = 0.0, dict.fromkeys(own, 0)
        for stage, kind in word:
            held += change[kind]
            if kind == 0 and stage != last and done[stage] > done[last]:
                assert held + spare * problem.memory[stage] <= problem.room[problem.placement[stage]] + 1e-6
            done[stage] = done.get(stage, 0) + (kind == 0)


@pytest.mark.parametrize("place, chunks, legs", SHAPES)
def test_keys_of_woven_plans_rise_along_the_nodes(place: str, chunks: int, legs: int) -> None:
    problem, rng = problem_on(place, chunks, 9), Random(1)
    for x in plain_weaves(problem):
        for _ in range(15):
            keys = weave_keys(problem, x)
            assert len(x) == 10 + legs and all(a[mb] <= b[mb] for a, b in pairwise(keys) for mb in range(9))
            x = mutate_weave(problem, x, rng)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(2, 20), st.sampled_from((1, -1)), st.floats(0.2, 0.8), st.floats(0.3, 0.7))
def test_woven_trains_never_meet(shape: tuple[str, int, int], ranks: int, apart: int, meet: float, up: float) -> None:
    """Whatever the ranks and wherever the trains of one direction sit between the others: no rank has two closer than that."""
    place, chunks, legs = shape
    problem = problem_on(place, chunks, 3, ranks=ranks)
    phases = [apart * (k // 2) + (meet if k % 2 else 0.0) for k in range(1, legs)]
    keys = weave_keys(problem, (1.0, 1.0, up, *phases, *(0.0, 0.5) * 4))
    cell = max(problem.work) / 3 / chunks
    for own in problem.nodes:
        at = sorted(keys[v][0] / cell % chunks for v in own)
        gaps = [b - a for a, b in pairwise((*at, at[0] + chunks))]
        assert min(gaps) > min(meet, 1 - meet) - 1e-6


@pytest.mark.parametrize(
    "place, chunks, ranks, share", [("v", 2, 8, 0.65), ("v", 2, 16, 0.55), ("zigzag", 4, 9, 0.5), ("zigzag", 4, 16, 0.55)]
)
def test_a_woven_plan_loses_nothing_in_the_middle(place: str, chunks: int, ranks: int, share: float) -> None:
    """Held against the same steady pace with every hop as short as can be, which runs into itself."""
    problem = problem_on(place, chunks, 6 * ranks, share + 0.5 / ranks, ranks)
    work = max(problem.work) / problem.microbatches
    woven = [decode(problem, Candidate("weave", x, Rules(0.05, 0.3))) for x in plain_weaves(problem)]
    plain = decode(problem, Candidate("pattern", plain_plan(legs=2 * chunks), Rules(0.05, 0.3)))
    assert min(o.period for o in woven) <= work * (1 + 1e-9) and plain.period > 1.1 * work
    assert min(o.span for o in woven) < 0.85 * plain.span


def test_settled_period() -> None:
    assert settled_period([float(mb * mb) if mb < 5 else 25.0 + 3 * (mb - 5) for mb in range(11)], 10) == 3.0
    assert settled_period([1.0, 2.0], 1) == 0.0
