"""What models and users bring, with the optimizer in the programs, in each mode: ties, frozen stages, half precision, hooks,
learning-rate schedules, other optimizers, batch norm, evaluation between steps, other shapes, failures."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests import modes
from tests.distributed.failing import Fragile, bad_batch, good_batch
from tests.modes import OPTIMIZERS, WIDTH, Run, batch, differing, drive, inject, pipeline, put, same, unlike

STEPS, M = 9, 4
MODES = ("synchronous", "post-validation", "2bw")


def mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def reference(
    of: nn.Module,
    optimizer: modes.MakeOptimizer,
    steps: int,
    *,
    delayed: bool,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    masters: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """One process over quiet batches, with one version of the weights or (delayed) two; losses and parameters."""
    parameters = [p for p in of.parameters() if p.requires_grad]
    targets = [nn.Parameter(p.detach().float()) for p in parameters] if masters else parameters
    opt = optimizer(targets)
    rate = schedule(opt) if schedule else None
    old = [p.detach().clone() for p in parameters]
    losses = []
    for step in range(steps):
        new = [p.detach().clone() for p in parameters]
        put(parameters, old if delayed else new)
        total = None
        for x, y in zip(*(t.to(parameters[0].dtype).chunk(M) for t in batch(step, M, quiet=True)), strict=True):
            loss = mse(of(x), y) / M
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
            if masters:
                for p, target in zip(parameters, targets, strict=True):
                    assert p.grad is not None
                    target.grad = p.grad.float() if target.grad is None else target.grad + p.grad
                    p.grad = None
        assert total is not None
        losses.append(total)
        put(parameters, new)
        opt.step()
        put(parameters, [t.detach() for t in targets])
        opt.zero_grad()
        if rate is not None:
            rate.step()
        old = new
    return losses, [p.detach().clone() for p in parameters]


def bitwise(run: Run, reference: tuple[list[Tensor], list[Tensor]], *, frozen: int = 0) -> bool:
    """Whether a run has a reference's losses and its parameters after the first `frozen`, both in the model's order."""
    losses, parameters = reference
    ours = list(run.values.values())[frozen:]
    return all(map(same, run.losses, losses)) and len(ours) == len(parameters) and all(map(same, ours, parameters))


# ---------------------------------------------------------------- parameters of every kind


class Tied(nn.Module):
    """The first layer's weight is the last one's, transposed."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.table = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.table
        for layer in self.layers:
            x = layer(x).tanh()
        return x @ self.table.T


def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05)


