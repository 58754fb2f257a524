"""A model in a pipeline against the same model in one process: what differs, for several stage counts at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import zbfx
from tests.models import Case
from tests.reference import Reference, Result, differences, memory_differences

SAMPLES = 2  # of a microbatch
Batch = tuple[tuple[Any, ...], dict[str, Any], Any]


def case(build: Callable[[], nn.Module], loss: Any, batch: Callable[[int, torch.Generator], Any], *, train: bool = True) -> Case:
    """A Case of a model built from seed 0. batch(n, generator): its args (a tuple or one tensor), or (args, kwargs, target)."""

    def whole(n: int) -> Batch:
        made = batch(n, torch.Generator().manual_seed(n))
        if isinstance(made, torch.Tensor):
            made = (made,)
        return made if len(made) == 3 and isinstance(made[1], dict) else (made, {}, None)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Case(build().train(train), loss, whole)


def part(batch: Batch, index: int, count: int) -> Batch:
    """One of `count` equal slices of every tensor that has dimensions."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.chunk(count)[index] if t.dim() else t, batch)


def eager(case: Case, microbatches: int, model: nn.Module | None = None) -> Result:
    """A step of the plain model in one process: each microbatch's loss / microbatches, then its backward."""
    model = case.fresh() if model is None else model
    batch = case.batch(SAMPLES * microbatches)
    total: torch.Tensor | None = None
    for mb in range(microbatches):
        args, kwargs, target = part(batch, mb, microbatches)
        output = model(*args, **kwargs)
        loss = (own_loss(output) if case.loss is None else case.loss(output, target)) / microbatches
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Result(total, grads, {n: b.clone() for n, b in model.named_buffers()})


def own_loss(output: Any) -> torch.Tensor:
    """The loss that a model returns."""
    return output if isinstance(output, torch.Tensor) else output.loss


def exported(case: Case, microbatches: int) -> Result:
    """The same step of the model as torch.export gives it, unsplit."""
    return Reference(case, SAMPLES).step(microbatches)


def pipe_for(case: Case, stages: int, microbatches: int = 2, **options: Any) -> tuple[nn.Module, zbfx.Pipeline]:
    """A fresh model and its compiled pipeline."""
    model = options.pop("model", None) or case.fresh()
    args, kwargs, target = case.batch(SAMPLES * microbatches)
    pipe = zbfx.compile(
        model, stages, example_inputs=args, example_kwargs=kwargs, example_target=target, loss=case.loss,
        microbatches=microbatches, **options,
    )  # fmt: skip
    return model, pipe


def step(case: Case, pipe: zbfx.Pipeline, microbatches: int = 2) -> torch.Tensor:
    """A step over the case's batch."""
    args, kwargs, target = case.batch(SAMPLES * microbatches)
    return pipe.step(*args, target=target, **kwargs)


def wrong(
    case: Case, wanted: Result, stages: Sequence[int] = (2, 4), microbatches: int = 2, *, memory: bool = True, **options: Any
) -> Mapping[int, Any]:
    """Stages -> what is not bitwise `wanted`, or (memory) holds other bytes than predicted; empty where all is equal."""
    found = {}
    for count in stages:
        model, pipe = pipe_for(case, count, microbatches, **options)
        pipe.watch(times=False, memory=True)
        loss = step(case, pipe, microbatches)
        found[count] = differences(model, loss, wanted)
        if memory:
            found[count] += memory_differences(pipe.plan, pipe.observed, range(len(pipe.plan.programs)))
    return {count: differ for count, differ in found.items() if differ}


def largest(model: nn.Module, wanted: Result) -> tuple[float, str]:
    """The largest difference of a gradient, relative to that gradient's largest element, and whose it is."""
    found = [(0.0, "")]
    for name, parameter in model.named_parameters():
        want = wanted.grads.get(name)
        if want is not None:
            assert parameter.grad is not None, f"{name} got no gradient"
            found.append((((parameter.grad - want).abs().max() / want.abs().max().clamp_min(1e-30)).item(), name))
    return max(found)
