"""The whole compiler, ranks as threads: the same bits as one process, and exactly the bytes that the plan predicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch

import zbfx
from tests.models import MODELS, Case
from tests.reference import Reference, Result, differences, memory_differences

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
MICROBATCHES = (1, 2, 5, 8)
SAMPLES = 2


@dataclass(frozen=True, slots=True)
class Compiled:
    """A case's model cut into stages, and the values it started from."""

    name: str
    case: Case
    model: torch.nn.Module
    pipe: zbfx.Pipeline
    start: dict[str, torch.Tensor]

    def step(self, schedule: str, microbatches: int) -> torch.Tensor:
        """A step from the model's first values under a schedule: the loss."""
        self.model.load_state_dict(self.start)
        self.model.zero_grad(set_to_none=True)
        self.pipe.reschedule(schedule, microbatches=microbatches)
        args, kwargs, target = self.case.batch(SAMPLES * microbatches)
        return self.pipe.step(*args, target=target, **kwargs)


@cache
def case_of(name: str) -> Case:
    return MODELS[name]()


@cache
def wanted(name: str) -> dict[int, Result]:
    """The one-process result for every number of microbatches."""
    reference = Reference(case_of(name), SAMPLES)
    return {m: reference.step(m) for m in MICROBATCHES}


def compiled_for(name: str, stages: int, **options: object) -> Compiled:
    case = case_of(name)
    model = case.fresh()
    args, kwargs, target = case.batch(SAMPLES)
    pipe = zbfx.compile(
        model,
        stages,
        example_inputs=args,
        example_kwargs=kwargs,
        example_target=target,
        loss=case.loss,
        microbatches=1,
        **options,  # type: ignore[arg-type]
    )
    return Compiled(name, case, model, pipe, {n: v.clone() for n, v in model.state_dict().items()})


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_process_bit_for_bit_and_the_prediction_byte_for_byte(name: str, stages: int) -> None:
    """Loss, every gradient and every buffer, for all schedules and microbatches; then bytes, on first and later steps."""
    compiled = compiled_for(name, stages)
    wrong = {}
    for schedule in SCHEDULES:
        for m in MICROBATCHES:
            loss = compiled.step(schedule, m)
            assert compiled.pipe.plan.schedule.name == schedule and compiled.pipe.plan.schedule.microbatches == m
            wrong[schedule, m] = differences(compiled.model, loss, wanted(name)[m])
    compiled.pipe.watch(times=False, memory=True)
    args, kwargs, target = compiled.case.batch(SAMPLES * 5)
    for schedule in SCHEDULES:
        compiled.step(schedule, 5)
        wrong[schedule, "first step"] = memory_differences(compiled.pipe.plan, compiled.pipe.observed, range(stages))
        compiled.pipe.step(*args, target=target, **kwargs)  # gradients are there already: nothing else may change
        wrong[schedule, "later step"] = memory_differences(compiled.pipe.plan, compiled.pipe.observed, range(stages))
    assert len(wrong) == len(SCHEDULES) * (len(MICROBATCHES) + 2)
    assert {k: v for k, v in wrong.items() if v} == {}


@pytest.mark.parametrize("name, stages, ranks", [("gpt2", 8, 3), ("cnn", 5, 2), ("mlp", 4, 1)])
def test_fewer_ranks_than_stages(name: str, stages: int, ranks: int) -> None:
    compiled = compiled_for(name, stages, ranks=ranks)
    wrong = {}
    compiled.pipe.watch(times=False, memory=True)
    for schedule in SCHEDULES:
        for m in (1, 5):
            loss = compiled.step(schedule, m)
            assert len(compiled.pipe.plan.programs) == ranks
            wrong[schedule, m] = differences(compiled.model, loss, wanted(name)[m])
            wrong[schedule, m] += memory_differences(compiled.pipe.plan, compiled.pipe.observed, range(ranks))
    assert {k: v for k, v in wrong.items() if v} == {}


def test_the_comparison_can_fail() -> None:
    compiled = compiled_for("mlp", 2)
    loss = compiled.step("1f1b", 2)
    with torch.no_grad():
        compiled.model[0].weight.grad[0, 0] += 1e-6
    assert [d.split(",")[0] for d in differences(compiled.model, loss, wanted("mlp")[2])] == ["0.weight.grad"]
    assert differences(compiled.model, loss + 1e-6, wanted("mlp")[2])[0].startswith("loss")


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_ranks_compute_with_as_many_cpu_threads_as_the_caller(two_threads: None) -> None:
    """oneDNN sums a convolution's weight gradient in another order for another number of threads."""
    compiled = compiled_for("cnn", 8)
    assert differences(compiled.model, compiled.step("zb-h1", 2), Reference(case_of("cnn"), SAMPLES).step(2)) == []
