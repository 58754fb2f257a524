"""What people look at of a plan: tables of stages and ranks, the generated programs, and the stages' graphs."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from zbfx.ir import Cost, Fn, Program, Schedule, Stage, Timeline, short
from zbfx.text import format_bytes
from zbfx.view_schedule import format_seconds

_THEME = "ansi_dark"  # the terminal's own colours


def stage_rows(stages: Sequence[Stage], costs: Sequence[Cost], placement: Sequence[int]) -> list[dict[str, Any]]:
    """Per stage: rank, number of parameters, seconds of F, B and W, and the bytes a microbatch sends onward and back."""
    return [
        {
            "stage": s.index,
            "rank": placement[s.index],
            "parameters": sum(_numel(s.F, name) for name in s.F.takes.get("p", ())[: len(s.names)]),
            "F": costs[s.index].F,
            "B": costs[s.index].B,
            "W": costs[s.index].W,
            "sends": sum(v.nbytes for v in s.F.group("y")) if s.index + 1 < len(stages) else 0,
            "returns": 0 if s.B is None else sum(v.nbytes for v in s.B.group("gx")),
        }
        for s in stages
    ]


def rank_rows(
    schedule: Schedule, timeline: Timeline, programs: Sequence[Program], static: Sequence[int], limits: Sequence[int | None]
) -> list[dict[str, Any]]:
    """Per rank: stages, seconds of work, bytes of parameters (gradients, buffers) and of activations, and the limit of both."""
    return [
        {
            "rank": r,
            "stages": [k for k, rank in enumerate(schedule.placement) if rank == r],
            "work": sum(s.end - s.start for s in timeline.spans[r]),
            "static": static[r],
            "activations": programs[r].peak,
            "limit": None if limits[r] is None else static[r] + (limits[r] or 0),
        }
        for r in range(len(programs))
    ]


def stage_table(rows: Sequence[dict[str, Any]]) -> Table:
    """stage_rows as a table. Seconds are estimates for one microbatch."""
    table = Table(pad_edge=False, box=SIMPLE_HEAD)
    for name in ("stage", "rank", "parameters", "F", "B", "W", "sends", "returns"):
        table.add_column(name, justify="right")
    for row in rows:
        times = [format_seconds(row[kind]) if row[kind] else "-" for kind in ("F", "B", "W")]
        sizes = [format_bytes(row[what]) if row[what] else "-" for what in ("sends", "returns")]
        table.add_row(str(row["stage"]), str(row["rank"]), f"{row['parameters']:,}", *times, *sizes)
    return table


def rank_table(rows: Sequence[dict[str, Any]]) -> Table:
    """rank_rows as a table. static: parameters, their gradients, and buffers; peak: static and the most activations at once."""
    table = Table(pad_edge=False, box=SIMPLE_HEAD)
    for name in ("rank", "stages", "work", "static", "activations", "peak", "limit"):
        table.add_column(name, justify="right")
    for row in rows:
        peak = row["static"] + row["activations"]
        sizes = [format_bytes(n) for n in (row["static"], row["activations"], peak)]
        limit = "none" if row["limit"] is None else format_bytes(row["limit"])
        table.add_row(str(row["rank"]), " ".join(map(str, row["stages"])), format_seconds(row["work"]), *sizes, limit)
    return table


def graphs_text(stage: Stage) -> str:
    """A stage's F, B and W (or its parts) as text, each with its signature; an empty one says why."""
    why = {"B": "empty: no input of this stage needs a gradient", "W": "empty: no parameter of this stage needs a gradient"}
    parts = []
    pieces = [(f"W_{i}", part.W) for i, part in enumerate(stage.parts)] or [("W", stage.W)]
    for kind, fn in (("F", stage.F), ("B", stage.B), *pieces):
        head = f"# stage {stage.index}, {kind}: "
        parts.append(
            head + why.get(kind, "empty: the others give all gradients") if fn is None else f"{head}{_signature(fn)}\n{fn}"
        )
    return "\n\n".join(parts)


def folded(source: str) -> str:
    """A rank's program with its stage functions, operators and messages folded to a line each: what is left is `step`.

    A program that is not Python is returned as it is.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    lines = source.splitlines()
    folds = [f for node in tree.body if isinstance(node, ast.ClassDef) for f in map(_fold, node.body) if f]
    aliases = [n for n in tree.body if isinstance(n, ast.Assign) and "torch.ops." in lines[n.lineno - 1]]
    if aliases:
        end = aliases[-1].end_lineno or aliases[-1].lineno
        folds.append((aliases[0].lineno, end, f"...  # names of {len(aliases)} operators"))
    for first, last, text in sorted(folds, reverse=True):
        lines[first - 1 : last] = [text]
    return "\n".join(lines) + "\n"


def _fold(node: ast.stmt) -> tuple[int, int, str] | None:
    """(first line, last line, what to show instead) of a function's body."""
    if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
        return None
    first = node.body[0].lineno
    return first, node.end_lineno, " " * node.body[0].col_offset + f"...  # {node.end_lineno - first + 1} lines"


def print_code(console: Console, source: str, lexer: str = "python") -> None:
    """Highlighted on a terminal, as it is otherwise; lines are never cut or padded."""
    if not console.is_terminal:
        console.file.write(source if source.endswith("\n") else source + "\n")
        return
    text = Syntax("", lexer, theme=_THEME).highlight(source)
    text.rstrip()
    console.print(text, soft_wrap=True)


def _numel(fn: Fn, name: str) -> int:
    count = 1
    for size in fn.value(name).shape:
        count *= size
    return count


def _signature(fn: Fn) -> str:
    """`p 22 tensors, x (f32[4, 128]) -> y (f32[4, 128]), s 40 tensors`: a group's types, or their number where there are many."""
    nodes = {n.name: n for n in fn.graph.nodes}
    takes = [_group(g, [short(nodes[n].meta["val"]) for n in names]) for g, names in fn.takes.items() if names]
    gives, start = [], 0
    for g, count in fn.gives.items():
        gives.append(_group(g, [short(n.meta["val"]) for n in fn.outputs[start : start + count]]))
        start += count
    return f"{', '.join(takes)} -> {', '.join(gives)}"


def _group(name: str, types: Sequence[str]) -> str:
    return f"{name} ({', '.join(types)})" if len(types) <= 2 else f"{name} {len(types)} tensors"
