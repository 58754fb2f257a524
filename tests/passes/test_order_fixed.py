"""Fixed schedules: their bubble and memory formulas, the paper's published rates, and every small shape verifies."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbfx.errors import InputError, ScheduleError
from zbfx.ir import Cost, CostModel
from zbfx.passes.order_fixed import block_placement, order_fixed
from zbfx.passes.simulate import simulate
from zbfx.verify import verify_schedule

NAMES = ("gpipe", "1f1b", "zb-h1", "zb-h2")


def uniform(
    stages: int, ranks: int, f: float = 3, b: float = 3, w: float = 2, comm: float = 0, m_b: int = 10, m_w: int = 4
) -> CostModel:
    cost = Cost(f, b, w, m_b, m_w - m_b, -m_w)
    return CostModel((cost,) * stages, tuple(tuple(comm * (x != y) for y in range(ranks)) for x in range(ranks)), (None,) * ranks)


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(0, 6), st.integers(1, 9))
def test_every_shape_verifies(name: str, ranks: int, more: int, m: int) -> None:
    schedule = verify_schedule(order_fixed(name, block_placement(ranks + more, ranks), m))
    assert schedule.microbatches == m and schedule == order_fixed(name, schedule.placement, m)
    simulate(schedule, uniform(ranks + more, ranks))


@pytest.mark.parametrize("name, idle", [("gpipe", 8), ("1f1b", 8), ("zb-h1", 4)])
@pytest.mark.parametrize("p, m", [(1, 3), (4, 4), (4, 9), (8, 24)])
def test_bubble_formula(name: str, idle: int, p: int, m: int) -> None:
    timeline = simulate(order_fixed(name, block_placement(p, p), m), uniform(p, p))
    assert timeline.makespan == pytest.approx(m * 8 + (p - 1) * idle)


def test_memory_formulas() -> None:
    p, m = 6, 12
    peak = {name: simulate(order_fixed(name, block_placement(p, p), m), uniform(p, p)).peak for name in NAMES}
    assert peak["gpipe"] == (m * 10,) * p
    assert peak["1f1b"] == tuple((p - i) * 10 for i in range(p))
    assert peak["zb-h1"] == tuple((p - i) * 10 + i * 4 for i in range(p))
    assert peak["zb-h2"] == tuple((2 * (p - i) - 1) * 10 + 2 * i * 4 for i in range(p))


ROWS = json.loads((Path(__file__).parents[1] / "data" / "paper_rows.json").read_text())["rows"]


@pytest.mark.parametrize("name, column", [("1f1b", "1F1B"), ("zb-h1", "ZB-H1"), ("zb-h2", "ZB-H2")])
def test_paper_rates_to_four_decimals(name: str, column: str) -> None:
    for row in ROWS:
        p = row["ranks"]
        costs = uniform(p, p, row["T_F"], row["T_B"], row["T_W"], row["T_comm"], row["M_B"], row["M_W"])
        timeline = simulate(order_fixed(name, block_placement(p, p), row["microbatches"]), costs)
        assert round(timeline.bubble_span, 4) == pytest.approx(row["paper_bubble"][column], abs=1.01e-4 / 2), row


def test_refusals() -> None:
    with pytest.raises(InputError, match="gpipe, 1f1b, zb-h1, zb-h2, interleaved-1f1b"):
        order_fixed("1f2b", (0, 1), 2)
    with pytest.raises(InputError, match="at least one"):
        order_fixed("gpipe", (0, 1), 0)
    with pytest.raises(ScheduleError, match="one block of consecutive stages"):
        order_fixed("1f1b", (0, 1, 1, 0), 2)
    with pytest.raises(InputError, match="ranks=3"):
        block_placement(2, 3)
