"""What ranks do with gradients after a step, on real processes: clipping by the norm of all, weights that two ranks hold."""

from __future__ import annotations

import torch

from tests.equal import case, eager, pipe_for, step
from tests.models import MODELS
from tests.test_models_weights import Tied, mse, vectors


def clipped(kind: float) -> list[str]:
    """What clipping by the joint norm of all ranks gives that is not bitwise one process's, on this rank."""
    of = MODELS["mlp"]()
    _, pipe = pipe_for(of, 4)
    twin = of.fresh()
    step(of, pipe)
    eager(of, 2, twin)
    norm, wanted = pipe.clip_grad_norm_(0.05, kind), torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05, kind)
    wrong = [] if torch.equal(norm, wanted) and norm > 0.05 else [f"norm {norm.item()!r} != {wanted.item()!r}"]
    held, theirs = dict(pipe.named_parameters()), {name: p.grad for name, p in twin.named_parameters()}
    wrong += [] if 0 < len(held) < len(theirs) else [f"this rank holds {sorted(held)}"]
    pipe.close()
    return wrong + [name for name, p in held.items() if not torch.equal(p.grad, theirs[name])]


def tied() -> list[str]:
    """20 optimizer steps with a weight that both ranks hold: where this rank's losses and parameters leave one process's.

    Each rank sums its own part over microbatches first, so not bitwise: 1e-6 relative in losses, 1e-5 in parameters.
    """
    of = case(Tied, mse, vectors)
    _, pipe = pipe_for(of, 2)
    twin = of.fresh()
    ours, theirs = (torch.optim.SGD(list(p), lr=0.2, momentum=0.9) for p in (pipe.parameters(), twin.parameters()))
    wrong, losses = [], []
    for i in range(20):
        wanted = eager(of, 2, twin).loss
        losses.append(step(of, pipe))
        if not torch.allclose(losses[-1], wanted, rtol=1e-6, atol=0):
            wrong.append(f"loss of step {i}: {losses[-1].item()!r} != {wanted.item()!r}")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    wrong += [] if losses[-1] < 0.8 * losses[0] else ["the loss does not fall"]
    held, reference = dict(pipe.named_parameters()), dict(twin.named_parameters())
    wrong += [] if "layers.0.weight" in held and len(held) < len(reference) else [f"this rank holds {sorted(held)}"]
    pipe.close()
    return wrong + [n for n, p in held.items() if not torch.allclose(p, reference[n], rtol=1e-5, atol=1e-6)]
