"""Heartbeats over a real store, without processes: who is dead, who is slow, who has left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from zbfx.runtime.failures import Alarm, Failure
from zbfx.runtime.heartbeat import LEFT, Heartbeat, last_action, report


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def beats(store: dist.TCPStore, size: int, dead_after: float = 0.8) -> list[tuple[Heartbeat, Alarm]]:
    """Heartbeats of `size` ranks, started."""
    alarms = [Alarm() for _ in range(size)]
    all_ = [
        Heartbeat(store.clone(), r, size, alarms[r], lambda r=r: f"{r}F5", dead_after=dead_after)  # type: ignore[misc]
        for r in range(size)
    ]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(Heartbeat.start, all_))
    return list(zip(all_, alarms, strict=True))


def test_silence_is_death_and_names_the_last_action(store: dist.TCPStore) -> None:
    (first, alarm), (second, _) = beats(store, 2)
    time.sleep(1.2)
    assert alarm.failure is None  # beats alone prove life
    second._stop.set()
    failure = alarm.wait(5)
    first._stop.set()
    assert failure == Failure(1, "1F5", "no sign of life for 0.8 s: the process is gone, or frozen")


def test_the_first_report_counts_and_reaches_all(store: dist.TCPStore) -> None:
    ranks = beats(store, 3)
    failure = ranks[2][1].ring(Failure(2, "2B0", "ValueError: x"))
    assert [alarm.wait(5) for _, alarm in ranks] == [failure] * 3
    assert report(store, Failure(0, "", "later")) == failure
    assert last_action(store, 1) == "1F5" and last_action(store, 7) == ""
    for heart, _ in ranks:
        heart.leave(1)


def test_leaving_is_not_dying(store: dist.TCPStore) -> None:
    (first, alarm), (second, _) = beats(store, 2)
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(second.leave, 30)
        time.sleep(1.5)
        assert alarm.failure is None and first.has_left(1) and not leaving.done()
        first.leave(30)
        leaving.result(5)
    assert store.get("beat/0") == LEFT.encode()


def test_a_lost_store_is_a_failure() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ((heart, alarm),) = beats(store, 1)
    del store
    failure = alarm.wait(10)
    heart._stop.set()
    assert failure is not None and failure.rank == -1 and "store of the ranks does not answer" in failure.cause
