"""The generated programs as a person reads them, and what the text must say whatever the model."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import zbfx
from zbfx.codegen.function import alias, literal
from zbfx.errors import TraceError
from zbfx.ir import Schedule
from zbfx.text import parse_action


def plan_of(schedule: str | Schedule = "zb-h1", **options: Any) -> zbfx.Plan:
    """Two stages of two layers, three microbatches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    options = {"loss": nn.functional.mse_loss, "cuts": ["2"], "microbatches": 3, **options}
    return zbfx.compile(model, 2, schedule=schedule, example_inputs=(x,), example_target=y, **options).plan


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_text_of_the_programs(schedule: str, golden: Callable[..., None]) -> None:
    plan = plan_of(schedule)
    for program in plan.programs:
        golden(program.source, f"rank_{program.rank}")


def test_text_of_a_program_with_W_in_parts(golden: Callable[..., None]) -> None:
    words = ["0F0 0F1 0B0 0W0.0 0B1 0W0.1 0W1.0 0W1.1", "1F0 1B0 1F1 1B1 1W0.0 1W0.1 1W1.0 1W1.1"]
    schedule = Schedule((0, 1), tuple(tuple(map(parse_action, word.split())) for word in words), "in parts")
    golden(plan_of(schedule, microbatches=2).programs[1].source)


def test_one_rank_needs_no_messages(golden: Callable[..., None]) -> None:
    golden(plan_of(ranks=1, microbatches=1).programs[0].source)


def test_programs_are_straight_lines_that_delete_what_they_made() -> None:
    """No loops or branches; in `step`, every name that is written is deleted or handed over, once."""
    for program in plan_of().programs:
        tree = ast.parse(program.source)
        assert not [n for n in ast.walk(tree) if isinstance(n, (ast.For, ast.While, ast.If, ast.Try, ast.With, ast.Lambda))]
        step = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "step")
        written = [n.id for n in ast.walk(step) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id != "_"]
        deleted = [n.id for n in ast.walk(step) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Del)]
        assert sorted(written) == sorted(deleted)


def test_programs_import_torch_alone_and_use_fewer_than_ten_verbs() -> None:
    verbs = set()
    for program in plan_of().programs:
        tree = ast.parse(program.source)
        imports = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
        assert [ast.unparse(i) for i in imports] == ["import torch"]
        verbs |= set(re.findall(r"rank\.(\w+)\(", program.source))
    assert verbs == {"begin", "params", "inputs", "post", "recv", "send", "sent", "loss", "accumulate"}


def test_programs_show_shapes_source_lines_and_the_users_names() -> None:
    source = plan_of().programs[1].source
    assert "# f32[2, 4] 3.weight" in source and "# f32[2] 3.bias" in source
    assert re.search(r"tanh.* = aten_tanh\(.*\).*# f32\[2, 4\] activation\.py:\d+", source)
    assert re.search(r"x_1_0 = \[\*rank\.recv\(\"1F0\"\)\]  # f32\[2, 4\] from rank 0", source)
    title = source.splitlines()[0]
    assert re.fullmatch(r'"""Rank 1 of 2: stage 1\. zb-h1, 3 microbatches; predicted bubble [\d.]+%, peak [\d.]+ \w+\.', title)


def test_a_budget_stands_in_the_title() -> None:
    assert re.search(r"peak \d+ B of [\d.]+ KiB\.", plan_of(memory="64KiB").programs[0].source.splitlines()[0])


def test_the_same_input_gives_the_same_text() -> None:
    assert [p.source for p in plan_of().programs] == [p.source for p in plan_of().programs]


# ---------------------------------------------------------------- arguments as text

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([torch.float32, torch.int64, torch.strided, torch.contiguous_format, torch.preserve_format]),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.tuples(inner, inner),
    max_leaves=6,
)  # fmt: skip


@given(PLAIN)
def test_literals_evaluate_to_what_they_were_written_from(value: Any) -> None:
    assert same(eval(literal(value), {"torch": torch}), value)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def test_nodes_and_devices_in_arguments() -> None:
    node = fx.Graph().placeholder("x")
    assert literal([node, (node,), torch.device("cpu")]) == "[x, (x,), DEVICE]"


def test_aliases_lead_back_to_the_operator() -> None:
    ops: dict[str, str] = {}
    for operator in (torch.ops.aten.add.Tensor, torch.ops.aten.tanh.default, torch.ops.aten._log_softmax.default):
        assert eval(ops[alias(operator, ops)], {"torch": torch}) is operator


def test_what_is_no_operator_is_refused() -> None:
    with pytest.raises(TraceError, match="cannot be written into a program: it is not a registered operator"):
        alias(len, {})
