"""What people look at of a schedule: a grid of the timeline (a row per rank, time to the right) and a table of figures.

Colour tells F, B and W apart; without colour the letters do: each cell of the grid begins with the action's letter. What takes
no time (an update, a validation) is a letter of one column before what follows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from zbfx.ir import CostModel, Span, Timeline
from zbfx.text import format_bytes

STYLES = {"F": "black on bright_blue", "B": "black on bright_green", "W": "black on bright_yellow", "BW": "black on bright_cyan"}
STYLES |= {"U": "white on magenta", "V": "white on red", "S": "white on red", "L": "white on red"}
STYLES |= {"G": "white on red", "T": "white on red"}
_SECOND_CHUNK = {"F": "white on blue", "B": "white on green", "W": "black on yellow", "BW": "white on cyan"}
_IDLE = "·"
_NAMES = {"F": "F forward", "B": "B input gradient", "W": "W weight gradient", "BW": "D both gradients"}
_WEIGHTS = {
    "U": "U update",
    "V": "V validation: state of all gradients comes back",
    "S": "S state so far, passed on",
    "L": "L loss known",
    "G": "G gradients complete",
    "T": "T tied gradients meet",
}


def timeline_grid(timeline: Timeline, *, width: int = 120, max_bands: int = 4) -> Text:
    """The timeline as text of at most `width` columns: per rank one row of cells such as `F12`, `·` where it idles.

    A column is the same stretch of time in all rows. A long timeline is folded into bands below one another, at most `max_bands`.
    A microbatch's number is shown where its cell has room; a rank's second and further stages are drawn in the darker shade.
    """
    label = len(str(len(timeline.spans) - 1)) + 6
    columns = max(width - label, 10)
    spare = max((_trailing(rank) for rank in timeline.spans), default=0)
    start = min((rank[0].start for rank in timeline.spans if rank), default=0.0)
    bands = _count_bands(timeline, columns, max_bands)
    scale = max(columns * bands - spare, 1) / timeline.makespan if timeline.makespan > 0 else 0.0
    rows = [_draw_rank(rank, start, scale, columns, bands) for rank in timeline.spans]
    grid = Text(no_wrap=True, overflow="crop")
    for band in range(bands):
        for r, row in enumerate(rows):
            grid.append(f"rank {r}".ljust(label))
            grid.append_text(row[band * columns : (band + 1) * columns])
            grid.append("\n")
        left, right = (format_seconds(timeline.makespan * x / bands) for x in (band, band + 1))
        grid.append(" " * label + left + right.rjust(columns - len(left)) + "\n")
    _draw_legend(grid, timeline, label, width)
    return grid


def summary_table(rows: Sequence[tuple[str, Timeline, CostModel]]) -> Table:
    """One line per (name, timeline, costs): span, makespan, both bubbles, and the largest peak against its limit."""
    table = Table(title=None, pad_edge=False)
    table.add_column("schedule")
    for name in ("span", "makespan", "bubble", "with barrier", "peak", "limit"):
        table.add_column(name, justify="right")
    for name, timeline, costs in rows:
        peak, limit = max(timeline.peak, default=0), max((x for x in costs.limit if x is not None), default=None)
        table.add_row(
            name,
            format_seconds(timeline.span),
            format_seconds(timeline.makespan),
            f"{timeline.bubble_span:.2%}",
            f"{timeline.bubble_makespan:.2%}",
            format_bytes(peak),
            "none" if limit is None else format_bytes(limit),
        )
    return table


def memory_table(timeline: Timeline, costs: CostModel) -> Table:
    """Per rank: work, idle time inside the span, peak and limit."""
    table = Table(title=None, pad_edge=False)
    table.add_column("rank")
    for name in ("work", "idle", "peak", "limit"):
        table.add_column(name, justify="right")
    for r, rank in enumerate(timeline.spans):
        work = sum(s.end - s.start for s in rank)
        idle = (rank[-1].end - rank[0].start - work) if rank else 0.0
        limit = costs.limit[r]
        room = "none" if limit is None else format_bytes(limit)
        table.add_row(str(r), format_seconds(work), format_seconds(max(idle, 0.0)), format_bytes(timeline.peak[r]), room)
    return table


def format_seconds(seconds: float) -> str:
    """Four digits with the unit that fits: 12.35 s, 1.482 ms, 20.1 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds:.4g} s"


def _count_bands(timeline: Timeline, columns: int, most: int) -> int:
    """As many bands as give the average action three columns."""
    lengths = [s.end - s.start for rank in timeline.spans for s in rank if s.end > s.start]
    if not lengths:
        return 1
    needed = 3 * timeline.makespan * len(lengths) / (sum(lengths) * columns)
    return max(1, min(most, round(needed)))


def _draw_rank(rank: Sequence[Span], start: float, scale: float, band: int, bands: int) -> Text:
    """All of a rank's columns; no label is cut where a band ends."""
    row, columns = Text(), band * bands
    first_stage = min((s.action.stage for s in rank), default=0)
    at = 0
    for span in rank:
        left, right = (min(columns, round((t - start) * scale)) for t in (span.start, span.end))
        row.append(_IDLE * max(left - at, 0), style="dim")
        at = max(at, left)
        kind = span.action.kind
        if kind in _WEIGHTS and right == left and at < columns:
            row.append(kind, style=STYLES[kind])
            at += 1
        elif right > at:
            styles = STYLES if span.action.stage == first_stage or kind not in _SECOND_CHUNK else _SECOND_CHUNK
            row.append(_cell(kind, span.action.mb, right - at, band - at % band), style=styles[kind])
            at = right
    row.append(_IDLE * max(columns - at, 0), style="dim")
    return row


def _cell(kind: str, mb: int, width: int, room: int) -> str:
    """The letter, the microbatch as far as it fits, and for one that does not, the letter alone: no number is cut short."""
    letter = "D" if kind == "BW" else kind
    text = f"{letter}{mb}"
    return text.ljust(width) if len(text) <= min(width, room) else letter + " " * (width - 1)


def _trailing(rank: Sequence[Span]) -> int:
    """How many letters stand behind a rank's last cell."""
    count = 0
    for span in reversed(rank):
        if span.end > span.start:
            break
        count += 1
    return count


def _draw_legend(grid: Text, timeline: Timeline, label: int, width: int) -> None:
    """What the letters mean, those of the weights on lines of their own."""
    kinds = {s.action.kind for rank in timeline.spans for s in rank}
    grid.append(" " * label)
    for kind, name in _NAMES.items():
        if kind in kinds:
            grid.append(f" {name} ", style=STYLES[kind])
            grid.append("  ")
    grid.append(f"{_IDLE} idle\n")
    at = 0
    for kind, name in _WEIGHTS.items():
        if kind in kinds:
            if at and at + len(name) + 2 > width:
                grid.append("\n")
                at = 0
            grid.append(" " * label if not at else "  ")
            grid.append(f" {name} ", style=STYLES[kind])
            at += len(name) + 2 + (label if not at else 2)
    grid.append("\n" if at else "")
