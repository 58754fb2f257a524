"""What the verbs refuse, and how they say it; spans; failures as text."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.workers import bare_rank
from zbfx.errors import RankError
from zbfx.runtime import Alarm, Exchange, Failure, Rank, Recorder, execute, run_threads

MESSAGES = {"1F": (0, 1, (("float32", (2, 3), (3, 1)),)), "1F7": (0, 1, ()), "0B": (1, 0, (("float7", (2,), (1,)),))}

REFUSED: dict[str, tuple[Callable[[Rank], Any], str]] = {
    "shape": (lambda r: r.send("1F0", torch.ones(3, 2)), r"declares float32\[2, 3\] .* sends float32\[3, 2\]"),
    "stride": (lambda r: r.send("1F0", torch.ones(3, 2).t()), r"strides \(3, 1\), the program sends .* \(1, 2\)"),
    "dtype": (lambda r: r.send("1F0", torch.ones(2, 3).double()), "sends float64"),
    "number": (lambda r: r.send("1F0"), "sends nothing"),
    "one microbatch's own": (lambda r: r.send("1F7", torch.ones(2, 3)), "declares nothing"),
    "conjugate": (lambda r: r.send("1F0", torch.ones(2, 3, dtype=torch.complex64).conj()), "resolve_conj"),
    "unknown message": (lambda r: r.send("3F0", torch.ones(1)), "3F0 is not in MESSAGES, which has 1F, 1F7, 0B"),
    "wrong end": (lambda r: r.post("1F0"), "from rank 0 to 1; rank 0 is not its receiver"),
    "dtype name": (lambda r: r.post("0B0"), "'float7'"),
    "recv without post": (lambda r: r.recv("0B0"), "0B0 is not under way"),
    "sent without send": (lambda r: r.sent("1F0"), "1F0 is not under way"),
    "sent twice": (lambda r: [r.send("1F0", torch.ones(2, 3)) for _ in "ab"], "1F0 is under way already"),
    "params": (lambda r: r.params(4), "no parameters of stage 4"),
    "inputs": (lambda r: r.inputs(4, 2), "no inputs of stage 4 for microbatch 2"),
    "gradients": (lambda r: r.accumulate(0, (None,)), "stage 0 has 2 gradients, the program accumulates 1"),
    "weight": (lambda r: r.loss(1, torch.ones(())), "no weight for the loss of microbatch 1: there are 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_verbs_refuse_with_the_rank_and_the_action(what: str) -> None:
    step, says = REFUSED[what]
    channel, _ = Exchange(2).channels()
    weights, params = [torch.ones(())], {0: (torch.ones(1), torch.ones(2))}
    rank = Rank(0, channel, messages=MESSAGES, params=params, grads=params, inputs={}, weights=weights)

    def whole(rank: Rank) -> None:
        rank.begin("0F2")
        step(rank)

    with pytest.raises(RankError, match=f"^rank 0 failed at 0F2: .*{says}"):
        execute(rank, whole)


@pytest.mark.parametrize("shape, stride", [((2, 3), (4, 1)), ((2, 3), (0, 1)), ((4,), (2,)), ((2, 2), (1, 1))])
def test_only_dense_tensors_travel(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    channel, _ = Exchange(2).channels()
    with pytest.raises(RankError, match=r"message 1F: .* has holes or overlaps"):
        bare_rank(channel, {"1F": (0, 1, (("float32", shape, stride),))})


def test_strides_that_address_nothing_do_not_matter() -> None:
    messages = {"1F": (0, 1, (("float32", (1, 3), (3, 1)), ("float32", (0, 2), (2, 1))))}

    def sender(rank: Rank) -> None:
        rank.send("1F0", torch.ones(3).as_strided((1, 3), (17, 1)), torch.empty(2, 0).t())
        rank.sent("1F0")

    def receiver(rank: Rank) -> None:
        rank.post("1F0")
        assert rank.recv("1F0")[0].sum() == 3

    run_threads([bare_rank(channel, messages) for channel in Exchange(2).channels()], [sender, receiver])


def test_spans_separate_waiting_from_work() -> None:
    messages = {"1F": (0, 1, (("float32", (1,), (1,)),))}

    def sender(rank: Rank) -> None:
        rank.begin("0F0")
        time.sleep(0.2)
        rank.send("1F0", torch.ones(1))
        rank.begin("0F1")
        rank.sent("1F0")

    def receiver(rank: Rank) -> None:
        rank.post("1F0")
        rank.begin("1F0")
        rank.recv("1F0")
        time.sleep(0.1)
        rank.begin("1B0")

    ranks = [bare_rank(channel, messages) for channel in Exchange(2).channels()]
    for rank in ranks:
        rank.recorder = Recorder(times=True)
    run_threads(ranks, [sender, receiver])
    first, second = ranks[0].recorder.spans()
    assert (first.action, second.action, first.end) == ("0F0", "0F1", second.start)
    assert 0.2 <= first.end - first.start < 2 and first.stalled == 0
    waits, _ = ranks[1].recorder.spans()
    assert 0.1 <= waits.stalled < 2 and 0.1 <= waits.end - waits.start < 2
    assert abs(waits.start - waits.stalled - (ranks[0].recorder.origin - ranks[1].recorder.origin)) < 1


@given(st.integers(-1, 99), st.text(), st.text())
def test_failures_travel_as_text(rank: int, action: str, cause: str) -> None:
    failure = Failure(rank, action, cause)
    assert Failure.from_json(failure.to_json()) == failure


def test_a_damaged_report_is_still_a_failure() -> None:
    assert "unreadable" in str(Failure.from_json(b"{"))


def test_an_alarm_rings_once() -> None:
    alarm, heard = Alarm(), []
    first, second = Failure(0, "0F0", "a"), Failure(1, "", "b")
    alarm.listen(heard.append)
    assert alarm.ring(first) == alarm.ring(second) == first
    alarm.listen(heard.append)
    assert heard == [first, first]
    with pytest.raises(RankError, match="rank 0 failed at 0F0: a"):
        alarm.check()
    alarm.reset()
    alarm.check()
    assert str(second) == "rank 1 failed outside a step: b"
