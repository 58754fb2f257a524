"""What is done with gradients once a step has made them: the hooks of parameters, and their joint norm over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zbfx.errors import InputError
from zbfx.holdings import Holdings
from zbfx.plan import Plan
from zbfx.runtime import Channel


def run_hooks(parameters: Sequence[torch.Tensor], target: torch.Tensor | None = None) -> None:
    """Call every `register_post_accumulate_grad_hook` of parameters that have a gradient, once. target: what has a parameter's
    gradient in its place (its float32 master, say), and is given to the hook."""
    for parameter in parameters:
        hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
        has_grad = parameter if target is None else target
        if hooks and has_grad.grad is not None:
            for hook in list(hooks.values()):
                hook(has_grad)


def refuse_lost_hooks(holdings: Holdings) -> None:
    """Raises InputError for hooks on gradients that the traced backward cannot call."""
    for name, parameter in holdings.named_parameters():
        if getattr(parameter, "_backward_hooks", None):
            raise InputError(
                f"parameter {name!r} has a hook from register_hook, which a compiled backward does not call: use "
                "register_post_accumulate_grad_hook, which runs once per step"
            )
    for name, module in holdings.model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise InputError(f"module {name!r} has a backward hook, which a compiled backward does not call: remove it")


def clip_grad_norm_(
    plan: Plan,
    holdings: Holdings,
    local: Sequence[int],
    channel: Channel | None,
    max_norm: float,
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """The norm of all gradients of all ranks, computed as torch.nn.utils.clip_grad_norm_ does in one process; then scale.

    Each parameter's norm is taken by the rank of its first stage; rank 0 puts them in the model's own order.
    """
    homes = {name: plan.schedule.placement[stage] for name, stage in _trained(plan, holdings).items()}
    mine = {name: holdings.tensor(name).grad for name, rank in homes.items() if rank in local}
    norms = {
        n: torch.linalg.vector_norm(g, norm_type) if g is not None else torch.zeros((), device=device) for n, g in mine.items()
    }
    if channel is not None:
        norms = _gathered(norms, homes, local[0], channel, device)
    total = torch.zeros((), device=device)
    if norms and len(norms) == len(homes):
        total = torch.linalg.vector_norm(torch.stack([norms[n] for n in homes]), norm_type)
    if channel is not None:
        total = total.to(torch.float32)
        channel.broadcast(total, 0)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    held = {id(p): p.grad for _, p in holdings.named_parameters() if p.grad is not None}
    for grad in held.values():
        grad.mul_(scale.to(grad.dtype) if grad.is_floating_point() else scale)
    return total


def _trained(plan: Plan, holdings: Holdings) -> dict[str, int]:
    """Parameters that get gradients -> first stage, in the model's own order, a shared one once under its first name."""
    first = {s.names[i]: s.index for s in reversed(plan.stages) for i in s.gparams}
    order = {name: i for i, (name, _) in enumerate(holdings.model.named_parameters(remove_duplicate=False))}
    return dict(sorted(first.items(), key=lambda item: order.get(item[0], len(order))))


def _gathered(
    norms: dict[str, torch.Tensor], homes: dict[str, int], rank: int, channel: Channel, device: torch.device
) -> dict[str, torch.Tensor]:
    """All norms at rank 0, which every other rank sends its own to."""
    if rank != 0:
        if norms:
            vector = torch.stack(list(norms.values())).to(torch.float32)
            channel.send(f"norms {rank}", 0, (vector,))
            channel.sent(f"norms {rank}")
        return norms
    names = {r: [n for n, home in homes.items() if home == r] for r in sorted({*homes.values()} - {0})}
    vectors = {r: torch.empty(len(own), device=device) for r, own in names.items()}
    for r, vector in vectors.items():
        channel.post(f"norms {r}", r, (vector,))
    for r, own in names.items():
        channel.recv(f"norms {r}")
        norms |= dict(zip(own, vectors[r].unbind(), strict=True))
    return norms
