"""What cannot be taken is refused before anything runs: with the line of the user's code, and the way out."""

from __future__ import annotations

import inspect
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import zbfx
from tests.equal import case, eager, pipe_for, step
from tests.reference import differences
from tests.test_models_weights import WIDTH, Chain, mse, vectors


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Branch(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if y.sum() > 0:  # the line
            y = y * 2
        return self.b(y)


class Item(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.b(y / y.abs().max().item())  # the line


class Select(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.b(y) * y[y[:, 0] > 0].sum()  # the line


class Loop(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        for _ in range(int(y.sum())):  # the line
            y = self.b(y)
        return y


class Numpy(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.b(y + torch.from_numpy(numpy.tanh(y.detach().numpy())))  # the line


class Cond(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: self.a(v), lambda v: self.b(v), (x,))  # the line


class InputChanged(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)  # the line
        return self.b(self.a(x))


class ParameterChanged(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.a.weight.mul_(0.9)  # the line
        return self.b(self.a(x))


class Renormed(Two):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(9, WIDTH, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x + self.e(torch.zeros(len(x), dtype=torch.long))))  # the line


class Averaged(Two):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))  # the line


class Counter(Two):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # the line
        return self.b(self.a(x)) * self.calls


class Average(Two):
    """A running mean in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) - self.mean
        self.mean = self.mean * 0.9 + y.detach().mean(0)  # the line
        return self.b(y)


class History(Two):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [torch.zeros(WIDTH)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) + self.seen[-1]
        self.seen.append(y.detach().mean(0))  # the line
        return self.b(y)


class HookOnTensor(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y.register_hook(lambda grad: grad * 2)  # the line
        return self.b(y)


class Differentiates(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        (slope,) = torch.autograd.grad(self.b(y.tanh()).sum(), y, create_graph=True)  # the line
        return self.b(slope)


class Slope(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.func.grad(lambda v: v.sin().sum())(self.a(x)))  # the line


class Mapped(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.vmap(torch.sin)(self.a(x)))  # the line


REFUSED = [
    (Branch, zbfx.TraceError, "use torch.where in place of a Python branch"),
    (Item, zbfx.TraceError, r"no \.item\(\)"),
    (Select, zbfx.TraceError, "use masks and torch.where|in place of boolean indexing"),
    (Loop, zbfx.TraceError, "what to do: "),
    (Numpy, zbfx.TraceError, "numpy calls cannot be traced|what to do: "),
    (Cond, zbfx.TraceError, "write the branch with torch.where"),
    (InputChanged, zbfx.InputError, r"an input, in place. Work on a copy: .* or \.clone\(\) first"),
    (ParameterChanged, zbfx.InputError, "'a.weight', a parameter, in place. Work on a copy"),
    (Renormed, zbfx.InputError, "'e.weight', a parameter, in place"),
    (Counter, zbfx.TraceError, r"(?s)forward changes 'calls', a number .*self.register_buffer\('calls'"),
    (Average, zbfx.TraceError, r"(?s)forward changes 'mean', a tensor .*self.register_buffer\('mean'"),
    (History, zbfx.TraceError, r"(?s)forward changes 'seen', a tensor .*self.register_buffer\('seen'"),
    (HookOnTensor, zbfx.TraceError, r"(?s)a hook on a tensor .*torch.autograd.Function whose backward"),
    (Differentiates, zbfx.TraceError, r"(?s)torch.autograd.grad.*write the derivative out"),
    (Slope, zbfx.TraceError, r"(?s)torch.func.grad.*write the derivative out"),
    (Mapped, zbfx.TraceError, "batched operators in place of torch.vmap"),
    (Averaged, zbfx.TraceError, "give batch norm a momentum"),
]


def line_of(model: type[nn.Module]) -> str:
    source, start = inspect.getsourcelines(model)
    return f"test_models_refused.py:{start + next(i for i, s in enumerate(source) if '# the line' in s)}"


@pytest.mark.parametrize("model, error, way_out", REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_refused_with_line_and_way_out(model: type[nn.Module], error: type[Exception], way_out: str) -> None:
    of = case(model, mse, vectors)
    ours = of.fresh()
    before = {n: v.clone() for n, v in ours.state_dict().items()}
    with pytest.raises(error, match=way_out) as e:
        pipe_for(of, 2, model=ours)
    assert line_of(model) in str(e.value)
    assert all(torch.equal(v, before[n]) for n, v in ours.state_dict().items())


def test_lazy_modules_are_refused_until_they_have_shapes() -> None:
    of = case(lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), mse, vectors)
    with pytest.raises(zbfx.InputError, match="'weight' of a LazyLinear has no shape yet: call the model once"):
        pipe_for(of, 2)


def test_sparse_gradients_are_refused() -> None:
    class Sparse(Two):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(9, WIDTH, sparse=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(self.e(ids))).square().mean()

    of = case(Sparse, None, lambda n, g: torch.randint(0, 9, (n,), generator=g))
    with pytest.raises(zbfx.TraceError, match=r"e_weight is sparse, .*nn.Embedding\(sparse=False\)"):
        pipe_for(of, 2)


def test_more_stages_than_the_graph_gives() -> None:
    with pytest.raises(zbfx.PartitionError, match=r"num_stages=99, .* at most (\d+) stages: pass num_stages=\1 or fewer"):
        pipe_for(case(Chain, mse, vectors), 99)


def test_a_loss_with_state_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1.0)  # the line
            return mse(out, target)

    with pytest.raises(zbfx.InputError, match="in place") as e:
        pipe_for(case(Chain, Counting(), vectors), 2)
    assert line_of(Counting) in str(e.value)


def test_a_function_without_tensors_is_refused() -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            return x * 1.0, 3

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    class Uses(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(Odd.apply(self.a(x))[0])

    with pytest.raises(zbfx.TraceError, match="a custom autograd function must return tensors to be split"):
        pipe_for(case(Uses, mse, vectors), 2)


# ---------------------------------------------------------------- several devices


def on_meta(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module, _, leaf = name.rpartition(".")
        owner = model.get_submodule(module)
        setattr(owner, leaf, nn.Parameter(getattr(owner, leaf).to("meta")))
    return model


def test_parameters_partly_without_values_are_refused_unless_they_are_filled() -> None:
    of = case(Chain, mse, vectors)
    ours = on_meta(of.fresh(), "layers.2.weight")
    with pytest.raises(
        zbfx.InputError,
        match=r"'layers.2.weight' on meta, without values, and 'layers.0.weight' on cpu. Pass init= to zbfx.compile",
    ):
        zbfx.compile(ours, 2, loss=mse)
    model, pipe = pipe_for(of, 2, model=ours, init=of.fresh().state_dict())
    assert differences(model, step(of, pipe), eager(of, 2)) == []


def test_two_real_devices_are_refused() -> None:
    """Without a GPU: fake tensors say that they lie on one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    ours = case(Chain, mse, vectors).fresh()
    with FakeTensorMode():
        ours.layers[3].bias = nn.Parameter(torch.empty(WIDTH, device="cuda:1"))
    with pytest.raises(
        zbfx.InputError,
        match=r"'layers.0.weight' on cpu, 'layers.3.bias' on cuda:1. Put it on one .* model.cpu\(\) .* device_map",
    ):
        zbfx.compile(ours, 2, loss=mse, device="cpu")
