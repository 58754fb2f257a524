"""Tables and texts of plans and training runs."""

from __future__ import annotations

import ast
import io

from rich.console import Console

from zbfx.view import folded, print_code
from zbfx.view_training import TrainingBar, format_rate, sparkline

PROGRAM = '''"""Rank 0."""

aten_mul = torch.ops.aten.mul.Tensor
aten_add = torch.ops.aten.add.Tensor


class stage_0:
    @staticmethod
    def F(_p, _x):
        x, = _x; _x.clear()
        y = aten_mul(x, 2); del x
        return [y], []


def step(rank):
    rank.begin("0F0")
'''


def test_folded_keeps_the_step_and_stays_python():
    text = folded(PROGRAM)
    ast.parse(text)
    assert "...  # names of 2 operators" in text and "        ...  # 3 lines" in text
    assert "aten_mul" not in text and text.endswith('def step(rank):\n    rank.begin("0F0")\n')


def test_what_is_not_python_is_shown_as_it_is():
    assert folded("def step(:\n") == "def step(:\n"


def test_code_is_coloured_on_a_terminal_only():
    long = "x = 1  # " + "y" * 200 + "\n"
    plain, colour = io.StringIO(), io.StringIO()
    print_code(Console(file=plain, width=40), long)
    print_code(Console(file=colour, width=40, force_terminal=True, color_system="standard"), long)
    assert plain.getvalue() == long
    assert "\x1b[" in colour.getvalue() and "y" * 200 in colour.getvalue()


def test_without_a_terminal_a_run_is_a_few_lines():
    out = io.StringIO()
    with TrainingBar(Console(file=out, width=80), 20, "tokens", lines=4) as bar:
        for step in range(20):
            bar.advance(5.0 - step / 10, 100)
    lines = out.getvalue().splitlines()
    assert len(lines) == 5 and lines[0] == "step  1/20  loss 5.000"
    assert lines[-1].startswith("step 20/20  loss 3.100  ") and lines[-1].endswith(" tokens/s")
    assert bar.per_second > 0


def test_small_figures():
    assert [format_rate(x) for x in (0.5234, 12.42, 3120.4)] == ["0.523", "12.4", "3,120"]
    assert sparkline([]) == "" and sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁" and len(sparkline([0.0] * 99, 10)) == 10
