"""torch.utils.checkpoint in a model is honoured: same numbers, less memory, each block's forward twice at most."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbfx
from tests.equal import case, eager, pipe_for, step, wrong
from tests.families import FAMILIES
from tests.models import Case
from tests.reference import differences, memory_differences
from tests.test_models_weights import mse
from zbfx.ir import Joint, outputs_of
from zbfx.passes.recompute import recompute_regions
from zbfx.passes.split_backward import forward_nodes
from zbfx.trace.capture import capture
from zbfx.trace.differentiate import differentiate
from zbfx.trace.regions import calls, observed

WIDE = 16


class Blocks(nn.Module):
    """Four blocks of several layers each; `how` they are checkpointed: None, reentrant or not, or nested."""

    def __init__(self, how: str | None) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDE, 4 * WIDE), nn.Tanh(), nn.Linear(4 * WIDE, 4 * WIDE), nn.GELU(), nn.Linear(4 * WIDE, WIDE)
            )
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.blocks[0][0].weight[0, 0]  # so that a reentrant region's input requires grad
        for block in self.blocks:
            if self.how is None:
                x = x + block(x)
            elif self.how == "nested":
                x = x + checkpoint(lambda x, b: checkpoint(b, x, use_reentrant=False), x, block, use_reentrant=False)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x


def rows(n: int, g: torch.Generator) -> Any:
    return (torch.randn(n, 64, WIDE, generator=g),), {}, torch.randn(n, 64, WIDE, generator=g)


def blocks(how: str | None) -> Case:
    return case(lambda: Blocks(how), mse, rows)


def held(of: Case, stages: int) -> list[int]:
    """Bytes that each stage holds between a microbatch's F and its backward, as planned and as measured."""
    _, pipe = pipe_for(of, stages)
    pipe.watch(times=False, memory=True)
    step(of, pipe)
    assert memory_differences(pipe.plan, pipe.observed, range(stages)) == []
    return [cost.bytes_F for cost in pipe.plan.costs.stages]


@pytest.mark.parametrize("how", ["reentrant", "without reentry", "nested"])
def test_same_numbers_and_less_memory(how: str) -> None:
    of, plain = blocks(how), blocks(None)
    assert wrong(of, eager(plain, 2), stages=(1, 2, 4)) == {}
    ours, theirs = held(of, 2), held(plain, 2)
    assert all(0 < a < 0.5 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


def test_each_operator_of_a_block_runs_twice_at_most() -> None:
    """Counted in the functions that run: linear layers of F, B and W that are a block's forward."""

    def forwards(of: Case) -> Counter[str]:
        _, pipe = pipe_for(of, 2)
        kinds: Counter[str] = Counter()
        for stage in pipe.plan.stages:
            for fn in (stage.F, stage.B, stage.W):
                for node in fn.graph.nodes if fn is not None else ():
                    if node.target in (torch.ops.aten.tanh.default, torch.ops.aten.gelu.default, torch.ops.aten.addmm.default):
                        kinds[str(node.target)] += 1
        return kinds

    plain, again = forwards(blocks(None)), forwards(blocks("without reentry"))
    assert all(plain[k] <= again[k] <= 2 * plain[k] for k in plain)
    assert again["aten.tanh.default"] == 2 * plain["aten.tanh.default"] == 8


def test_a_hugging_face_model_with_checkpointing() -> None:
    of = FAMILIES["Qwen3ForCausalLM"]()
    model = of.fresh()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    plain, pipe_plain = pipe_for(of, 2)
    pipe = zbfx.compile(model, 2, example_kwargs=of.batch(4)[1], microbatches=2)
    for p in (pipe, pipe_plain):
        p.watch(times=False, memory=True)
    losses = [step(of, pipe), step(of, pipe_plain)]
    assert torch.equal(*losses)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    ours, theirs = ([c.bytes_F for c in p.plan.costs.stages] for p in (pipe, pipe_plain))
    assert sum(ours) < 0.7 * sum(theirs), (ours, theirs)
    assert pipe.observed.peak[0] < pipe_plain.observed.peak[0]


# ---------------------------------------------------------------- the passes that do it


def joint_of(of: Case) -> Joint:
    args, kwargs, target = of.batch(2)
    captured = capture(of.model, args, kwargs, target, loss=of.loss, device=torch.device("cpu"))
    from zbfx.ir import Link
    from zbfx.passes.partition import partition

    (forward,) = partition(captured, 1, link=Link(0.0, 1.0), bandwidth=1.0)
    return differentiate(forward, [outputs_of(forward.graph)[0].meta["val"]])


def test_recompute_regions_copies_what_the_backward_needs_and_leaves_its_input_alone() -> None:
    joint = joint_of(blocks("without reentry"))
    before = str([n.format_node() for n in joint.graph.nodes])
    made = recompute_regions(joint)
    assert str([n.format_node() for n in joint.graph.nodes]) == before
    ys = list(outputs_of(made.graph)[: len(made.forward.outputs)])
    forward = forward_nodes(made.graph, ys)
    saved = {
        a for n in made.graph.nodes if n not in forward and n.op == "call_function" for a in n.all_input_nodes if a in forward
    }
    assert len(made.graph.nodes) > len(joint.graph.nodes)
    assert not any(n.target is torch.ops.aten.tanh.default for n in saved)  # within a region: made again


def test_a_graph_without_regions_is_returned_as_it_is() -> None:
    joint = joint_of(blocks(None))
    assert recompute_regions(joint) is joint


def test_observing_ends_with_the_export() -> None:
    """torch's own functions are back, also after an error."""
    import torch.utils.checkpoint as checkpointing

    apply, generator = torch.autograd.Function.__dict__["apply"], checkpointing._checkpoint_without_reentrant_generator
    with pytest.raises(ZeroDivisionError), observed():
        assert torch.autograd.Function.__dict__["apply"] is not apply
        _ = 1 / 0
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert checkpointing._checkpoint_without_reentrant_generator is generator


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 7.0, None


def test_a_custom_function_is_one_operator_of_the_captured_graph_and_its_own_backward_is_traced() -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Double.apply(self.a(x), 2.0).sum()

    model = Uses()
    captured = capture(model, (torch.randn(2, 4),), {}, None, loss=None, device=torch.device("cpu"))
    (recorded,) = [n for n in captured.graph.nodes if n.target in calls]
    assert calls[recorded.target].leaves == (None, 2.0) and calls[recorded.target].places == (0,)
    assert recorded.meta["source"].startswith("test_models_checkpointing.py:")
    of = Case(model, None, lambda n: ((torch.ones(n, 4),), {}, None))
    ours, pipe = pipe_for(of, 1)
    assert differences(ours, step(of, pipe), eager(of, 2)) == []
    assert torch.equal(ours.a.bias.grad, torch.full((4,), 14.0))  # 2 samples a microbatch, 2 microbatches halved: 2 * 7
