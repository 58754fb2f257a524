"""The user's optimizer, taken apart for the ranks of this process: what each rank's programs update its weights with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from zbfx.errors import InputError
from zbfx.gradients import run_hooks
from zbfx.holdings import Holdings
from zbfx.passes.course import chain_of
from zbfx.plan import Plan
from zbfx.runtime import Channel
from zbfx.runtime.inverse import refuse_without_inverse
from zbfx.runtime.verdict import LossScale
from zbfx.runtime.versions import PREDICT, Shared, Versions
from zbfx.runtime.weights import Rules, Weight, Weights
from zbfx.ties import Tie, sum_ties
from zbfx.training import ROLLBACKS, Training


@dataclass(frozen=True, slots=True)
class Progress:
    """What has become of the steps so far. rollbacks: steps that a rank of this process took back; repeats: steps whose first
    forwards ran again."""

    steps: int
    clipped: int
    skipped: int
    rollbacks: int
    repeats: int
    norm: float
    loss_scale: float


class Updating:
    """What the ranks of this process train with: `optimizer`, the user's, over all their parameters, and a share for each."""

    def __init__(
        self,
        plan: Plan,
        holdings: Holdings,
        local: Sequence[int],
        training: Training,
        channels: Mapping[int, Channel],
    ) -> None:
        self.training, self._plan, self._holdings = training, plan, holdings
        self._masters: dict[int, torch.nn.Parameter] = {}
        self._stand_ins: dict[tuple[int, int], torch.nn.Parameter] = {}
        self._names: dict[int, list[str]] = {}  # of each rank's weights
        self._make_stand_ins(local)
        self._make_masters(local)
        self.optimizer = self._make_optimizer(local)
        self.ties: tuple[Tie, ...] = ()
        self.ranks = {r: self._weights(r, channels[r]) for r in local}

    def share(self, ties: Sequence[Tie]) -> None:
        """The parameters that several stages use, as `find_ties` finds them with `target`."""
        self.ties = tuple(ties)
        place = self._plan.schedule.placement
        for rank, weights in self.ranks.items():
            if isinstance(weights, Versions):
                shared = []
                for tie in self.ties:
                    ranks = tuple(sorted({place[k] for k in tie.stages}, reverse=True))
                    if rank in ranks and not tie.on_one_rank:
                        mine = tuple(k for k in tie.stages if place[k] == rank)
                        target = self.target(rank, tie.name)
                        weight = next(w for w in weights.weights if w.target is target)
                        shared.append(Shared(weight, mine, tuple(tie.parts[k] for k in mine), ranks))
                weights.shared = tuple(shared)

    def tensor(self, rank: int, name: str) -> torch.Tensor:
        """A parameter or buffer as a rank reads it: two ranks of one process that share a parameter have one each."""
        found = self._holdings.tensor(name)
        return self._stand_ins.get((rank, id(found)), found)

    def target(self, rank: int, name: str) -> torch.Tensor:
        """What gathers a parameter's gradient and is stepped: the parameter itself, or its float32 master."""
        found = self.tensor(rank, name)
        return self._masters.get(id(found), found)

    def refuse_unknown(self, plan: Plan, rank: int) -> None:
        """Raises InputError where a plan gives gradients to parameters that the optimizer has not got: it was made without."""
        own = [s for s in plan.stages if plan.schedule.placement[s.index] == rank]
        known = {id(w.parameter) for w in self.ranks[rank].weights}
        new = [n for s in own for n in (s.names[i] for i in s.gparams) if id(self.tensor(rank, n)) not in known]
        if new:
            raise InputError(
                f"{len(new)} parameters get gradients now that got none when the optimizer was made, {new[0]!r} first: unfreeze "
                "parameters before zbfx.compile, and compile anew"
            )

    def take_values(self) -> None:
        """The parameters have new values: what is made of them follows."""
        with torch.no_grad():
            for rank, weights in self.ranks.items():
                for weight, name in zip(weights.weights, self._names[rank], strict=True):
                    for copy in (weight.parameter, weight.target):
                        if copy is not self._holdings.tensor(name):
                            copy.copy_(self._holdings.tensor(name))

    def restart(self) -> None:
        """A step has failed: forget it, alike on all ranks."""
        known = min(len(w.verdicts) for w in self.ranks.values())
        scale, *_ = (w.scale for w in self.ranks.values())
        for weights in self.ranks.values():
            weights.forget(known, scale)
        for tie in self.ties:
            for part in tie.parts.values():
                if isinstance(part, torch.Tensor):
                    part.grad = None
                else:
                    part.waiting.clear()

    def progress(self) -> Progress:
        """Of the steps that are validated: all ranks say the same but for rollbacks, which are summed over this process's."""
        first, *_ = self.ranks.values()
        verdicts = first.verdicts
        return Progress(
            steps=len(verdicts) if first.rules.checked else first.updates,
            clipped=sum(v.factor is not None and v.factor != 1.0 for v in verdicts),
            skipped=sum(v.factor is None for v in verdicts),
            rollbacks=sum(w.rollbacks for w in self.ranks.values()),
            repeats=first.repeats,
            norm=verdicts[-1].norm if verdicts else float("nan"),
            loss_scale=first.scale.value,
        )

    def _trained(self, rank: int) -> dict[str, int]:
        """Parameters of a rank that get gradients -> the first stage on it that uses them."""
        own = [s for s in self._plan.stages if self._plan.schedule.placement[s.index] == rank]
        return {s.names[i]: s.index for s in reversed(own) for i in s.gparams}

    def _make_stand_ins(self, local: Sequence[int]) -> None:
        """In one process, ranks do not share a parameter: each steps its own copy, as ranks in several processes do."""
        owner: dict[int, int] = {}
        for rank in sorted(local, key=self._plan.schedule.placement.index):
            for name in self._trained(rank):
                found = self._holdings.tensor(name)
                if owner.setdefault(id(found), rank) != rank:
                    copy = torch.nn.Parameter(found.detach().clone(), requires_grad=True)
                    self._stand_ins[rank, id(found)] = copy

    def _make_masters(self, local: Sequence[int]) -> None:
        for rank in local:
            for name in self._trained(rank):
                found = self.tensor(rank, name)
                if self.training.correction == PREDICT and found.dtype in (torch.float16, torch.bfloat16):
                    raise InputError(
                        f"correction={PREDICT!r} needs parameters that do not lose a small change; {name} is {found.dtype}: "
                        "keep the model in float32"
                    )
                if self.training.has_master(found.dtype) and id(found) not in self._masters:
                    kind = self.training.master_dtype(found.dtype)
                    self._masters[id(found)] = torch.nn.Parameter(found.detach().to(kind, copy=True))

    def _make_optimizer(self, local: Sequence[int]) -> Optimizer:
        trained = {id(self._holdings.tensor(name)) for rank in local for name in self._trained(rank)}
        mine = [p for _, p in self._holdings.named_parameters() if id(p) in trained]
        targets = [self._masters.get(id(p), p) for p in mine]
        nothing = [torch.nn.Parameter(torch.empty(0, device=self._holdings.device))]  # a rank may hold frozen parameters alone
        optimizer = self.training.optimizer(targets or nothing)
        if not isinstance(optimizer, Optimizer):
            raise InputError(f"optimizer= gave a {type(optimizer).__name__}; it must give a torch.optim.Optimizer")
        if self.training.rollback == "inverse":
            refuse_without_inverse(optimizer)
        for (_, original), copy in self._stand_ins.items():
            first = next(t for p, t in zip(mine, targets, strict=True) if id(p) == original)
            group = next((g for g in optimizer.param_groups if any(p is first for p in g["params"])), None)
            if group is not None:
                group["params"].append(self._masters.get(id(copy), copy))
        return optimizer

    def _weights(self, rank: int, channel: Channel) -> Weights:
        plan, training = self._plan, self.training
        place = plan.schedule.placement
        first = {s.names[i]: s.index for s in reversed(plan.stages) for i in s.gparams}
        found, self._names[rank] = {}, []
        for name in self._trained(rank):
            parameter = self.tensor(rank, name)
            self._names[rank] += [] if id(parameter) in found else [name]
            home = first[name] if place[first[name]] == rank else -1
            users = tuple(s.index for s in plan.stages if place[s.index] == rank and name in [s.names[i] for i in s.gparams])
            found[id(parameter)] = Weight(parameter, self.target(rank, name), home, users)
        chain = chain_of(plan.schedule)
        stages = tuple(tuple(k for k, r in enumerate(place) if r == link) for link in chain)
        rules = Rules(len(plan.stages), stages, training.max_norm, training.checked)
        own = [s for s in plan.stages if place[s.index] == rank]
        buffers = {id(b): b for s in own for b in map(self._holdings.tensor, s.buffers)}
        options: dict[str, Any] = {
            "scale": LossScale(training.loss_scale),
            "buffers": tuple(buffers.values()),
            "finish": lambda: self._finish(rank, channel),
            "snapshot": ROLLBACKS[training.rollback],
        }
        args = (tuple(found.values()), self.optimizer, rules, chain.index(rank))
        if training.weights == "2bw":
            return Versions(*args, rank=rank, correction=training.correction, **options)
        return Weights(*args, **options)

    def _finish(self, rank: int, channel: Channel) -> None:
        """Complete a rank's gradients: sums of tied ones, and the hooks of parameters."""
        if self.training.weights != "2bw":  # whose ties travel while the next step is under way
            many = len(self._plan.programs) > 1
            sum_ties(self.ties, self._plan, (rank,), channel if many else None, lambda name: self.target(rank, name))
        for weight, name in zip(self.ranks[rank].weights, self._names[rank], strict=True):
            run_hooks([self._holdings.tensor(name)], weight.target)
