"""The simulator: against a brute-force event simulation, by hand on small cases, memory, links, periods, and its speed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbfx.errors import InputError, MemoryBudgetError, ScheduleError
from zbfx.ir import Cost, CostModel, Link, Schedule
from zbfx.passes.order_fixed import block_placement, order_fixed
from zbfx.passes.simulate import memory_curve, refuse_over_budget, simulate, steady_period
from zbfx.text import costs_from_json, parse_action, schedule_to_json
from zbfx.verify import dependencies

times = st.sampled_from([0.0, 0.5, 1.0, 1.25, 3.0])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, CostModel]:
    ranks = draw(st.integers(1, 4))
    stages = ranks + draw(st.integers(0, 3))
    schedule = order_fixed(
        draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])), block_placement(stages, ranks), draw(st.integers(1, 5))
    )
    cost = st.builds(Cost, times, times, times, st.integers(0, 9), st.integers(-5, 0), st.integers(-4, 0))
    comm = tuple(draw(st.tuples(*[times] * ranks)) for _ in range(ranks))
    return schedule, CostModel(tuple(draw(st.tuples(*[cost] * stages))), comm, (None,) * ranks)


def brute_force(schedule: Schedule, costs: CostModel) -> dict[str, tuple[float, float]]:
    """Start and end of every action as the least fixed point: sweep all actions until nothing moves."""
    spans = {str(a): (0.0, 0.0) for rank in schedule.ranks for a in rank}
    moved = True
    while moved:
        moved = False
        for r, rank in enumerate(schedule.ranks):
            for before, a in zip((None, *rank), rank, strict=False):
                start = spans[str(before)][1] if before else 0.0
                for stage, kind, mb in dependencies(a, schedule.num_stages - 1):
                    end = spans.get(f"{stage}{kind}{mb}") or spans[f"{stage}BW{mb}"]
                    home = schedule.placement[stage]
                    start = max(start, end[1] + (costs.comm[home][r] if home != r else 0.0))
                cost = costs.stages[a.stage]
                new = (start, start + sum(getattr(cost, k) for k in a.kind))
                moved |= new != spans[str(a)]
                spans[str(a)] = new
    return spans


@given(cases())
def test_agrees_with_brute_force(case: tuple[Schedule, CostModel]) -> None:
    schedule, costs = case
    timeline, expected = simulate(schedule, costs), brute_force(schedule, costs)
    for rank in timeline.spans:
        for span in rank:
            assert (span.start, span.end) == pytest.approx(expected[str(span.action)])
    assert timeline.makespan == pytest.approx(max(e for _, e in expected.values()) - min(s for s, _ in expected.values()))
    assert 0 <= timeline.bubble_span <= timeline.bubble_makespan <= 1 or timeline.makespan == 0
    assert timeline.peak == tuple(max(memory_curve(schedule, costs, r)) for r in range(len(schedule.ranks)))
    assert steady_period(schedule, costs) <= timeline.span + 1e-9


def two_ranks(comm: float = 0.0, limit: int | None = None) -> CostModel:
    cost = Cost(1.0, 2.0, 1.0, 8, -5, -3, peak_B=4)
    return CostModel((cost, cost), ((0.0, comm), (comm, 0.0)), (limit, limit))


def test_by_hand() -> None:
    timeline = simulate(order_fixed("1f1b", (0, 1), 2), two_ranks(comm=0.5))
    starts = [[(str(s.action), s.start) for s in rank] for rank in timeline.spans]
    assert starts[0] == [("0F0", 0.0), ("0F1", 1.0), ("0BW0", 6.0), ("0BW1", 10.0)]
    assert starts[1] == [("1F0", 1.5), ("1BW0", 2.5), ("1F1", 5.5), ("1BW1", 6.5)]
    assert (timeline.span, timeline.makespan) == (13.0, 13.0)
    assert timeline.bubble_span == pytest.approx(5 / 13)
    assert memory_curve(order_fixed("zb-h1", (0, 1), 2), two_ranks(), 0) == (8, 16, 11, 8, 3, 0)


def test_parts_of_w_share_seconds_and_bytes() -> None:
    rank = tuple(map(parse_action, ["0F0", "0B0", "0W0.0", "0W0.1"]))
    schedule, costs = Schedule((0,), (rank,)), CostModel((Cost(1, 1, 3, 8, -5, -3),), ((0,),), (None,))
    assert [s.end for s in simulate(schedule, costs).spans[0]] == [1, 2, 3.5, 5]
    assert memory_curve(schedule, costs, 0) == (8, 3, 1, 0)


def test_links_carry_one_message_at_a_time_on_request() -> None:
    schedule = order_fixed("gpipe", (0, 1), 3)
    free = simulate(schedule, two_ranks(comm=4.0)).spans[1]
    queued = simulate(schedule, two_ranks(comm=4.0), serialize_links=True).spans[1]
    assert [s.start for s in free[:3]] == [5, 6, 7] and [s.start for s in queued[:3]] == [5, 9, 13]


def test_links_take_their_latency_and_the_message_s_bytes() -> None:
    link = Link(latency=0.5, bandwidth=4.0)
    costs = replace(two_ranks(comm=9.0), edge_bytes=(6,), links=((link, link), (link, link)))
    assert simulate(order_fixed("gpipe", (0, 1), 1), costs).spans[1][0].start == 1 + 0.5 + 6 / 4
    assert costs_from_json(schedule_to_json(order_fixed("gpipe", (0, 1), 1), costs)) == costs
    with pytest.raises(InputError, match="0 edges"):
        simulate(order_fixed("gpipe", (0, 1), 1), replace(costs, edge_bytes=()))


def test_over_budget_names_rank_and_excess() -> None:
    schedule = order_fixed("zb-h1", (0, 1), 2)
    refuse_over_budget(schedule, two_ranks(limit=20))  # two Fs hold 16, and B runs with 4 more
    with pytest.raises(MemoryBudgetError, match=r"rank 0 would hold 20 bytes \(20 B\), 1 B over its limit of 19 bytes") as e:
        refuse_over_budget(schedule, two_ranks(limit=19))
    assert "--> [2] 0B0" in str(e.value)


def test_period_of_zero_bubble_is_the_work() -> None:
    schedule, costs = order_fixed("zb-h1", (0, 1), 6), two_ranks()
    assert simulate(schedule, costs).span > 24
    assert steady_period(schedule, costs) == pytest.approx(24 + 2)  # rank 0 still waits once for the first gradient


def test_refusals() -> None:
    schedule = order_fixed("1f1b", (0, 1), 2)
    with pytest.raises(InputError, match="costs are for 1 stages"):
        simulate(schedule, CostModel((Cost(1, 1, 1),), ((0,),), (None,)))
    with pytest.raises(InputError, match="stage 1: times must be finite"):
        simulate(schedule, CostModel((Cost(1, 1, 1), Cost(1, -1, 1)), ((0, 0), (0, 0)), (None, None)))
    deadlock = Schedule(
        (0, 1), tuple(tuple(map(parse_action, row.split())) for row in ("0F0 0BW0 0F1 0BW1", "1F0 1F1 1BW0 1BW1"))
    )
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(deadlock, two_ranks())


def test_fifty_thousand_actions() -> None:  # how long that takes: benchmarks/schedules.py
    schedule = order_fixed("zb-h1", block_placement(16, 16), 1042)
    costs = CostModel((Cost(1, 1, 1),) * 16, ((0.0,) * 16,) * 16, (None,) * 16)
    timeline = simulate(schedule, costs)
    assert sum(map(len, schedule.ranks)) > 50_000
    assert timeline.makespan == 3 * 1042 + 15  # m (T_F + T_B + T_W) and the bubble (p - 1) (T_F + T_B - T_W)
