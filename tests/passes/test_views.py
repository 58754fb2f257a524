"""Views on both sides of cuts: values cross by what they look into, gradients by view; every sum is one process's bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zbfx
from tests.models import Case
from tests.passes.graphs import TRACED, captured_of, cut, most_stages
from tests.reference import Reference, differences, memory_differences

WIDE = 6
TAKES = ("slice", "expand", "chunk", "unbind", "transpose", "diagonal")
STEPS = (*TAKES, "use", "use", "use", "make", "write")


class Viewing(nn.Module):
    """A line of steps over a pool of tensors: take views of one, use one, make a new one, write into a copy of one.

    steps: (kind, which of the pool). Every use multiplies each row of the result by a function of all elements of the view.
    """

    def __init__(self, steps: tuple[tuple[str, int], ...]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2 + sum(kind == "make" for kind, _ in steps)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = iter(self.layers)
        h = next(layers)(x)
        pool = [h]
        for i, (kind, which) in enumerate(self.steps):
            t = pool[which % len(pool)]
            if kind == "use":
                h = h * (1.0 + (t * (1.0 + 0.1 * i)).sin().reshape(len(x), -1).mean(1, keepdim=True))
            elif kind == "make":
                h = next(layers)(h).tanh()
                pool.append(h)
            else:
                pool += taken(kind, t)
        return next(layers)(h).square().mean()


def taken(kind: str, t: torch.Tensor) -> list[torch.Tensor]:
    """Views of t, whose first dimension stays the batch; nothing where t is too small."""
    if t.dim() < 2 or t.shape[1] < 2:
        return []
    match kind:
        case "slice":
            return [t[:, 1:], t[:, : t.shape[1] - 1]]
        case "expand":
            return [t[:, :1].expand(-1, WIDE, *t.shape[2:])]
        case "chunk":
            return [*t.chunk(2, 1)]
        case "unbind":
            return [*t.unbind(1)][:3]
        case "diagonal":
            return [t.unsqueeze(1).expand(-1, t.shape[1], *t.shape[1:]).diagonal(0, 1, 2)]
        case "transpose":
            return [t.unsqueeze(2).transpose(1, 2)[..., ::2]]
        case _:
            copy = t * 1.0
            copy[:, 1:] *= t[:, :1]
            return [copy, copy[:, 1:]]


def own_loss(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output


def rows(n: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return (torch.randn(n, WIDE, generator=torch.Generator().manual_seed(n)),), {}, None


def case_of(steps: tuple[tuple[str, int], ...]) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(len(steps))
        return Case(Viewing(steps), own_loss, rows)


def wrong(case: Case, num_stages: int) -> list[str]:
    """What is not bitwise one process, or takes other bytes than predicted."""
    model = case.fresh()
    pipe = zbfx.compile(model, num_stages, example_inputs=rows(6)[0], loss=own_loss, microbatches=2)
    pipe.watch(times=False, memory=True)
    found = differences(model, pipe.step(*rows(6)[0]), Reference(case, 3).step(2))
    return found + memory_differences(pipe.plan, pipe.observed, range(num_stages))


@settings(TRACED, max_examples=5)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), min_size=6, max_size=12))
def test_random_views_uses_and_cuts(steps: list[tuple[str, int]]) -> None:
    case = case_of(tuple(steps))
    most = most_stages(captured_of(case.model, rows(3)[0][0], loss=own_loss))
    assert wrong(case, min(4, most)) == []


ALL_OF_THEM = (
    *((kind, 0) for kind in TAKES),
    *(("use", i) for i in range(12)),
    ("slice", 1),
    ("make", 0),
    *(("use", i) for i in (0, 1, 3, 13, 14, 15, 0)),
)


def test_every_view_used_on_both_sides_of_every_cut() -> None:
    """As many stages as the graph gives: each view's gradient passes back through all of them."""
    case = case_of(ALL_OF_THEM)
    most = most_stages(captured_of(case.model, rows(3)[0][0], loss=own_loss))
    assert most > 40
    assert wrong(case, 12) == []


def test_a_view_sends_its_own_gradient_only_where_it_is_used_behind_the_cut() -> None:
    captured = captured_of(case_of((("slice", 0), ("use", 1), ("use", 2), ("use", 2))).model, rows(3)[0][0], loss=own_loss)
    names = [n.name for n in captured.graph.nodes if n.op == "call_function"]
    node = {n.name: n for n in captured.graph.nodes}
    (only,), (one, other) = (list(node[name].users) for name in ("slice_1", "slice_2"))
    crossing = {}
    for before in (only, one, other, node["mean_2"]):
        first, second = cut(captured, 2, cuts=(names.index(before.name),))
        assert first.views_out == second.views_in and first.outputs == second.inputs
        crossing[before] = first.views_out, "linear" in first.outputs
    assert crossing[only] == (("slice_1", "slice_2"), True)
    assert crossing[one] == crossing[other] == (("slice_2",), True)
    assert crossing[node["mean_2"]] == ((), False)


def test_a_chunk_is_not_cut_from_its_pieces() -> None:
    captured = captured_of(case_of((("chunk", 0), ("use", 1), ("use", 2))).model, rows(3)[0][0], loss=own_loss)
    names = [n.name for n in captured.graph.nodes if n.op == "call_function"]
    starts = {names[f.start] for f in cut(captured, most_stages(captured))}
    assert not starts & {"getitem", "getitem_1"} and "chunk" in starts
