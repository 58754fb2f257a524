"""Training through a pipeline with the user's own optimizer: the same parameters as one process, step after step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import zbfx
from tests.models import MODELS, Case
from tests.reference import Reference, differences, memory_differences, predicted_held


def pipe_for(case: Case, stages: int, microbatches: int = 2, **options: Any) -> tuple[nn.Module, zbfx.Pipeline]:
    model = case.fresh()
    args, kwargs, target = case.batch(2 * microbatches)
    pipe = zbfx.compile(
        model, stages, example_inputs=args, example_kwargs=kwargs, example_target=target, loss=case.loss,
        microbatches=microbatches, **options,
    )  # fmt: skip
    return model, pipe


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_several_steps_equal_one_process(name: str, optimizer: str) -> None:
    """The optimizer is made before compiling, and zero_grad drops gradients or fills them with zeros."""
    case = MODELS[name](layers=1) if name == "gpt2" else MODELS[name]()
    reference = Reference(case, 2)
    model = case.fresh()
    ours = OPTIMIZERS[optimizer](model.parameters())
    theirs = OPTIMIZERS[optimizer](reference.module.parameters())
    pipe = zbfx.compile(model, 3, loss=case.loss, microbatches=2)
    losses = []
    for step in range(5):
        args, kwargs, target = case.batch(4)
        wanted = reference.go_on(2)
        losses.append(pipe.step(*args, target=target, **kwargs))
        assert differences(model, losses[-1], wanted) == []
        for opt in (ours, theirs):
            opt.step()
            opt.zero_grad(set_to_none=step % 2 == 0)
        values = dict(reference.module.named_parameters())
        assert [n for n, p in model.named_parameters() if not torch.equal(p, values["model." + n])] == []
    assert losses[-1] < losses[0]


def test_gradients_add_up_over_steps_until_they_are_dropped() -> None:
    case = MODELS["mlp"]()
    model, pipe = pipe_for(case, 3)
    reference = Reference(case, 2)
    args, _, target = case.batch(4)
    for _ in range(3):
        wanted = reference.go_on(2)
        loss = pipe.step(*args, target=target)
        assert differences(model, loss, wanted) == []


def test_a_gradient_is_the_users_own_tensor() -> None:
    """Nothing of a step holds on to the gradients or writes into them after it."""
    case = MODELS["mlp"]()
    model, pipe = pipe_for(case, 2)
    args, _, target = case.batch(4)
    pipe.step(*args, target=target)
    kept = {n: p.grad for n, p in model.named_parameters()}
    copies = {n: g.clone() for n, g in kept.items() if g is not None}
    model.zero_grad(set_to_none=True)
    pipe.step(*args, target=target)
    assert all(torch.equal(kept[n], g) for n, g in copies.items())
    assert all(p.grad is not kept[n] and torch.equal(p.grad, copies[n]) for n, p in model.named_parameters())
    pointers = [p.grad.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(pointers)) == len(pointers)


# ---------------------------------------------------------------- evaluation


def test_eval_step_is_the_eval_mode_loss_and_training_never_notices() -> None:
    case = MODELS["cnn"]()
    (quiet, pipe_quiet), (model, pipe) = pipe_for(case, 3), pipe_for(case, 3)
    args, _, target = case.batch(4)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (quiet, model)]
    for _ in range(3):
        twin = copy.deepcopy(model).eval()
        before = {n: v.clone() for n, v in model.state_dict().items()}
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        with torch.no_grad():
            wanted = nn.functional.cross_entropy(twin(*args), target)
        torch.testing.assert_close(pipe.eval_step(*args, target=target), wanted)
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
        assert all(p.grad is grads[n] or torch.equal(p.grad, grads[n]) for n, p in model.named_parameters())
        assert all(m.training for m in model.modules())
        losses = [p.step(*args, target=target) for p in (pipe_quiet, pipe)]
        assert torch.equal(*losses)
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(quiet.state_dict().values(), model.state_dict().values(), strict=True))


def test_eval_step_may_come_first() -> None:
    case = MODELS["cnn"]()
    model = case.fresh()
    pipe = zbfx.compile(model, 2, loss=case.loss, microbatches=2)
    args, _, target = case.batch(4)
    pipe.eval_step(*args, target=target)
    assert differences(model, pipe.step(*args, target=target), Reference(case, 2).step(2)) == []


def test_eval_step_turns_dropout_off() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 2))
    pipe = zbfx.compile(model, 2, loss=nn.functional.mse_loss, microbatches=1)
    x, target = torch.randn(4, 8), torch.randn(4, 2)
    first = pipe.eval_step(x, target=target)
    torch.testing.assert_close(first, nn.functional.mse_loss(copy.deepcopy(model).eval()(x), target).detach())
    assert torch.equal(first, pipe.eval_step(x, target=target))
    assert not torch.equal(first, pipe.step(x, target=target))


# ---------------------------------------------------------------- parameters that do not all get gradients


class Partial(nn.Module):
    """Six layers; the third is there and used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i == 2 else torch.tanh(layer(x))
        return x


