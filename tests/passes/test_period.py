"""What a step costs when nothing waits for the weights: the period of post-validation and of a stream."""

import pytest

from zbfx.ir import Cost, CostModel, Schedule
from zbfx.passes.course import post_validation, synchronous
from zbfx.passes.order_fixed import order_fixed
from zbfx.passes.simulate import steady_period
from zbfx.passes.stream import stream


def problem(ranks: int, name: str, hop: float = 0.01) -> tuple[CostModel, Schedule]:
    place = tuple(range(ranks))
    comm = tuple(tuple(0.0 if a == b else hop for b in place) for a in place)
    costs = CostModel((Cost(1.0, 1.0, 1.0),) * ranks, comm, (None,) * ranks)
    return costs, order_fixed(name, place, 4 * ranks, costs=costs)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_post_validation_costs_what_steps_without_a_barrier_cost(ranks: int, name: str) -> None:
    costs, schedule = problem(ranks, name)
    course = post_validation(schedule, costs)
    assert course.period == pytest.approx(steady_period(schedule, costs), abs=0.01 * ranks)
    assert course.period <= synchronous(schedule, costs, checked=True).period + 1e-9
    assert course.timeline.spans[0][0].start >= 0 and min(rank[0].start for rank in course.timeline.spans) == 0


def test_the_parallelogram_saves_what_the_barrier_cost() -> None:
    """ZB-H2 ends later on each rank by one F: a barrier makes all wait for the last one."""
    costs, schedule = problem(4, "zb-h2", hop=0.0)
    course = post_validation(schedule, costs)
    assert synchronous(schedule, costs, checked=True).period == 51.0
    assert course.period == 48.0
    assert course.repeated == (4, 3, 2, 0)  # one more than the state takes to come back: it may be late


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_a_stream_has_no_bubble(name: str) -> None:
    costs, schedule = problem(4, name)
    laid = stream(lambda n: order_fixed(name, schedule.placement, n, costs=costs), 16, costs, checked=True)
    assert 48.0 <= laid.course.period < 48.0 + (1.5 if name == "1f1b" else 0.1)
