"""What a user meets: every way to call compile and step, and every refusal with its place and way out."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import zbfx
from tests.models import MODELS, Case
from tests.reference import Reference, differences


def mlp_pipe(stages: int = 2, **options: Any) -> tuple[Case, nn.Module, zbfx.Pipeline]:
    case = MODELS["mlp"]()
    model = case.fresh()
    options = {"loss": case.loss, "microbatches": 2, **options}
    return case, model, zbfx.compile(model, stages, **options)


def equals_eager(
    pipe: zbfx.Pipeline, model: nn.Module, loss: Any, args: Any = (), kwargs: Any = None, target: Any = None
) -> None:
    """A step's loss and gradients are those of eager autograd on the whole batch, up to the order of sums."""
    kwargs = kwargs or {}
    twin = copy.deepcopy(model)
    wanted = loss(twin(*args, **kwargs), target)
    wanted.backward()
    got = pipe.step(*args, target=target, **kwargs)
    torch.testing.assert_close(got, wanted.detach())
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=lambda m, name=name: f"{name}: {m}")


# ---------------------------------------------------------------- when it compiles


def test_without_examples_it_compiles_at_the_first_step() -> None:
    case, model, pipe = mlp_pipe()
    with pytest.raises(zbfx.InputError, match="nothing is compiled yet: pass example_inputs"):
        _ = pipe.plan
    args, _, target = case.batch(4)
    loss = pipe.step(*args, target=target)
    assert differences(model, loss, Reference(case, 2).step(2)) == []
    assert pipe.plan.microbatches == 2


def test_with_examples_it_compiles_at_once_and_history_has_every_pass() -> None:
    case = MODELS["mlp"]()
    args, _, target = case.batch(4)
    _, model, pipe = mlp_pipe(example_inputs=args, example_target=target)
    assert [name for name, _ in pipe.plan.history] == [
        "capture", "partition", "split_backward", "resident", "estimate", "order", "simulate", "allocate", "codegen",
    ]  # fmt: skip
    assert all(p.grad is None for p in model.parameters())
    assert "2 stages on 2 ranks, zb-h1, 2 microbatches" in str(pipe.plan)
    assert set(pipe.plan.owners) == {n for n, _ in model.named_parameters()}


def test_other_input_shapes_are_compiled_for_and_parameters_stay_in_place() -> None:
    case = MODELS["gpt2"](layers=1)
    model = case.fresh()
    _, kwargs, _ = case.batch(4)
    pipe = zbfx.compile(model, 2, example_kwargs=kwargs, microbatches=2)
    owners, plan = pipe.plan.owners, pipe.plan
    pipe.step(**kwargs)
    for length, samples in ((7, 4), (12, 2)):
        model.zero_grad()
        ids = kwargs["input_ids"][:samples, :length].contiguous()
        equals_eager(pipe, model, lambda out, _: out.loss, kwargs={"input_ids": ids, "labels": ids})
        assert pipe.plan.owners == owners and pipe.plan is not plan
    pipe.step(**kwargs)
    assert pipe.plan is plan  # a shape that was seen before is not compiled again


def test_train_and_eval_mode_of_the_users_model_have_plans_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    pipe = zbfx.compile(model, 2, loss=nn.functional.mse_loss, microbatches=1)
    x, target = torch.randn(6, 4), torch.randn(6, 2)
    equals_eager(pipe, model, nn.functional.mse_loss, (x,), target=target)
    model.zero_grad()
    model.eval()
    equals_eager(pipe, model, nn.functional.mse_loss, (x,), target=target)
    assert model[1].num_batches_tracked == 1


# ---------------------------------------------------------------- inputs and losses


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


torch.utils._pytree.register_dataclass(Output)