def partial_case(frozen: tuple[int, ...]) -> Case:
    torch.manual_seed(0)
    model = Partial()
    for i in frozen:
        model.layers[i].requires_grad_(False)

    def batch(n: int) -> Any:
        g = torch.Generator().manual_seed(n)
        return (torch.randn(n, 8, generator=g),), {}, torch.randn(n, 8, generator=g)

    return Case(model, nn.functional.mse_loss, batch)


@pytest.mark.parametrize("frozen", [(), (0, 1), (3,), (0, 1, 3, 4), (4, 5)], ids=str)
@pytest.mark.parametrize("stages", [2, 5])
def test_unused_and_frozen_parameters(stages: int, frozen: tuple[int, ...]) -> None:
    case = partial_case(frozen)
    model, pipe = pipe_for(case, stages, microbatches=3)
    args, _, target = case.batch(6)
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        pipe.reschedule(schedule)
        model.zero_grad(set_to_none=True)
        pipe.watch(times=False, memory=True)
        loss = pipe.step(*args, target=target)
        assert differences(model, loss, Reference(case, 2).step(3)) == []
        assert memory_differences(pipe.plan, pipe.observed, range(stages)) == []
        assert model.layers[2].weight.grad is None


def test_a_frozen_first_stage_has_no_backward_and_costs_none() -> None:
    case = partial_case((0, 1))
    _, pipe = pipe_for(case, 2, cuts=["layers.3"])
    first, second = pipe.plan.stages
    assert first.B is None and first.W is None
    cost, other = pipe.plan.costs.stages
    assert (cost.B, cost.W) == (0.0, 0.0) < (cost.F, 0.0)
    assert second.B is None and second.W is not None and other.B == 0.0 and other.W > other.F
    assert not any(i.verb == "compute" and i.action.kind != "F" for i in pipe.plan.programs[0].instrs)
    assert not any(i.verb == "send" and i.action.kind == "B" for p in pipe.plan.programs for i in p.instrs)


def test_integer_inputs_leave_the_first_stage_with_W_alone() -> None:
    _, pipe = pipe_for(MODELS["gpt2"](layers=1), 2)
    first = pipe.plan.stages[0]
    assert first.B is None and first.W is not None
    assert pipe.plan.costs.stages[0].B == 0.0 < pipe.plan.costs.stages[0].W


# ---------------------------------------------------------------- the user's names


def test_parameters_and_state_speak_the_users_names() -> None:
    case = MODELS["cnn"]()
    model, pipe = pipe_for(case, 3)
    assert dict(pipe.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(p is dict(model.named_parameters())[n] for n, p in pipe.named_parameters())
    assert [id(p) for p in pipe.parameters()] == [id(p) for p in model.parameters()]
    state = {n: v.clone() for n, v in pipe.state_dict().items()}
    assert state.keys() == model.state_dict().keys()
    args, _, target = case.batch(4)
    before = pipe.step(*args, target=target)
    pipe.load_state_dict({n: torch.zeros_like(v) for n, v in state.items()})
    assert pipe.step(*args, target=target) != before
    pipe.load_state_dict({**state, "more": torch.zeros(1)})
    assert torch.equal(pipe.step(*args, target=target), before)
    state.pop("7.weight")
    with pytest.raises(zbfx.InputError, match=r"lacks 1 of this rank's tensors, '7\.weight' first"):
        pipe.load_state_dict(state)


def test_a_watched_step_reports_every_action_in_order() -> None:
    case = MODELS["mlp"]()
    _, pipe = pipe_for(case, 2, microbatches=4)
    args, _, target = case.batch(8)
    with pytest.raises(zbfx.InputError, match="nothing was recorded"):
        _ = pipe.observed
    pipe.watch(times=True)
    pipe.step(*args, target=target)
    timeline = pipe.observed.timeline
    for rank, spans in enumerate(timeline.spans):
        assert [str(s.action) for s in spans] == [action for action, _ in predicted_held(pipe.plan.programs[rank])]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(spans))
        assert all(s.start <= s.end for s in spans)
    assert 0 < timeline.span <= timeline.makespan and 0 <= timeline.bubble_makespan < 1
