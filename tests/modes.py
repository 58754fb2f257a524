"""Training with the optimizer in the programs: one model, one stream of batches on which steps are clipped or overflow, and
what to compare afterwards. Used in one process and by the ranks of tests/distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zbfx
from zbfx.runtime.versions import Versions
from zbfx.updating import Progress

WIDTH, SAMPLES = 8, 2  # samples of a microbatch
MAX_NORM = 1.5
# Steps that something happens in; for ten steps after one that is clipped or skipped, all wait for the state of all.
INFINITE = (2, 29)  # a gradient of a middle layer is infinite: the ranks before it cannot know, and take their step back
STRONG = (4, 17, 33, 45)  # gradients are large; in steps 17 and 45, ranks have stepped before they know
BLOWN = (6,)  # inputs are infinite, and so all gradients
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=5e-3, weight_decay=0.1),
}


def model(blocks: int = 4, dropout: float = 0.1) -> nn.Sequential:
    """Blocks of a linear layer, dropout and tanh, built from seed 0."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), nn.Tanh()) for _ in range(blocks)])


def batch(step: int, microbatches: int, *, quiet: bool = False) -> tuple[Tensor, Tensor]:
    """Input and target of a step: of ordinary size, or strong, or infinite; quiet: all of ordinary size."""
    g = torch.Generator().manual_seed(1000 + step)
    x, y = (torch.randn(SAMPLES * microbatches, WIDTH, generator=g) for _ in range(2))
    if step in BLOWN and not quiet:
        x[0, 0] = torch.inf
    return x, y * (6 if step in STRONG and not quiet else 1)


def inject(parameters: Mapping[str, nn.Parameter], name: str, at: Sequence[int] = INFINITE) -> list[int]:
    """From now on, the parameter's gradient is infinite in the given steps. The list gets each step that the hook has seen."""
    seen: list[int] = []

    def hook(parameter: Tensor) -> None:
        if len(seen) in at and parameter.grad is not None:
            parameter.grad[0] = torch.inf
        seen.append(len(seen))

    if name in parameters:
        parameters[name].register_post_accumulate_grad_hook(hook)
    return seen


@dataclass(frozen=True, slots=True)
class Run:
    """What a run of steps has left: losses in order, this process's parameters and optimizer state by name, the counts."""

    losses: list[Tensor]
    values: dict[str, Tensor]
    state: dict[str, Tensor]
    progress: Progress
    pipe: zbfx.Pipeline
    alive: tuple[int, ...] = ()  # how many versions of the weights there were after each step, on any rank of this process


def pipeline(of: nn.Module, stages: int = 4, microbatches: int = 4, **options: Any) -> zbfx.Pipeline:
    """Compiled for batches as `batch` gives them."""
    x, y = batch(0, microbatches)
    options = {"loss": nn.functional.mse_loss, "seed": 3, **options}
    return zbfx.compile(of, stages, example_inputs=(x,), example_target=y, microbatches=microbatches, **options)


def train(of: nn.Module, optimizer: MakeOptimizer, steps: int, *, faults: str = "", quiet: bool = False, **options: Any) -> Run:
    """Steps 0, 1, ... with an optimizer; faults: the parameter whose gradient is infinite now and then."""
    pipe = pipeline(of, optimizer=optimizer, **options)
    inject(dict(pipe.named_parameters()), faults)
    return drive(pipe, steps, quiet=quiet)


def drive(pipe: zbfx.Pipeline, steps: int, *, quiet: bool = True, between: Callable[[int], Any] | None = None) -> Run:
    """Steps 0, 1, ... and a flush; between: what to do after each."""
    losses, alive = [], []
    for step in range(steps):
        x, y = batch(step, pipe.plan.microbatches, quiet=quiet)
        dtype = next(pipe.parameters()).dtype
        losses.append(pipe.step(x.to(dtype), target=y.to(dtype)))
        alive.append(versions_alive(pipe))
        if between is not None:
            between(step)
    last = pipe.flush()
    losses = [*losses[1:], last] if last is not None else losses
    values = {name: value.clone() for name, value in pipe.state_dict().items()}
    return Run(losses, values, optimizer_state(pipe), pipe.progress, pipe, tuple(alive))


def versions_alive(pipe: zbfx.Pipeline) -> int:
    """The largest number of versions that a rank of this process holds now; 1 where there are no versions."""
    assert pipe._engine is not None and pipe._engine.updating is not None
    return max(len(w.alive) if isinstance(w, Versions) else 1 for w in pipe._engine.updating.ranks.values())


def optimizer_state(pipe: zbfx.Pipeline) -> dict[str, Tensor]:
    """What the optimizer keeps, as `parameter:entry`."""
    found = {}
    for name, parameter in pipe.named_parameters():
        for key, value in pipe.optimizer.state.get(parameter, {}).items():
            for i, leaf in enumerate(pytree.tree_leaves(value)):
                if leaf is not None:
                    found[f"{name}:{key}" + f".{i}" * bool(i)] = leaf.clone() if isinstance(leaf, Tensor) else torch.tensor(leaf)
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but that every NaN is like every other."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30))


def unlike(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """Names that are in one only, or whose values differ."""
    return [n for n in sorted({*ours, *theirs}) if n not in ours or n not in theirs or not same(ours[n], theirs[n])]


def differing(ours: Run, theirs: Run) -> list[str]:
    """What two runs do not have in common to the bit: losses, parameters and buffers, optimizer state."""
    steps = [f"loss {i}" for i, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)) if not same(a, b)]
    return steps + unlike(ours.values, theirs.values) + unlike(ours.state, theirs.state)


def double_buffered(
    of: nn.Module, optimizer: MakeOptimizer, steps: int, microbatches: int, *, max_norm: float | None = None, faults: str = ""
) -> tuple[list[Tensor], list[Tensor], torch.optim.Optimizer]:
    """PipeDream-2BW's equation in one process: W(t+1) = W(t) - lr * f(gradient at W(t-1)). Losses, parameters, optimizer.

    max_norm: clip as torch does, skip what is not finite; the batches are then those with strong and infinite steps.
    """
    parameters = list(of.parameters())
    opt = optimizer(parameters)
    old = [p.detach().clone() for p in parameters]
    losses = []
    for step in range(steps):
        new = [p.detach().clone() for p in parameters]
        put(parameters, old)
        total = torch.zeros(())
        for x, y in zip(*(t.chunk(microbatches) for t in batch(step, microbatches, quiet=max_norm is None)), strict=True):
            loss = nn.functional.mse_loss(of(x), y) / microbatches
            loss.backward()
            total = total + loss.detach()
        losses.append(total)
        put(parameters, new)
        if faults and step in INFINITE:
            dict(of.named_parameters())[faults].grad[0] = torch.inf  # type: ignore[index]
        if max_norm is None or clip(parameters, max_norm).isfinite():
            opt.step()
        opt.zero_grad()
        old = new
    return losses, [p.detach().clone() for p in parameters], opt


def put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give parameters their values."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)


def clip(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """torch's own, in one process."""
    return nn.utils.clip_grad_norm_(parameters, max_norm)