class OwnLoss(nn.Module):
    """Returns its own loss in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.a, self.b = way, nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.b(torch.tanh(self.a(x)))
        loss = logits.square().mean()
        ways = {"tensor": loss, "object": Output(loss, logits), "dict": {"loss": loss, "logits": logits}, "tuple": (loss, logits)}
        return ways[self.way]


@pytest.mark.parametrize("way", ["tensor", "object", "dict", "tuple"])
def test_a_models_own_loss(way: str) -> None:
    model = OwnLoss(way)
    pick = {"tensor": lambda o: o, "object": lambda o: o.loss, "dict": lambda o: o["loss"], "tuple": lambda o: o[0]}[way]
    pipe = zbfx.compile(model, 2, microbatches=2)
    equals_eager(pipe, model, lambda out, _: pick(out), (torch.randn(4, 4),))


def test_a_missing_loss_is_refused() -> None:
    pipe = zbfx.compile(nn.Linear(4, 2), 1, microbatches=1)
    with pytest.raises(zbfx.InputError, match=r"returned a tensor of shape \[3, 2\] where a scalar loss is needed. Pass loss=fn"):
        pipe.step(torch.randn(3, 4))


class Picky(nn.Module):
    """Takes keyword, nested, None and non-tensor inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(
        self, x: dict[str, Any], *, mask: torch.Tensor | None = None, scale: float = 1.0, flip: bool = False, mode: str = "tanh"
    ) -> torch.Tensor:
        h = self.a(x["left"] + x["pair"][0] * x["pair"][1])
        h = torch.tanh(h) if mode == "tanh" else torch.relu(h)
        h = h if mask is None else h * mask
        return self.b(-h if flip else h) * scale


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"mask": torch.ones(4, 8).tril()}, {"mask": None, "scale": 0.5}, {"flip": True, "mode": "relu"}],
    ids=["none", "mask", "scale", "flags"],
)
def test_keyword_nested_none_and_plain_inputs(kwargs: dict[str, Any]) -> None:
    model = Picky()
    pipe = zbfx.compile(model, 2, loss=nn.functional.mse_loss, microbatches=2)
    x = {"left": torch.randn(4, 4), "pair": (torch.randn(4, 4), 3)}
    equals_eager(pipe, model, nn.functional.mse_loss, (x,), kwargs, torch.randn(4, 2))


def test_another_plain_value_is_compiled_for() -> None:
    """A value that is part of the trace must not be taken from an earlier call."""
    model = Picky()
    pipe = zbfx.compile(model, 2, loss=nn.functional.mse_loss, microbatches=2)
    x, target = {"left": torch.randn(4, 4), "pair": (torch.randn(4, 4), 3)}, torch.randn(4, 2)
    first = pipe.step(x, target=target, scale=1.0)
    other = pipe.step(x, target=target, scale=2.0)
    assert first != other
    assert pipe.step(x, target=target, scale=1.0) == first


