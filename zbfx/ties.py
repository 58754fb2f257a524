"""Parameters that several stages use: each stage gathers its own gradient, and a step ends with their sum on every holder."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zbfx.plan import Plan
from zbfx.runtime import Channel


@dataclass(frozen=True, slots=True, eq=False)
class Tie:
    """A parameter, the stages that use it, and for each local stage what gathers its gradient.

    Stages on different ranks gather in stand-ins, whose sums over microbatches are added at the end of the step. Stages of
    one rank add up microbatch by microbatch, last stage first, which is eager autograd's own order: bit for bit the same.
    """

    name: str
    parameter: torch.Tensor
    stages: tuple[int, ...]
    parts: dict[int, Any]
    on_one_rank: bool


class _Part:
    """One stage's gradients of a tied parameter on one rank: microbatches wait here for the other stages'."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.waiting: deque[torch.Tensor] = deque()
        self.others: list[_Part] = []  # the parts of all stages, last stage first

    def add(self, grad: torch.Tensor) -> None:
        self.waiting.append(grad)
        if all(part.waiting for part in self.others):
            first, *rest = [part.waiting.popleft() for part in self.others]
            for grad in rest:
                first.add_(grad)  # W gives tensors that nobody else looks at
            parameter = self.parameter
            parameter.grad = first if parameter.grad is None else parameter.grad.add_(first)


def _parts_of_one_rank(parameter: torch.Tensor, stages: Sequence[int]) -> dict[int, Any]:
    parts = {k: _Part(parameter) for k in stages}
    for part in parts.values():
        part.others = [parts[k] for k in sorted(stages, reverse=True)]
    return parts


Target = Callable[[str], torch.Tensor]


def find_ties(plan: Plan, target: Target) -> tuple[Tie, ...]:
    """The parameters that get gradients on more than one stage. target(name): what gathers the gradient on one rank."""
    users: dict[str, list[int]] = {}
    for stage in plan.stages:
        for i in stage.gparams:
            users.setdefault(stage.names[i], []).append(stage.index)
    ties = []
    for name, stages in users.items():
        if len(stages) > 1:
            parameter = target(name)
            together = len({plan.schedule.placement[k] for k in stages}) == 1
            apart = {k: parameter.detach().requires_grad_() for k in stages}
            parts = _parts_of_one_rank(parameter, stages) if together else apart
            ties.append(Tie(name, parameter, tuple(stages), parts, together))
    return tuple(ties)


def sum_ties(
    ties: Sequence[Tie], plan: Plan, local: Sequence[int], channel: Channel | None, target: Target | None = None
) -> None:
    """Add the sum over stages, last stage first, to the parameter's gradient, on every rank that holds it."""
    for number, tie in enumerate(ties):
        place = plan.schedule.placement
        mine = [k for k in reversed(tie.stages) if place[k] in local]
        if not mine or tie.on_one_rank:
            continue
        grads = [tie.parts[k].grad for k in mine]
        total = grads[0]
        for grad in grads[1:]:
            total = total + grad
        for k in mine:
            tie.parts[k].grad = None
        ranks = sorted({place[k] for k in tie.stages}, reverse=True)
        if channel is not None and total is not None and len(ranks) > 1:
            total = _exchange(f"tie {number}", total, ranks, local[0], channel)
        if total is not None:
            parameter = tie.parameter if target is None else target(tie.name)
            parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)


def _exchange(name: str, mine: torch.Tensor, ranks: Sequence[int], rank: int, channel: Channel) -> torch.Tensor:
    """Sum at the owner (the last of `ranks`, which holds the first stage), in the order of `ranks`; then back to all."""
    owner, others = ranks[-1], ranks[:-1]
    if rank != owner:
        total = torch.empty_like(mine)
        channel.post(f"{name} {owner}>{rank}", owner, (total,))
        channel.send(f"{name} {rank}>{owner}", owner, (mine,))
        channel.recv(f"{name} {owner}>{rank}")
        channel.sent(f"{name} {rank}>{owner}")
        return total
    parts = [torch.empty_like(mine) for _ in others]
    for other, part in zip(others, parts, strict=True):
        channel.post(f"{name} {other}>{owner}", other, (part,))
    for other in others:
        channel.recv(f"{name} {other}>{owner}")
    total = parts[0]
    for part in [*parts[1:], mine]:
        total = total + part
    for other in others:
        channel.send(f"{name} {owner}>{other}", other, (total,))
    for other in others:
        channel.sent(f"{name} {owner}>{other}")
    return total
