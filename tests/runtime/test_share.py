"""A share of an optimizer steps its parameters exactly as the whole one does; a snapshot takes a step back bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from zbfx.errors import InputError
from zbfx.runtime.share import Share, Snapshot, settings_of


class Own(Optimizer):
    """A user's: nested state, its own numbers, and it writes into the gradients."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p]
                    kept["times"] = kept.get("times", 0) + 1
                    kept.setdefault("last", [torch.zeros_like(p)])[0].add_(p.grad.mul_(0.5))
                    p.sub_(kept["last"][0], alpha=group["lr"] / kept["times"])


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
    "own": Own,
}


def parameters() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=g)) for shape in [(4, 3), (3,), (2, 2), (5,)]]


def give_gradients(to: list[nn.Parameter], seed: int, *, without: int | None = 3) -> None:
    g = torch.Generator().manual_seed(seed)
    for i, p in enumerate(to):
        grad = torch.randn(p.shape, generator=g)
        p.grad = None if i == without else grad


def state_of(optimizer: Optimizer, ps: list[nn.Parameter]) -> list[Any]:
    leaves = pytree.tree_leaves([dict(optimizer.state.get(p, {})) for p in ps])
    return [*[p.detach().clone() for p in ps], *[x.clone() if isinstance(x, Tensor) else x for x in leaves]]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shares_step_as_the_whole_does(name: str) -> None:
    """Two groups with their own rates, a scheduler, a parameter without gradient, two shares that cut across the groups."""
    whole, parts = parameters(), parameters()
    theirs, ours = (OPTIMIZERS[name]([{"params": ps[:2]}, {"params": ps[2:], "lr": 0.02}]) for ps in (whole, parts))
    shares = [Share(ours, parts[::2]), Share(ours, parts[1::2])]
    rates = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.5) for opt in (theirs, ours)]
    for step in range(4):
        give_gradients(whole, step)
        give_gradients(parts, step)
        settings = settings_of(ours)
        for rate in rates:  # a scheduler moves on before a late step is taken
            if rate.optimizer is ours:
                rate.step()
        for share in shares:
            share.step(settings)
        theirs.step()
        rates[0].step()
        assert same(state_of(ours, parts), state_of(theirs, whole))
    assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups] == [pytest.approx(0.1 / 16), 0.02 / 16]
    assert shares[0].settings(parts[2])["lr"] == pytest.approx(0.02 / 8) and shares[0].settings(nn.Parameter(torch.ones(1))) == {}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_snapshot_takes_a_step_back_bit_for_bit(name: str) -> None:
    """The first step of all (after which there is no state again) and a later one; parameters, state, gradients; and the step
    can be taken again."""
    ps = parameters()
    optimizer = OPTIMIZERS[name](ps)
    share = Share(optimizer, ps)
    for step in range(3):
        give_gradients(ps, step)
        before, grads = state_of(optimizer, ps), [None if p.grad is None else p.grad.clone() for p in ps]
        snapshot = Snapshot(share, ps)
        share.step(settings_of(optimizer))
        snapshot.stepped()
        after = state_of(optimizer, ps)
        assert not same(after, before)
        snapshot.restore()
        assert same(state_of(optimizer, ps), before)
        assert all(p.grad is None or torch.equal(p.grad, g) for p, g in zip(ps, grads, strict=True))
        share.step(settings_of(optimizer))
        assert same(state_of(optimizer, ps), after)


def test_gradients_are_kept_where_the_optimizer_writes_into_them_only() -> None:
    for name, spoils in (("own", True), ("foreach", True), ("sgd", False), ("adamw", False)):
        ps = parameters()
        share = Share(optimizer := OPTIMIZERS[name](ps), ps)
        give_gradients(ps, 0)
        share.step(settings_of(optimizer))
        assert share.spoils == spoils
        assert bool(Snapshot(share, ps)._grads) == spoils


def test_settings_are_copies() -> None:
    """A rate that is a tensor may be changed in place."""
    (p, *_) = parameters()
    optimizer = torch.optim.AdamW([p], lr=torch.tensor(0.1))
    settings = settings_of(optimizer)
    optimizer.param_groups[0]["lr"].fill_(7.0)
    assert settings[0]["lr"].item() == pytest.approx(0.1) and "params" not in settings[0]
    assert copy.copy(settings) == settings


class Counting(torch.optim.SGD):
    """Counts its steps in the group, as some optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_an_optimizer_that_changes_its_groups_is_refused() -> None:
    ps = parameters()
    share = Share(optimizer := Counting(ps, lr=0.1), ps[:2])
    give_gradients(ps, 0)
    with pytest.raises(InputError, match="Counting writes 'k' into its param_groups"):
        share.step(settings_of(optimizer))
