"""parse(str(x)) == x for actions, schedules in JSON and in torch's CSV, costs and sizes; errors show the place."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

from zbfx.errors import InputError, ScheduleError
from zbfx.ir import Action, Cost, CostModel, Schedule
from zbfx.passes.order_fixed import block_placement, order_fixed
from zbfx.text import (
    costs_from_json,
    format_bytes,
    parse_action,
    parse_size,
    schedule_from_csv,
    schedule_from_json,
    schedule_to_csv,
    schedule_to_json,
)

counts = st.integers(0, 99)
whole = st.builds(Action, counts, st.sampled_from(["F", "B", "W", "BW"]), counts)
actions = whole | st.builds(Action, counts, st.just("W"), counts, counts)
times = st.floats(0, 1e6)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
    ranks = draw(st.integers(1, 5))
    return order_fixed(name, block_placement(ranks + draw(st.integers(0, 4)), ranks), draw(st.integers(1, 6)))


@st.composite
def cost_models(draw: st.DrawFn, stages: int, ranks: int) -> CostModel:
    byte = st.integers(-(10**12), 10**12)
    rows = draw(st.lists(st.builds(Cost, times, times, times, byte, byte, byte, counts), min_size=stages, max_size=stages))
    comm = draw(st.lists(st.tuples(*[times] * ranks), min_size=ranks, max_size=ranks))
    return CostModel(tuple(rows), tuple(comm), draw(st.tuples(*[st.none() | st.integers(0, 10**12)] * ranks)))


@given(actions)
def test_action_round_trip(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(whole)
def test_torch_reads_our_letters(action: Action) -> None:
    cell = schedule_to_csv(Schedule((0,), ((action,),))).strip()
    theirs = _Action.from_str(cell)
    assert str(theirs) == cell and (theirs.stage_index, theirs.microbatch_index) == (action.stage, action.mb)
    meaning = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}
    assert meaning[theirs.computation_type.name] == action.kind


@given(schedules())
def test_schedule_round_trips(schedule: Schedule) -> None:
    back = schedule_from_json(schedule_to_json(schedule))
    assert back == schedule and back.name == schedule.name
    assert schedule_from_csv(schedule_to_csv(schedule)) == schedule


@given(st.data())
def test_costs_round_trip(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = data.draw(cost_models(schedule.num_stages, len(schedule.ranks)))
    text = schedule_to_json(schedule, costs, seconds=1.5, objective="span")
    assert costs_from_json(text) == costs and schedule_from_json(text) == schedule
    assert json.loads(text)["seconds"] == 1.5


def test_costs_forms() -> None:
    text = json.dumps({"num_ranks": 2, "costs": {"F": [1, 2], "B": [1, 2], "W": [0, 1], "comm": 3}, "limit": 100})
    assert costs_from_json(text) == CostModel((Cost(1, 1, 0), Cost(2, 2, 1)), ((0, 3), (3, 0)), (100, 100))
    assert costs_from_json(schedule_to_json(order_fixed("gpipe", (0, 1), 1))) is None


@pytest.mark.parametrize(
    "text, count", [("24GiB", 24 * 2**30), ("512 MiB", 2**29), ("100", 100), ("1.5KiB", 1536), ("2gb", 2 * 10**9), ("1e3", 1000)]
)
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count
    assert parse_size(count) == count


@given(st.integers(0, 999), st.sampled_from([1, 2**10, 2**20, 2**30, 2**40]))
def test_format_bytes_of_whole_units(number: int, unit: int) -> None:
    assert parse_size(format_bytes(number * unit)) == number * unit


@pytest.mark.parametrize("text", ["", "x", "-5", "3 elephants", "1.2.3GiB", True, None])
def test_no_size(text: str) -> None:
    with pytest.raises(InputError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0F", "0F1.2", "0B1.0", "0F-1", " 0F0", "0F0 ", 7])
def test_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"ranks\[0\]\[3\]: .* is no action"):
        parse_action(text, "ranks[0][3]")


GOOD = json.loads(schedule_to_json(order_fixed("zb-h1", (0, 1), 2)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": "zbfx-schedule/2"}, "zbfx-schedule/2"),
        ({"ranks": [["0F0"], ["1F0", "1Q0"]]}, r"my.json: ranks\[1\]\[1\]: '1Q0'"),
        ({"ranks": [["0F0"], "1F0"]}, r"ranks\[1\]: expected a list"),
        ({"ranks": None}, "'ranks' must be a list"),
        ({"placement": [0, -1]}, r"placement\[1\] = -1"),
        ({"placement": [0, 1.0]}, r"placement\[1\] = 1.0"),
        ({"microbatches": 3}, "microbatches = 3, but the actions speak of 2"),
    ],
)
def test_json_errors_show_the_place(change: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule_from_json(json.dumps(GOOD | change), "my.json")


@pytest.mark.parametrize(
    "costs, message",
    [
        ({"F": [1], "B": [1, 2], "W": [1]}, r"lengths \[1, 2, 1"),
        ({"F": [1], "B": ["1"], "W": [1]}, r"B\[0\] = '1'"),
        ({"F": [1], "B": [1]}, "'W' must be a list"),
        ({"F": [1], "B": [1], "W": [1], "comm": [[0]]}, "2 x 2 matrix"),
    ],
)
def test_cost_errors_show_the_place(costs: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        costs_from_json(json.dumps(GOOD | {"costs": costs}), "my.json")


def test_broken_json_shows_line_and_column() -> None:
    with pytest.raises(ScheduleError, match="line 2, column 2"):
        schedule_from_json("{\n ,}")


def test_csv_forms() -> None:
    text = "0F0,,0F1,0B0,0B1\n"
    assert [str(a) for a in schedule_from_csv(text).ranks[0]] == ["0F0", "0F1", "0BW0", "0BW1"]
    overlap = "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1\n"
    assert [str(a) for a in schedule_from_csv(overlap).ranks[0]] == ["0F0", "0F1", "0B0", "0W0", "0BW1"]
    parts = Schedule((0,), (tuple(map(parse_action, ["0F0", "0B0", "0W0.0", "0W0.1"])),))
    assert schedule_to_csv(parts) == "0F0,0I0,0W0\n"


@pytest.mark.parametrize(
    "text, message",
    [("0F0,0SEND_F0", "line 1, cell 2"), ("0F0\n0B0", "stage 0 is on rank 0"), ("0F0\n2F0", "no rank runs stage 1")],
)
def test_csv_errors_show_the_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule_from_csv(text)


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (parse_action, schedule_from_json, schedule_from_csv):
        with contextlib.suppress(ScheduleError):
            parse(text)