def test_a_nested_target() -> None:
    model = nn.Linear(4, 2)

    def loss(out: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        return ((out - target["y"]) * target["weight"]).square().mean()

    pipe = zbfx.compile(model, 1, loss=loss, microbatches=2)
    equals_eager(pipe, model, loss, (torch.randn(4, 4),), target={"y": torch.randn(4, 2), "weight": torch.rand(4, 1)})


def test_shared_inputs_go_whole_to_every_microbatch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return (self.a(x) @ table).square().mean()

    model = Model()
    pipe = zbfx.compile(model, 1, microbatches=2, shared=["table"])
    equals_eager(pipe, model, lambda out, _: out, (torch.randn(4, 4),), {"table": torch.randn(4, 4)})


def test_a_batch_that_does_not_divide_is_refused_before_anything_ran() -> None:
    case = MODELS["cnn"]()
    model = case.fresh()
    pipe = zbfx.compile(model, 2, loss=case.loss, microbatches=4)
    args, _, target = case.batch(6)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    with pytest.raises(zbfx.InputError, match=r"a batch of 6 does not divide into microbatches=4 .* from \[1, 2, 3, 6\]"):
        pipe.step(*args, target=target)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_reduction_sum() -> None:
    case, model, pipe = mlp_pipe(reduction="sum")
    args, _, target = case.batch(4)
    loss = pipe.step(*args, target=target)
    assert differences(model, loss, Reference(case, 2).step(2, reduction="sum")) == []
    assert differences(model, loss, Reference(case, 2).step(2)) != []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"reduction": "max"}, "reduction='max': choose one of"),
        ({"microbatches": 0}, "microbatches=0: a step needs at least 1"),
        ({"num_stages": 0}, "num_stages=0: a pipeline has at least 1"),
        ({"schedule": "2f2b"}, "'2f2b' is no fixed schedule; there are .*zb-h1"),
        ({"ranks": 3}, "ranks=3 must lie between 1 and num_stages=2"),
        ({"device": "mps"}, "zbfx runs on cpu and cuda"),
        ({"memory": "lots"}, "'lots' is no size"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    case = MODELS["mlp"]()
    args, _, target = case.batch(4)
    with pytest.raises(zbfx.InputError, match=message):
        zbfx.compile(
            case.fresh(), **{"num_stages": 2, "microbatches": 2, **options},
            loss=case.loss, example_inputs=args, example_target=target,
        )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_cuda_without_cuda_is_refused() -> None:
    with pytest.raises(zbfx.InputError, match="no CUDA device: kernels are chosen where they run"):
        zbfx.compile(nn.Linear(2, 2), 1, device="cuda")


# ---------------------------------------------------------------- memory


def test_a_memory_budget_is_kept_or_the_error_says_by_how_much() -> None:
    case = MODELS["mlp"]()
    args, _, target = case.batch(4)
    options = {"example_inputs": args, "example_target": target, "schedule": "gpipe"}
    plan = mlp_pipe(**options)[2].plan
    needs = [static + program.peak for static, program in zip(plan.static_bytes, plan.programs, strict=True)]
    worst = needs.index(max(needs))
    assert mlp_pipe(**options, memory=max(needs))[2].plan.programs[worst].peak == plan.programs[worst].peak
    with pytest.raises(zbfx.MemoryBudgetError, match=f"rank {worst} needs {plan.programs[worst].peak} bytes .* 1 over its limit"):
        mlp_pipe(**options, memory=max(needs) - 1)
    with pytest.raises(zbfx.InputError, match="parameters, gradients and buffers alone take"):
        mlp_pipe(**options, memory="1KiB")


# ---------------------------------------------------------------- where it cuts


def test_as_many_stages_as_the_graph_allows_and_no_more() -> None:
    case = MODELS["mlp"]()
    args, _, target = case.batch(4)
    with pytest.raises(zbfx.PartitionError, match=r"num_stages=500, .* at most \d+ stages: pass num_stages=(\d+) or fewer") as e:
        mlp_pipe(500, example_inputs=args, example_target=target)
    most = int(str(e.value).split("num_stages=")[2].split()[0])
    case, model, pipe = mlp_pipe(most)
    assert differences(model, pipe.step(*args, target=target), Reference(case, 2).step(2)) == []
    assert len(pipe.plan.stages) == most > 10


def test_one_stage_is_a_pipeline_too() -> None:
    case, model, pipe = mlp_pipe(1)
    args, _, target = case.batch(4)
    assert differences(model, pipe.step(*args, target=target), Reference(case, 2).step(2)) == []


def test_cuts_can_be_pinned_by_module_name() -> None:
    case = MODELS["mlp"]()
    args, _, target = case.batch(4)
    free = mlp_pipe(3, example_inputs=args, example_target=target)[2].plan.owners
    case, model, pipe = mlp_pipe(3, cuts=["2", "11"])
    loss = pipe.step(*args, target=target)
    assert {n: s for n, s in pipe.plan.owners.items() if n.endswith("weight")} == {
        "0.weight": 0, "2.weight": 1, "3.weight": 1, "5.weight": 1, "6.weight": 1, "8.weight": 1, "9.weight": 1,
        "11.weight": 2, "12.weight": 2, "14.weight": 2,
    }  # fmt: skip
    assert pipe.plan.owners != free  # so the pins did something
    assert differences(model, loss, Reference(case, 2).step(2)) == []


@pytest.mark.parametrize(
    "cuts, message",
    [
        (["h.7"], "no module named 'h.7'"),
        (["0"], "cannot cut before module '0': it is the first"),
        (["2", "4"], "pin at most 1 module"),
    ],
)
def test_impossible_pins_are_refused(cuts: list[str], message: str) -> None:
    case = MODELS["mlp"]()
    args, _, target = case.batch(4)
    with pytest.raises(zbfx.PartitionError, match=message):
        mlp_pipe(2, cuts=cuts, example_inputs=args, example_target=target)


def test_a_skip_connection_over_several_stages() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = torch.tanh(self.layers[0](x))
            h = first
            for layer in self.layers[1:]:
                h = torch.tanh(layer(h))
            return (h + first * first.mean()).square().mean()

    torch.manual_seed(0)
    case = Case(Skip(), None, lambda n: ((torch.randn(n, 8, generator=torch.Generator().manual_seed(n)),), {}, None))
    model = case.fresh()
    reference = Reference(Case(_Own(case.model), None, case.batch), 2)
    pipe = zbfx.compile(model, 5, microbatches=3)
    wanted = reference.step(3)
    got = pipe.step(*case.batch(6)[0])
    assert torch.equal(got, wanted.loss)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, wanted.grads["model." + name]), name


