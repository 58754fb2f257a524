"""Interleaved and V schedules: every shape verifies or is refused with the reason; bubbles and memory as their formulas say."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbfx.errors import InputError, ScheduleError
from zbfx.ir import Cost, CostModel, Timeline
from zbfx.passes.order_chunks import CHUNKED
from zbfx.passes.order_fixed import order_fixed
from zbfx.passes.placements import build_placement, name_placement
from zbfx.passes.simulate import simulate
from zbfx.verify import verify_schedule

P, M = 8, 24


def costs(p: int, v: int, f: float = 4, b: float = 4, w: float = 4, comm: float = 0) -> CostModel:
    cost = Cost(f / v, b / v, w / v, 12 // v, -8 // v, -4 // v)
    return CostModel((cost,) * (p * v), tuple(tuple(comm * (x != y) for y in range(p)) for x in range(p)), (None,) * p)


def run(name: str, v: int, *, w: float = 4, p: int = P, m: int = M) -> Timeline:
    return simulate(order_fixed(name, build_placement(CHUNKED[name][1], p, v), m), costs(p, v, w=w))


@given(st.sampled_from(sorted(CHUNKED)), st.integers(1, 7), st.integers(1, 4), st.integers(1, 18))
def test_every_shape_verifies_or_is_refused(name: str, p: int, v: int, m: int) -> None:
    v = 2 if CHUNKED[name][1] == "v" else v
    placement = build_placement(CHUNKED[name][1], p, v)
    if name == "dualpipe-v" and m < 2 * p:
        with pytest.raises(InputError, match=f"at least 2p = {2 * p}"):
            order_fixed(name, placement, m)
        return
    schedule = verify_schedule(order_fixed(name, placement, m))
    assert schedule.microbatches == m and schedule == order_fixed(name, placement, m)


@pytest.mark.parametrize("v", [2, 4])
def test_interleaved_formulas(v: int) -> None:
    timeline = run("interleaved-1f1b", v, w=2)
    assert timeline.span == pytest.approx(M * 10 + (P - 1) * 10 / v)
    assert timeline.peak == tuple(((v - 1) * P + 2 * (P - 1 - i) + 1) * 12 // v for i in range(P))


@pytest.mark.parametrize("v", [2, 4])
def test_interleaved_zb_formulas(v: int) -> None:
    assert run("interleaved-zb", v).span == pytest.approx(M * 12 + (P - 1) * 4 / v)
    assert run("interleaved-zb", v).peak == tuple((((v - 1) * P + P - i) * 12 + i * 4) // v for i in range(P))


def test_looped_bfs_formulas() -> None:
    timeline = run("looped-bfs", 2)
    assert timeline.span == pytest.approx(M * 12 + (P - 1) * 12 / 2) and timeline.peak == (M * 12,) * P


def test_zb_v_has_no_bubble_where_all_times_are_equal() -> None:
    timeline = run("zb-v", 2)
    assert timeline.bubble_span == pytest.approx(0) and timeline.peak == (P * 12,) * P


@pytest.mark.parametrize("p", [4, 6, 8, 16])
def test_v_half_and_v_min_memory(p: int) -> None:
    assert max(run("v-half", 2, p=p, m=3 * p).peak) <= (p / 2 + 1) * 12
    assert max(run("v-min", 2, p=p, m=3 * p).peak) <= (p / 3 + 2) * 12


def test_building_blocks_lose_nothing_in_the_steady_state() -> None:
    for name in ("v-half", "v-min"):
        assert run(name, 2, m=60).span - run(name, 2, m=40).span == pytest.approx(20 * 12)


def test_dualpipe_memory() -> None:
    assert max(run("dualpipe-v", 2).peak) <= (P + 1) * 12


ROWS = json.loads((Path(__file__).parents[1] / "data" / "paper_rows.json").read_text())["rows"]


def test_interleaved_matches_the_paper_to_0_4_points() -> None:
    for row in ROWS:
        p, v = row["ranks"], row["interleaved_chunks"]
        model = costs(p, v, row["T_F"], row["T_B"], row["T_W"], row["T_comm"])
        timeline = simulate(order_fixed("interleaved-1f1b", build_placement("interleaved", p, v), row["microbatches"]), model)
        assert timeline.bubble_span == pytest.approx(row["paper_bubble"]["1F1B-I"], abs=0.004)


def test_wrong_placement_is_refused() -> None:
    with pytest.raises(ScheduleError, match="zb-v needs the v placement"):
        order_fixed("zb-v", (0, 1, 0, 1), 4)


@given(st.sampled_from(["linear", "interleaved", "v", "zigzag"]), st.integers(2, 6), st.sampled_from([None, 2, 4]))
def test_placements_know_their_names(name: str, p: int, chunks: int | None) -> None:
    if name == "v" and chunks == 4:
        chunks = None
    usual = {"linear": 1, "interleaved": 2, "v": 2, "zigzag": 4}[name]
    label = name_placement(build_placement(name, p, chunks))
    same = {("zigzag", 2): "v"}.get((name, chunks or usual))
    assert label == (same or (name if chunks in (None, usual) else f"{name}-{chunks}"))


@pytest.mark.parametrize("name, chunks", [("v", 4), ("zigzag", 3), ("linear", 0), ("spiral", None)])
def test_impossible_placements(name: str, chunks: int | None) -> None:
    with pytest.raises(InputError):
        build_placement(name, 4, chunks)