@pytest.mark.parametrize("weights", MODES)
def test_tied_weights(weights: str) -> None:
    """On one rank of a V the bits of one process; on two ranks its numbers, and the same bits on both."""
    wanted = reference(Tied(), adafactor, STEPS, delayed=weights == "2bw")
    options: dict[str, Any] = {"optimizer": adafactor, "weights": weights, "max_norm": 1e9}
    assert bitwise(drive(pipeline(Tied(), schedule="zb-v", ranks=2, **options), STEPS), wanted)
    if weights == "post-validation":  # over gloo
        return
    run = drive(pipeline(Tied(), schedule="zb-h1", **options), STEPS)
    for ours, theirs in zip(run.values.values(), wanted[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert run.pipe._engine is not None and run.pipe._engine.updating is not None
    copies = [run.pipe._engine.updating.tensor(rank, "table") for rank in (0, 3)]
    assert copies[0] is not copies[1] and same(copies[0].detach(), copies[1].detach())


@pytest.mark.parametrize("weights", MODES)
def test_a_wholly_frozen_stage(weights: str) -> None:
    of, twin = modes.model(dropout=0.0), modes.model(dropout=0.0)
    for each in (of, twin):
        each[0].requires_grad_(False)
        each[2][0].weight.requires_grad_(False)  # type: ignore[index]
    before = [p.clone() for p in of[0].parameters()]
    pipe = pipeline(of, optimizer=OPTIMIZERS["adamw"], weights=weights, max_norm=1e9, cuts=["1", "2", "3"])
    assert not pipe.plan.stages[0].gparams
    run = drive(pipe, STEPS)
    losses, parameters = reference(twin, OPTIMIZERS["adamw"], STEPS, delayed=weights == "2bw")
    assert all(map(same, run.losses, losses)) and all(map(same, before, of[0].parameters()))
    assert all(map(same, [p.detach() for p in of.parameters() if p.requires_grad], parameters))


@pytest.mark.parametrize("weights", MODES)
def test_half_precision_with_masters(weights: str) -> None:
    """float32 sums and steps, bfloat16 weights: bit for bit what a loop does by hand; a loss scale changes nothing; hooks see
    the float32 gradient, once a step; loaded values reach the masters."""
    of = modes.model(dropout=0.0).bfloat16()
    wanted = reference(modes.model(dropout=0.0).bfloat16(), OPTIMIZERS["adamw"], STEPS, delayed=weights == "2bw", masters=True)
    options: dict[str, Any] = {"optimizer": OPTIMIZERS["adamw"], "weights": weights, "masters": True, "loss_scale": "dynamic"}
    x, y = (t.bfloat16() for t in batch(0, M))
    pipe = zbfx.compile(of, 2, example_inputs=(x,), example_target=y, microbatches=M, loss=mse, **options)
    types: list[torch.dtype] = []
    of[2][0].weight.register_post_accumulate_grad_hook(lambda p: types.append(p.grad.dtype))  # type: ignore[index]
    start = {n: v.clone() for n, v in pipe.state_dict().items()}
    assert bitwise(drive(pipe, STEPS), wanted)
    assert types == [torch.float32] * STEPS
    pipe.load_state_dict(start)
    for group in pipe.optimizer.param_groups:
        group["lr"] = 0.0
    x, y = batch(0, M)
    pipe.step(x.bfloat16(), target=y.bfloat16())
    pipe.flush()
    assert all(same(v, start[n]) for n, v in pipe.state_dict().items())


# ---------------------------------------------------------------- optimizers and learning rates


class Own(torch.optim.Optimizer):
    """A user's: it keeps a list, a number and a dict for each parameter, and writes into the gradient."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = self.state[p]
                kept.setdefault("last", [torch.zeros_like(p), torch.zeros_like(p)])
                kept.setdefault("more", {"sum": torch.zeros_like(p)})
                kept["times"] = kept.get("times", 0) + 1
                p.grad.add_(p, alpha=group["decay"])
                kept["more"]["sum"].add_(p.grad)
                kept["last"][kept["times"] % 2].copy_(p.grad)
                p.sub_((kept["last"][0] + kept["last"][1]) * group["lr"] / 2)


def own(parameters: list[nn.Parameter]) -> Own:
    return Own(parameters, 0.05)


def slower(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.6)


def test_late_steps_use_their_own_rate() -> None:
    """A step that is taken back, and one that comes a step late, is taken with the rate that it began with."""
    runs = []
    for weights in ("synchronous", "post-validation"):
        pipe = pipeline(modes.model(dropout=0.0), optimizer=own, weights=weights, max_norm=1e9)
        seen = inject(dict(pipe.named_parameters()), "2.0.weight", at=(2,))
        rate = slower(pipe.optimizer)
        runs.append(drive(pipe, 6, between=lambda _, rate=rate: rate.step()))
        assert len(seen) == 6
    assert differing(*runs) == [] and runs[1].progress.rollbacks == 2
    pipe = pipeline(modes.model(dropout=0.0), optimizer=own, weights="2bw", schedule="1f1b", ranks=2)
    rate = slower(pipe.optimizer)
    run = drive(pipe, 6, between=lambda _: rate.step())
    assert bitwise(run, reference(modes.model(dropout=0.0), own, 6, delayed=True, schedule=slower))


# ---------------------------------------------------------------- between steps


def normed() -> nn.Sequential:
    """Batch norm in every block, whose statistics a forward changes, and dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        blocks = [(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(*[part for block in blocks for part in block], nn.Linear(WIDTH, WIDTH))


def look(pipe: zbfx.Pipeline) -> list[dict[str, Tensor]]:
    """Evaluates, predicts and reads the state; the state dicts."""
    x, y = batch(99, M)
    states = [{n: v.clone() for n, v in pipe.state_dict().items()}]
    first = pipe.eval_step(x, target=y)
    assert pipe.predict(x).shape == x.shape
    assert same(first, pipe.eval_step(x, target=y))
    states.append({n: v.clone() for n, v in pipe.state_dict().items()})
    return states


def test_redone_forwards_leave_the_buffers_of_synchronous_steps() -> None:
    """Statistics of batch norm are updated once per step, though forwards ran twice; looking in between changes nothing, in
    post-validation where it validates the step early, nor in 2BW, where it sees the weights of one version."""
    runs = {}
    for weights in ("synchronous", "post-validation", "2bw", "2bw, looked at"):
        mode = weights.split(",")[0]
        pipe = pipeline(normed(), 2, optimizer=OPTIMIZERS["momentum"], weights=mode, max_norm=1e9, schedule="zb-h1")
        inject(dict(pipe.named_parameters()), "16.weight", at=(3,))
        states: list[list[dict[str, Tensor]]] = []

        def between(step: int, pipe: zbfx.Pipeline = pipe, states: list[list[dict[str, Tensor]]] = states) -> None:
            states.append(look(pipe) if step in (1, 5) else [])

        runs[weights] = drive(pipe, 8, between=None if weights in ("synchronous", "2bw") else between)
        assert all(not entry or unlike(*entry) == [] for entry in states)
    late = runs["post-validation"]
    assert differing(late, runs["synchronous"]) == [] and late.progress.repeats == 1 and late.progress.rollbacks >= 1
    assert late.values["1.num_batches_tracked"] == 8 * M
    assert differing(runs["2bw, looked at"], runs["2bw"]) == []


@pytest.mark.parametrize("weights", MODES)
def test_other_shapes_and_flushes_in_between(weights: str) -> None:
    """A batch of another size, and a flush, end a stream; no loss is lost, and the weights go on from where they were."""
    pipe = pipeline(
        modes.model(dropout=0.0), optimizer=OPTIMIZERS["momentum"], weights=weights, max_norm=1e9, schedule="1f1b", ranks=2
    )
    twin = modes.model(dropout=0.0)
    opt = OPTIMIZERS["momentum"](list(twin.parameters()))
    sizes, flushes = [2, 2, 3, 3, 3, 2, 2, 2], (6,)
    losses: list[Tensor | None] = []
    wanted: list[Tensor] = []
    old = [p.detach().clone() for p in twin.parameters()]
    for step, size in enumerate(sizes):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(size * M, WIDTH, generator=g), torch.randn(size * M, WIDTH, generator=g)
        losses.append(pipe.step(x, target=y))
        begins = step == 0 or sizes[step - 1] != size or step - 1 in flushes
        new = [p.detach().clone() for p in twin.parameters()]
        put(list(twin.parameters()), new if begins or weights != "2bw" else old)
        parts = [mse(twin(a), b) / M for a, b in zip(x.chunk(M), y.chunk(M), strict=True)]
        for part in parts:
            part.backward()
        wanted.append(torch.stack([p.detach() for p in parts]).sum())
        put(list(twin.parameters()), new)
        opt.step()
        opt.zero_grad()
        old = new
        if step in flushes:
            losses.append(pipe.flush())
            assert all(map(same, pipe.state_dict().values(), [p.detach() for p in twin.parameters()]))
    losses.append(pipe.flush())
    known = torch.stack([x for x in losses if x is not None and not x.isnan()])
    torch.testing.assert_close(known, torch.stack(wanted))
    assert all(map(same, pipe.state_dict().values(), [p.detach() for p in twin.parameters()]))


@pytest.mark.parametrize("weights", MODES)
def test_after_a_failed_step_training_goes_on_from_given_weights_only(weights: str) -> None:
    """No step, state or evaluation on weights of which some ranks have stepped and others not; then as if nothing had been."""
    of, options = Fragile("raise"), {"microbatches": 4, "schedule": "1f1b", "cuts": ["second"], "max_norm": 1e9}
    pipe = zbfx.compile(of, 2, optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9), weights=weights, **options)
    for _ in range(2):
        pipe.step(good_batch())
    pipe.flush()
    state = {n: v.clone() for n, v in pipe.state_dict().items()}
    kept = copy.deepcopy(pipe.optimizer.state_dict())

    def two_more() -> list[Tensor]:
        losses = [pipe.step(good_batch()), pipe.step(good_batch()), pipe.flush()]
        return [x for x in [*losses, *pipe.state_dict().values()] if x is not None and not x.isnan().any()]

    wanted = [x.clone() for x in two_more()]
    pipe.step(good_batch())
    with pytest.raises(zbfx.RankError, match="rank 1 failed at 1F2: ValueError: no such token"):
        pipe.step(bad_batch())
    for use in (lambda: pipe.step(good_batch()), pipe.state_dict, lambda: pipe.eval_step(good_batch()), pipe.flush):
        with pytest.raises(zbfx.RankError, match="a step has failed"):
            use()
    pipe.load_state_dict(state)
    pipe.optimizer.load_state_dict(kept)
    assert all(map(same, two_more(), wanted))
