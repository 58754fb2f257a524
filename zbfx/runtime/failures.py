"""How ranks learn that one of them failed: a Failure that travels as text, and an Alarm that rings once.

The first failure wins. Everything that follows (closed connections, interrupted waits) is a consequence, and every rank
reports the first one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

from zbfx.errors import RankError


@dataclass(frozen=True, slots=True)
class Failure:
    """Which rank failed (-1: what launched them), at which action ("" outside a step), and why. `str` is what users read."""

    rank: int
    action: str
    cause: str

    def __str__(self) -> str:
        place = f"at {self.action}" if self.action else "outside a step"
        who = f"rank {self.rank}" if self.rank >= 0 else "the launcher"
        return f"{who} failed {place}: {self.cause}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Failure:
        """The failure written by to_json; what cannot be read becomes the cause, for a damaged report is still a failure."""
        try:
            data = json.loads(text)
            return Failure(int(data["rank"]), str(data["action"]), str(data["cause"]))
        except (ValueError, TypeError, KeyError):
            return Failure(-1, "", f"unreadable failure report {text!r}")


def describe(error: BaseException) -> str:
    """`ValueError: what it said`, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Alarm:
    """Rings once, with the first failure, and tells its listeners. Shared by the threads that must stop together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rung = threading.Event()
        self._listeners: list[Callable[[Failure], None]] = []
        self.failure: Failure | None = None

    def listen(self, listener: Callable[[Failure], None]) -> None:
        """Call `listener` with the failure, in the thread that rings (at once when it has rung already)."""
        with self._lock:
            self._listeners.append(listener)
            failure = self.failure
        if failure is not None:
            listener(failure)

    def forget(self, listener: Callable[[Failure], None]) -> None:
        """Undo `listen`; nothing where it was not listening."""
        with self._lock:
            self._listeners = [known for known in self._listeners if known != listener]

    def ring(self, failure: Failure) -> Failure:
        """Report `failure`; returns the one that counts, which is an earlier one if there was one."""
        with self._lock:
            if self.failure is not None:
                return self.failure
            self.failure = failure
            listeners = tuple(self._listeners)
        self._rung.set()
        for listener in listeners:
            listener(failure)
        return failure

    def wait(self, seconds: float) -> Failure | None:
        """The failure, waiting up to `seconds` for one."""
        self._rung.wait(seconds)
        return self.failure

    def check(self) -> None:
        """RankError if the alarm has rung."""
        if self.failure is not None:
            raise RankError(str(self.failure))

    def reset(self) -> None:
        """Ready to ring again."""
        with self._lock:
            self.failure = None
            self._rung.clear()
