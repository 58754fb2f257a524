"""How processes learn that another one failed or died: heartbeats and the first failure, as texts in torch's store.

Each process has a thread that writes `beat/<rank>` = "<count> <action>" and reads the others'. A rank is dead when its beat
has not changed for `dead_after` seconds, however slow its step is: the beats come from a thread of their own. A rank that
fails writes `failure`; the first to do so wins, and all ring their alarm with it. A rank that is done writes "left".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from zbfx.runtime.failures import Alarm, Failure, describe

LEFT = "left"


def report(store: dist.Store, failure: Failure) -> Failure:
    """Write `failure` unless there is one; the one that counts."""
    return Failure.from_json(store.compare_set("failure", "", failure.to_json()))


def last_action(store: dist.Store, rank: int) -> str:
    """What rank `rank` was doing when it last beat; "" if nothing."""
    if not store.check([f"beat/{rank}"]):
        return ""
    return store.get(f"beat/{rank}").decode().partition(" ")[2]


class Heartbeat:
    """This rank's thread. host: the rank whose process holds the store, -1 if the launcher does."""

    def __init__(
        self,
        store: dist.Store,
        index: int,
        size: int,
        alarm: Alarm,
        action: Callable[[], str],
        *,
        dead_after: float = 5.0,
        host: int = -1,
    ) -> None:
        self.index, self.size, self.dead_after = index, size, dead_after
        self._store, self._alarm, self._action, self._host = store, alarm, action, host
        self._interval = min(0.25, dead_after / 8)
        self._count = 0
        self._stop = threading.Event()
        now = time.monotonic()
        self._ticked = now
        self._seen = {rank: ("", now) for rank in range(size) if rank != index}  # rank -> (its last beat, when we first saw it)
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of rank {index}", daemon=True)

    def start(self) -> None:
        """Beat once, wait for everybody's first beat, and go on in the background. All ranks call it."""
        self._beat()
        self._store.wait([f"beat/{rank}" for rank in range(self.size)])
        self._ticked = time.monotonic()
        self._seen = {rank: ("", self._ticked) for rank in self._seen}
        self._alarm.listen(self._publish)
        self._thread.start()

    def look(self) -> None:
        """Ring the alarm if somebody has reported a failure, or has stopped beating."""
        if self._store.check(["failure"]):
            self._alarm.ring(Failure.from_json(self._store.get("failure")))
            return
        now = time.monotonic()
        if now - self._ticked > self.dead_after / 2:  # it is we who were asleep: everybody gets a new chance
            self._seen = {rank: (beat, now) for rank, (beat, _) in self._seen.items()}
        self._ticked = now
        beats = self._store.multi_get([f"beat/{rank}" for rank in self._seen]) if self._seen else []
        for rank, beat in zip(self._seen, (beat.decode() for beat in beats), strict=True):
            if beat != self._seen[rank][0]:
                self._seen[rank] = (beat, now)
            elif beat != LEFT and now - self._seen[rank][1] > self.dead_after:
                cause = f"no sign of life for {self.dead_after:g} s: the process is gone, or frozen"
                self._alarm.ring(Failure(rank, beat.partition(" ")[2], cause))

    def has_left(self, rank: int) -> bool:
        """True if that rank has ended in good order."""
        return self._seen[rank][0] == LEFT

    def leave(self, patience: float) -> None:
        """End in good order: say so, and stay reachable until all others have ended too (a failure or `patience` seconds end
        the wait): closing connections earlier could cut off what they are still receiving.
        """
        self._stop.set()
        self._thread.join()
        self._alarm.forget(self._publish)
        try:
            self._store.set(f"beat/{self.index}", LEFT)
            end = time.monotonic() + patience
            while self._alarm.failure is None and time.monotonic() < end and not all(map(self.has_left, self._seen)):
                self.look()
                time.sleep(0.02)
            if self._alarm.failure is not None and self._host == self.index:
                time.sleep(4 * self._interval)  # the store ends with this process: let the others read why first
        except RuntimeError:
            pass  # The store is gone, so its holder has ended: nobody is left to wait for.

    def _run(self) -> None:
        while not self._stop.wait(self._interval) and self._alarm.failure is None:
            self._tick()
        while not self._stop.wait(self._interval):  # after a failure: still alive, so that nobody takes us for dead as well
            try:
                self._beat()
            except RuntimeError:
                return

    def _tick(self) -> None:
        try:
            self._beat()
            self.look()
        except RuntimeError as error:
            self._alarm.ring(Failure(self._host, "", f"the store of the ranks does not answer: {describe(error)}"))

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"beat/{self.index}", f"{self._count} {self._action()}")

    def _publish(self, failure: Failure) -> None:
        """Tell everybody; that the store is gone is no reason to fail differently."""
        try:
            report(self._store, failure)
        except RuntimeError:
            return
