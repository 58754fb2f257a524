"""The schedule verifier refuses each kind of broken schedule, and its message shows the rank's actions with an arrow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbfx.errors import ScheduleError
from zbfx.ir import Action, Schedule
from zbfx.passes.order_fixed import block_placement, order_fixed
from zbfx.text import parse_action
from zbfx.verify import verify_schedule


def build(placement: tuple[int, ...], *ranks: str) -> Schedule:
    return Schedule(placement, tuple(tuple(map(parse_action, row.split())) for row in ranks))


def test_accepts_whole_and_split_backwards() -> None:
    schedule = build((0, 1), "0F0 0F1 0BW0 0BW1", "1F0 1B0 1F1 1W0.0 1B1 1W0.1 1W1.0 1W1.1")
    assert verify_schedule(schedule) is schedule


@pytest.mark.parametrize(
    "schedule, message",
    [
        (build((), ""), "at least one stage"),
        (build((0, 2), "0F0 0BW0", "1F0 1BW0"), r"placement\[1\] = 2"),
        (build((0,), "0F0 1F0"), "1F0: there are 1 stages"),
        (build((0, 1), "0F0 1F0 0BW0", "1BW0"), "1F0 on rank 0, but placement puts stage 1 on rank 1"),
        (build((0,), "0F1 0F0 0BW0 0BW1"), "0F1: F of stage 0 must run in microbatch order; next is 0F0"),
        (build((0,), "0F0 0F0 0BW0"), "next is 0F1"),
        (build((0,), "0B0 0F0 0W0"), "0B0 before 0F0"),
        (build((0,), "0BW0 0F0"), "0BW0 before 0F0"),
        (build((0,), "0F0 0W0 0B0"), "0W0 before 0B0"),
        (build((0,), "0F0 0BW0 0W0"), "next is 0W1"),
        (build((0,), "0F0 0F1 0B0 0BW1 0W0"), r"0BW1: W of stage 0 .* next is 0W0"),
        (build((0,), "0F0 0B0 0W0.1 0W0.0"), r"0W0.1: .* next is 0W0.0"),
        (build((0,), "0F0 0B0"), "0W0 is missing"),
        (build((0, 1), "0F0 0F1 0B0 0W0", "1F0 1F1 1BW0 1BW1"), "0B1 is missing"),
        (
            build((0, 1), "0F0 0BW0 0F1 0BW1", "1F0 1F1 1BW0 1BW1"),
            "deadlock: rank 0 stands at 0BW0 and waits for 1B0 of rank 1; rank 1 stands at 1F1",
        ),
    ],
)
def test_refuses(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify_schedule(schedule)


def test_message_shows_the_actions_around_the_fault() -> None:
    rank = list(order_fixed("zb-h1", (0,), 9).ranks[0])
    rank[12], rank[13] = rank[13], rank[12]
    with pytest.raises(ScheduleError) as e:
        verify_schedule(Schedule((0,), (tuple(rank),)))
    lines = str(e.value).splitlines()
    assert lines[1] == "rank 0, actions 7 to 17 of 27:" and len(lines) == 13
    assert [line for line in lines if "-->" in line] == ["  --> [12] 0B4"]


@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.data())
def test_a_lost_action_is_noticed(p: int, m: int, name: str, data: st.DataObject) -> None:
    schedule = order_fixed(name, block_placement(p, p), m)
    rank = data.draw(st.integers(0, p - 1))
    lost = data.draw(st.integers(0, len(schedule.ranks[rank]) - 1))
    kept: tuple[Action, ...] = schedule.ranks[rank][:lost] + schedule.ranks[rank][lost + 1 :]
    broken = Schedule(schedule.placement, (*schedule.ranks[:rank], kept, *schedule.ranks[rank + 1 :]))
    with pytest.raises(ScheduleError):
        verify_schedule(broken)
