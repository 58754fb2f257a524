"""A training run as it goes: a progress bar on a terminal, a line now and then otherwise."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_BLOCKS = "▁▂▃▄▅▆▇█"


class TrainingBar:
    """A context manager; `advance` after each step. unit: what `count` counts, tokens or samples.

    lines: how many lines a run prints where there is no terminal.
    """

    def __init__(self, console: Console, steps: int, unit: str, *, lines: int = 10) -> None:
        self.console, self.steps, self.unit = console, steps, unit
        self._every = max(1, steps // lines)
        self._done, self._count, self._seconds = 0, 0, 0.0
        self._last = time.perf_counter()
        self._task: TaskID | None = None
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)

    def __enter__(self) -> TrainingBar:
        self._progress.start()
        self._task = self._progress.add_task("", total=self.steps, loss="", rate="")
        self._last = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def advance(self, loss: float, count: int) -> None:
        """A step has ended: its loss (NaN: not known yet), and how many tokens or samples it trained on. The first step, a
        warm-up, is not timed."""
        shown = "comes with the next step" if math.isnan(loss) and not self._done else f"{loss:.3f}"
        now = time.perf_counter()
        if self._done:
            self._seconds += now - self._last
            self._count += count
        self._last = now
        self._done += 1
        if self._task is not None:
            self._progress.update(self._task, advance=1, loss=shown, rate=self.rate)
        if not self.console.is_terminal and (self._done == 1 or self._done % self._every == 0 or self._done == self.steps):
            width = len(str(self.steps))
            self.console.print(f"step {self._done:{width}}/{self.steps}  loss {shown}  {self.rate}".rstrip(), highlight=False)

    @property
    def per_second(self) -> float:
        """Tokens or samples per second since the first step."""
        return self._count / self._seconds if self._seconds else 0.0

    @property
    def rate(self) -> str:
        """`3,120 tokens/s`; empty before the second step."""
        return f"{format_rate(self.per_second)} {self.unit}/s" if self._seconds else ""


def format_rate(rate: float) -> str:
    """Three digits or whole: 0.52, 12.4, 3,120."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def sparkline(values: list[float], width: int = 40) -> str:
    """Values as a row of at most `width` blocks, lowest to highest; each block is the mean of its stretch."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [len(values) * i // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((m - low) * scale)] for m in means)
