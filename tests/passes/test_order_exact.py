"""Proofs of optimality: known optima, agreement of the lower bounds with them, and what happens without OR-Tools or time."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbfx.errors import InputError
from zbfx.ir import Cost, CostModel
from zbfx.passes.order_exact import order_exact
from zbfx.passes.order_search import order_auto
from zbfx.passes.placements import build_placement

pytest.importorskip("ortools", reason="the extra zbfx[exact] is not installed")


def model(chunks: int, share: float) -> CostModel:
    cost = Cost(20 / chunks, 20 / chunks, 20 / chunks, 4 // chunks, 0, -4 // chunks)
    return CostModel(
        (cost,) * (4 * chunks), tuple(tuple(2.0 * (a != b) for b in range(4)) for a in range(4)), (int(share * 16),) * 4
    )


@pytest.mark.parametrize(
    "share, m, optimum", [(1, 4, 312), (1, 6, 444), (1, 8, 564), (1, 12, 804), (2, 4, 312), (2, 6, 392), (2, 8, 484)]
)
def test_known_optima(share: int, m: int, optimum: int) -> None:
    solution = order_exact(build_placement("linear", 4), m, model(1, share), seconds=120)
    assert solution.timeline.span == optimum and solution.bound_span == pytest.approx(optimum)
    assert "optimal" in solution.why and solution.gap == pytest.approx(0)


@settings(max_examples=8)
@given(
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 4),
    st.tuples(*[st.integers(0, 3)] * 3),
    st.integers(0, 2),
    st.integers(2, 7),
    st.data(),
)
def test_bounds_never_exceed_the_optimum(
    p: int, folded: bool, m: int, times: tuple[int, int, int], comm: int, limit: int, data: st.DataObject
) -> None:
    placement = build_placement("v" if folded else "linear", p)
    kept = data.draw(st.integers(0, 2))
    costs = CostModel(
        (Cost(*map(float, times), 2, kept - 2, -kept),) * len(placement),
        tuple(tuple(float(comm * (a != b)) for b in range(p)) for a in range(p)),
        (2 * len(placement) // p - 2 + limit,) * p,
    )
    objective = data.draw(st.sampled_from(["span", "makespan"]))
    start = order_auto(placement, m, costs, objective=objective, seconds=0.01)
    solution = order_exact(placement, m, costs, objective=objective, seconds=6)
    found = getattr(solution.timeline, objective)
    assert getattr(start, f"bound_{objective}") <= found + 1e-6 and found <= getattr(start.timeline, objective) + 1e-9


def test_out_of_time_gives_the_best_found_with_its_bound() -> None:
    placement = build_placement("v", 4)
    solution = order_exact(placement, 8, model(2, 0.5), seconds=0.5)
    assert solution.bound_span <= solution.timeline.span


def test_without_or_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(InputError, match=r"pip install 'zbfx\[exact\]'"):
        order_exact((0,), 1, CostModel((Cost(1, 1, 1),), ((0,),), (None,)))
