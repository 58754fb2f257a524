"""The grid of a timeline: golden at 80 columns without colour, never wider than asked, styled by kind."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from zbfx.ir import Cost, CostModel
from zbfx.passes.order_fixed import order_fixed
from zbfx.passes.simulate import simulate
from zbfx.view_schedule import STYLES, format_seconds, memory_table, summary_table, timeline_grid

COSTS = CostModel((Cost(3.0, 3.0, 2.0, 10, -6, -4),) * 4, ((0.5,) * 4,) * 4, (40,) * 4)
TIMELINE = simulate(order_fixed("zb-h1", (0, 1, 2, 3), 6), COSTS)


def test_golden_grid(golden: Callable[..., None]) -> None:
    golden("\n".join(line.rstrip() for line in timeline_grid(TIMELINE, width=80).plain.splitlines()))


@pytest.mark.parametrize("width", [80, 120, 160])
def test_no_line_is_wider_than_asked(width: int) -> None:
    assert max(map(len, timeline_grid(TIMELINE, width=width).plain.splitlines())) <= width


def test_kinds_have_their_colours() -> None:
    grid = timeline_grid(TIMELINE)
    for span in grid.spans:
        if span.style in STYLES.values() and len(text := grid.plain[span.start : span.end].strip()) < 4:
            assert STYLES[{"D": "BW"}.get(text[0], text[0])] == span.style


def test_tables_show_the_figures() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_table([("zb-h1", TIMELINE, COSTS)]))
    console.print(memory_table(TIMELINE, COSTS))
    text = console.export_text()
    assert f"{TIMELINE.bubble_span:.2%}" in text and "40 B" in text


def test_seconds() -> None:
    assert [format_seconds(x) for x in (12.345, 0.0014821, 2e-5, 0.0)] == ["12.35 s", "1.482 ms", "20 us", "0 us"]
