"""What a pipeline must equal bit for bit: the unsplit exported model on one process (the design's invariant 1).

Every microbatch in order: its loss divided by their number, then its backward. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.models import Case
from zbfx import Plan
from zbfx.codegen.program import begun_action
from zbfx.engine import Observed
from zbfx.ir import Program


@dataclass(frozen=True, slots=True)
class Result:
    """A step's loss, and after it the gradients and buffers by the user's names."""

    loss: torch.Tensor
    grads: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


class _Whole(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor] | None) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.train(model.training)

    def forward(self, args: Any, kwargs: Any, target: Any) -> torch.Tensor:
        output = self.model(*args, **kwargs)
        return output.loss if self.loss is None else self.loss(output, target)


def microbatch(batch: Any, index: int, count: int) -> Any:
    """One of `count` equal slices of every tensor of a batch."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.chunk(count)[index], batch)


class Reference:
    """The exported model, for microbatches of `samples` samples."""

    def __init__(self, case: Case, samples: int) -> None:
        self.case, self.samples, self.model = case, samples, case.fresh()
        exported = torch.export.export(_Whole(self.model, case.loss), case.batch(samples), strict=False)
        self.module = exported.module()
        self.start = {name: value.clone() for name, value in self.module.state_dict().items()}

    def step(self, microbatches: int, *, reduction: str = "mean") -> Result:
        """One step from the case's own values, over the batch of microbatches * samples samples."""
        self.module.load_state_dict(self.start)
        self.module.zero_grad(set_to_none=True)
        return self.go_on(microbatches, reduction=reduction)

    def go_on(self, microbatches: int, *, reduction: str = "mean") -> Result:
        """One step from where the last one (or the caller's optimizer) left the parameters, buffers and gradients."""
        batch = self.case.batch(self.samples * microbatches)
        total: torch.Tensor | None = None
        for mb in range(microbatches):
            loss = self.module(*microbatch(batch, mb, microbatches))
            part = loss / microbatches if reduction == "mean" else loss
            part.backward()
            total = part.detach() if total is None else total + part.detach()
        assert total is not None
        named = {n.removeprefix("model."): p.grad for n, p in self.module.named_parameters()}
        buffers = {n.removeprefix("model."): b.clone() for n, b in self.module.named_buffers()}
        return Result(total, {n: g.clone() for n, g in named.items() if g is not None}, buffers)


def differences(model: torch.nn.Module, loss: torch.Tensor, wanted: Result) -> list[str]:
    """What is not bitwise equal to the reference after a step: the loss, gradients and buffers by name."""
    found = [] if torch.equal(loss, wanted.loss) else [f"loss {loss.item()!r} != {wanted.loss.item()!r}"]
    for name, parameter in model.named_parameters():
        grad, want = parameter.grad, wanted.grads.get(name)
        if (grad is None) != (want is None):
            found.append(f"{name}.grad is {'absent' if grad is None else 'there'}")
        elif grad is not None and want is not None and not torch.equal(grad, want):
            found.append(f"{name}.grad, by {(grad - want).abs().max().item():.1e}")
    return found + [f"{n}" for n, b in model.named_buffers() if n in wanted.buffers and not torch.equal(b, wanted.buffers[n])]


def predicted_held(program: Program) -> list[tuple[str, int]]:
    """(action, bytes) at every `begin` of a program, as its plan predicts."""
    found = []
    for i, instr in enumerate(program.instrs):
        begun = i and program.instrs[i - 1].verb == "recv" and begun_action(program.instrs, i - 1) == instr.action
        if instr.verb == "recv" or (instr.verb == "compute" and not begun):
            found.append((str(begun_action(program.instrs, i)), program.held[i - 1] if i else 0))
    return found


def memory_differences(plan: Plan, observed: Observed, ranks: Sequence[int]) -> list[str]:
    """Where the bytes that ranks held differ from the plan's prediction."""
    found = []
    for r in ranks:
        program, peak, held = plan.programs[r], observed.peak[r], list(observed.held[r])
        if peak != program.peak:
            found.append(f"rank {r}: peak {peak} bytes, predicted {program.peak}")
        if held != (wanted := predicted_held(program)):
            first = next((a, b) for a, b in zip(held, wanted, strict=False) if a != b)
            found.append(f"rank {r}: held {first[0]}, predicted {first[1]}")
    return found
