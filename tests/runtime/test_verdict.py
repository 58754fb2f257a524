"""Clipping is torch's clip_grad_norm_, the dynamic scale torch's GradScaler; the order of ranks does not matter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zbfx.errors import InputError
from zbfx.runtime.verdict import LARGEST_SCALE, LossScale, Verdict, judge, measured_row


def gradients(seed: int, count: int = 6) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(3, i + 1, generator=g) * 10.0 ** (i - 2) for i in range(count)]


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_clipping_is_torchs(max_norm: float, dtype: torch.dtype) -> None:
    grads = [g.to(dtype) for g in gradients(0)]
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g.clone()
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    rows = [measured_row(grads[i : i + 2]).tolist() for i in (0, 2, 4)]
    verdict = judge(rows, range(3), max_norm)
    assert verdict.factor is not None and verdict.is_plain == (max_norm > 1e8)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert verdict.norm == pytest.approx(norm.item(), rel=tolerance)
    for p, g in zip(parameters, grads, strict=True):
        torch.testing.assert_close(g * verdict.factor, p.grad, rtol=2 * tolerance, atol=0)


def test_one_bad_element_is_a_fault_and_so_is_a_norm_beyond_float32() -> None:
    large = torch.full((4,), 1e18)
    assert measured_row([large, large]).tolist() == [pytest.approx(8e36), 0.0]
    assert measured_row([large, large.double() * 1e40]).tolist()[1] == 0.0
    assert measured_row([large * 1e19]).tolist() == [0.0, 1.0]
    for bad in (math.inf, -math.inf, math.nan):
        spoiled = [torch.ones(3), torch.tensor([1.0, bad])]
        assert measured_row(spoiled).tolist() == [pytest.approx(3.0), 1.0]
        assert judge([[0.0, 0.0], [3.0, 1.0]], [0, 1], 1.0) == Verdict(math.inf, None)
    assert measured_row([]).tolist() == [0.0, 0.0]
    assert judge([[4.0, 0.0]], [0], None) == Verdict(2.0, 1.0)


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=8), st.randoms())
def test_the_verdict_does_not_depend_on_who_holds_which_stage(squares: list[float], random: object) -> None:
    rows = [[s, 0.0] for s in squares]
    stages = list(range(len(rows)))
    wanted = judge(rows, stages, 1.0)
    random.shuffle(stages)  # type: ignore[attr-defined]
    assert judge(rows, stages, 1.0) == wanted


@settings(max_examples=20)
@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_the_dynamic_scale_is_grad_scalers(skips: list[bool]) -> None:
    """Halved, grown and stepped or not as torch.amp.GradScaler does it, whose growth interval is set to 3 to see it grow."""
    torchs = torch.amp.GradScaler("cpu", growth_interval=3)
    ours = LossScale("dynamic", interval=3)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for skip in skips:
        scale = torchs.scale(torch.ones(())).item()
        assert ours.value == scale
        parameter.grad = torch.full((1,), math.inf if skip else scale)
        before = parameter.item()
        torchs.step(optimizer)
        torchs.update()
        assert (parameter.item() == before) == skip
        verdict = judge([measured_row([parameter.grad]).tolist()], [0], None)
        assert (verdict.factor is None) == skip
        ours.learn(verdict.factor is None)
    assert ours.value == torchs.get_scale()


def test_a_scale_has_bounds_and_a_fixed_one_stays() -> None:
    scale = LossScale("dynamic", interval=1)
    for _ in range(200):
        scale.learn(False)
    assert scale.value == LARGEST_SCALE and math.isfinite(torch.tensor(scale.value, dtype=torch.float32).item())
    fixed = LossScale(128)
    fixed.learn(True)
    assert fixed.value == 128.0 and LossScale(None).value == 1.0
    for value in (0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="give a positive number"):
            LossScale(value)
    with pytest.raises(InputError, match="loss_scale='much': give a positive number"):
        LossScale("much")
