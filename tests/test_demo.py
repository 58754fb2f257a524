"""The demo, made short: it runs, it prints, and its check can fail."""

from __future__ import annotations

import os

import pytest
import torch

from zbfx.demo import compare_with_one_process, main, measured_costs
from zbfx.demo_model import SEQUENCE, batches, build_model
from zbfx.ir import Action, Cost, CostModel, Span, Timeline


def test_demo_prints_what_it_promises(capfd, monkeypatch):
    monkeypatch.setitem(os.environ, "COLUMNS", "100")
    assert main(["--steps", "4", "--layers", "2", "--batch", "4", "--microbatches", "2", "--ranks", "2"]) == 0
    out = capfd.readouterr().out
    assert "4 stages on 2 processes over gloo; zb-h1, 2 microbatches" in out
    assert "step 4/4  loss " in out and " tokens/s" in out
    assert "% measured" in out and "% predicted" in out and "% estimated" in out
    assert out.count("of activations, exactly as predicted") == 2
    assert "29 of 29 equal, bit for bit; its loss equal" in out


@pytest.mark.parametrize("change", [0.0, 1e-7])
def test_the_check_sees_one_changed_number(change):
    settings = {"layers": 1, "microbatches": 2}
    ids = next(batches(4))
    assert ids.shape == (4, SEQUENCE)
    model = build_model(1)
    loss = torch.zeros(())
    for part in ids.chunk(2):
        mean = model(part, labels=part).loss / 2
        mean.backward()
        loss = loss + mean.detach()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    gradients["lm_head.weight"][0, 0] += change
    found = compare_with_one_process(settings, ids, loss.item() + change, gradients)
    assert found["different"] == (["lm_head.weight"] if change else [])
    assert found["loss"] is (change == 0.0)


def test_measured_costs_are_medians():
    def timeline(seconds: float) -> Timeline:
        spans = ((Span(Action(0, "F", 0), 1.0, 1.0 + seconds), Span(Action(0, "W", 0), 5.0, 5.0 + 2 * seconds)),)
        return Timeline(spans, 0.0, 0.0, 0.0, 0.0, (0,))

    costs = CostModel((Cost(9.0, 9.0, 9.0, 7),), ((0.0,),), (None,))
    (found,) = measured_costs(costs, [timeline(1.0), timeline(2.0), timeline(50.0)]).stages
    assert found == Cost(2.0, 0.0, 4.0, 7)
