"""The search: whatever the input, its schedules verify, fit, agree with the simulator, repeat, and never beat their lower
bound."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbfx.errors import InputError, MemoryBudgetError
from zbfx.ir import Cost, CostModel
from zbfx.passes.order_bounds import lower_bounds
from zbfx.passes.order_places import candidate_placements, order_anywhere
from zbfx.passes.order_problem import build_problem, smallest_limits
from zbfx.passes.order_search import order_auto
from zbfx.passes.placements import build_placement
from zbfx.passes.simulate import memory_curve, refuse_over_budget, simulate
from zbfx.verify import verify_schedule

times = st.sampled_from([0.0, 1.0, 2.0, 3.5])
QUICK = 0.01  # seconds of budget


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[int, ...], int, CostModel, int]:
    p = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, p - 1), max_size=5))
    placement = tuple(draw(st.permutations([*range(p), *extra])))
    stages = []
    for _ in placement:
        held, kept = draw(st.integers(0, 12)), draw(st.integers(0, 12))
        temporary = draw(st.sampled_from([0, 0, 15]))
        stages.append(Cost(*(draw(times) for _ in range(3)), held, kept - held, -kept, temporary, temporary, temporary))
    comm = tuple(tuple(0.0 if a == b else draw(times) for b in range(p)) for a in range(p))
    costs = CostModel(tuple(stages), comm, (None,) * p)
    least = smallest_limits(placement, costs)
    limit = tuple(draw(st.sampled_from([None, small + 12, small + 60, small * 5 + 24])) for small in least)
    return placement, draw(st.integers(1, 6)), replace(costs, limit=limit), draw(st.integers(1, 3))


@settings(max_examples=60)
@given(problems(), st.sampled_from(["span", "makespan"]))
def test_any_input(problem: tuple[tuple[int, ...], int, CostModel, int], objective: str) -> None:
    placement, m, costs, parts = problem
    try:
        solution = order_auto(placement, m, costs, objective=objective, w_parts=parts, seconds=QUICK)
    except MemoryBudgetError as e:
        assert "smallest that would do" in str(e)
        return
    verify_schedule(solution.schedule)
    refuse_over_budget(solution.schedule, costs)
    assert solution.schedule.placement == placement and solution.schedule.microbatches == m
    assert simulate(solution.schedule, costs) == solution.timeline
    assert solution.bound_span <= solution.timeline.span * (1 + 1e-9)
    assert solution.bound_makespan <= solution.timeline.makespan * (1 + 1e-9)
    again = order_auto(placement, m, costs, objective=objective, w_parts=parts, seconds=QUICK)
    assert again.schedule == solution.schedule


@given(problems())
def test_the_smallest_limit_is_enough_and_less_is_refused(problem: tuple[tuple[int, ...], int, CostModel, int]) -> None:
    placement, m, costs, _ = problem
    plain = replace(
        costs, stages=tuple(replace(c, bytes_B=min(c.bytes_B, 0), peak_F=0, peak_B=0, peak_W=0) for c in costs.stages)
    )
    plain = replace(plain, stages=tuple(replace(c, bytes_W=-c.bytes_F - c.bytes_B) for c in plain.stages))
    least = smallest_limits(placement, plain)
    tight = order_auto(placement, m, replace(plain, limit=least), seconds=QUICK)
    assert all(max(memory_curve(tight.schedule, plain, r)) <= least[r] for r in range(len(least)))
    if least[0] > 0:
        with pytest.raises(MemoryBudgetError, match=f"rank 0: {least[0]} bytes"):
            order_auto(placement, m, replace(plain, limit=(least[0] - 1, *least[1:])), seconds=QUICK)


ROWS = json.loads((Path(__file__).parents[1] / "data" / "paper_rows.json").read_text())["rows"]


def paper_costs(row: dict, chunks: int, share: float) -> CostModel:
    p = row["ranks"]
    held, kept = row["M_B"] // chunks, row["M_W"] // chunks
    cost = Cost(row["T_F"] / chunks, row["T_B"] / chunks, row["T_W"] / chunks, held, kept - held, -kept)
    comm = tuple(tuple(row["T_comm"] * (a != b) for b in range(p)) for a in range(p))
    return CostModel((cost,) * (p * chunks), comm, (int(share * p * row["M_B"]),) * p)


@pytest.mark.parametrize("i", range(6))
def test_linear_at_1p_is_the_papers_zb_1p(i: int) -> None:
    row = ROWS[i]
    solution = order_auto(build_placement("linear", 8), row["microbatches"], paper_costs(row, 1, 1))
    assert round(solution.timeline.bubble_span, 4) == pytest.approx(row["paper_bubble"]["ZB-1p"], abs=5e-5)


@pytest.mark.parametrize("i", range(6))
def test_v_at_1p_meets_its_lower_bound(i: int) -> None:
    row = ROWS[i]
    solution = order_auto(build_placement("v", 8), row["microbatches"], paper_costs(row, 2, 1))
    assert solution.gap < 1e-6
    assert solution.timeline.bubble_span <= row["peer_measured"]["ZB-V-1p"]["span_bubble"] + 5e-6


@pytest.mark.parametrize("i", [0, 2, 5])
def test_zigzag_with_a_barrier_meets_its_lower_bound(i: int) -> None:
    row = ROWS[i]
    solution = order_auto(build_placement("zigzag", 8), row["microbatches"], paper_costs(row, 4, 1.5), objective="makespan")
    assert solution.gap < 1e-3


def test_unequal_stages_beat_the_median_cost() -> None:
    placement = build_placement("linear", 4)
    stages = (Cost(13, 13, 9, 100, -60, -40), *[Cost(10, 10, 7, 100, -60, -40)] * 2, Cost(12, 12, 8, 100, -60, -40))
    comm = tuple(tuple(0.0 if a == b else 4.0 if {a, b} == {1, 2} else 0.5 for b in range(4)) for a in range(4))
    costs = CostModel(stages, comm, (600,) * 4)
    flat = replace(costs, stages=(stages[1],) * 4, comm=tuple(tuple(0.5 * (a != b) for b in range(4)) for a in range(4)))
    blind = simulate(order_auto(placement, 12, flat, seconds=0.5).schedule, costs)
    assert order_auto(placement, 12, costs, seconds=0.5).timeline.span < blind.span


def test_blocks_of_stages_are_scheduled_as_one() -> None:
    cost = Cost(1, 1, 1, 10, -6, -4)
    comm = ((0.0, 0.1), (0.1, 0.0))
    fine = order_auto((0, 0, 1, 1), 6, CostModel((cost,) * 4, comm, (40, 40)), seconds=0.05)
    coarse = order_auto((0, 1), 6, CostModel((Cost(2, 2, 2, 20, -12, -8),) * 2, comm, (40, 40)), seconds=0.05)
    assert fine.timeline.span == pytest.approx(coarse.timeline.span) and max(fine.timeline.peak) <= 40


def test_placement_search_says_why() -> None:
    cost = Cost(1, 1, 0.5, 10, -6, -4)
    costs = CostModel((cost,) * 8, ((0.0, 0.1), (0.1, 0.0)), (90, 90))
    assert set(candidate_placements(8, 2)) == {"linear", "v", "zigzag", "interleaved-2", "interleaved-4"}
    found = order_anywhere(6, costs, seconds=0.2)
    worst = order_auto(candidate_placements(8, 2)["linear"], 6, costs, seconds=0.2)
    assert found.timeline.span <= worst.timeline.span
    assert found.why.startswith("placement ") and "linear" in found.why and "zigzag" in found.why


def test_bounds_by_hand() -> None:
    cost = Cost(1, 1, 1, 2, -1, -1)
    loose = lower_bounds(build_problem((0, 1), 4, CostModel((cost,) * 2, ((0, 0), (0, 0)), (None, None))))
    assert (loose.span, loose.makespan) == (12, 13)  # rank 1 cannot begin before 1
    tight = lower_bounds(build_problem((0, 1), 4, CostModel((cost,) * 2, ((0, 0), (0, 0)), (2, 2))))
    assert tight.span == 4 * (2 * 4 + 1 * 1) / 2  # bytes times seconds of rank 0's round trips and Ws, over its 2 bytes


@pytest.mark.parametrize(
    "change, message",
    [({"objective": "speed"}, "objective='speed'"), ({"w_parts": 0}, "w_parts=0"), ({"microbatches": 0}, "microbatches=0")],
)
def test_wrong_arguments(change: dict, message: str) -> None:
    arguments = {"placement": (0,), "microbatches": 1, "costs": CostModel((Cost(1, 1, 1),), ((0,),), (None,))} | change
    with pytest.raises(InputError, match=message):
        order_auto(**arguments)


def test_a_bound_holds_where_b_adds_bytes() -> None:
    """The search keeps room for what B adds from F on; a fixed schedule need not, and the bound holds for both."""
    stages = (Cost(0.0, 0.0, 0.0, 0, 7, -7), Cost(0.0, 0.0, 0.0), Cost(0.0, 0.0, 0.0))
    costs = CostModel(stages, ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 1.0, 0.0)), (None, None, 19))
    solution = order_auto((2, 1, 0), 5, costs, seconds=0.02)
    assert solution.timeline.span == 1.0 and solution.bound_span <= 1.0