class _Own(nn.Module):
    """Wraps a model that returns a bare loss into one whose output has `.loss`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Output:
        loss = self.model(*args)
        return Output(loss, loss)


# ---------------------------------------------------------------- meta device


@pytest.mark.parametrize("how", ["function", "state dict"])
def test_a_model_on_the_meta_device(how: str) -> None:
    case = MODELS["cnn"]()
    state = case.model.state_dict()
    with torch.device("meta"):
        model = copy.deepcopy(case.model).to("meta")
    asked: list[str] = []

    def fill(name: str, tensor: torch.Tensor) -> None:
        asked.append(name)
        tensor.copy_(state[name])

    args, _, target = case.batch(4)
    pipe = zbfx.compile(model, 3, loss=case.loss, microbatches=2, init=fill if how == "function" else state)
    loss = pipe.step(*args, target=target)
    assert not any(p.is_meta for p in model.parameters())
    assert differences(model, loss, Reference(case, 2).step(2)) == []
    assert how != "function" or sorted(asked) == sorted(state)


def test_a_meta_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    with pytest.raises(zbfx.InputError, match=r"2 tensors lie on the meta device .* 'weight' first: pass init="):
        zbfx.compile(model, 1, loss=nn.functional.mse_loss, microbatches=1).step(torch.randn(2, 4), target=torch.randn(2, 2))


# ---------------------------------------------------------------- what cannot be traced


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if h.sum() > 0:  # the line
            h = -h
        return h.square().mean()


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)  # the line
        return self.a(x).square().mean()


def line_of(module: type[nn.Module]) -> str:
    import inspect

    source, start = inspect.getsourcelines(module)
    return f"{__file__.rsplit('/', 1)[-1]}:{start + next(i for i, s in enumerate(source) if '# the line' in s)}"


def test_data_dependent_control_flow_names_the_line() -> None:
    with pytest.raises(zbfx.TraceError) as e:
        zbfx.compile(Branching(), 1, microbatches=1, example_inputs=(torch.randn(2, 4),))
    assert f"{line_of(Branching)} in forward" in str(e.value) and "what to do: use torch.where" in str(e.value)


def test_an_input_changed_in_place_names_the_line() -> None:
    with pytest.raises(zbfx.InputError, match=r"in place\. Work on a copy") as e:
        zbfx.compile(ChangesItsInput(), 1, microbatches=1, example_inputs=(torch.randn(2, 4),))
    assert str(e.value).startswith(line_of(ChangesItsInput))


def test_nothing_to_train_is_refused() -> None:
    model = nn.Linear(4, 2).requires_grad_(False)
    with pytest.raises(zbfx.InputError, match="the loss needs no gradient"):
        zbfx.compile(model, 1, loss=nn.functional.mse_loss, microbatches=1).step(torch.randn(2, 4), target=torch.randn(2, 2))
