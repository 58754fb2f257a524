"""Runs a plan's programs: all ranks as threads of this process, or this process's own rank of a process group."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from zbfx.batch import Batch
from zbfx.compile import Options
from zbfx.errors import InputError, PlanError, RankError
from zbfx.gradients import clip_grad_norm_, refuse_lost_hooks, run_hooks
from zbfx.holdings import Holdings
from zbfx.ir import Place, Program, Span, Timeline, Value
from zbfx.passes.course import chain_of
from zbfx.plan import Plan
from zbfx.runtime import Exchange, Memory, Random, Rank, Recorder, execute
from zbfx.runtime.launch import connect, place, run_threads
from zbfx.runtime.trainer import Trainer, sum_of_losses
from zbfx.runtime.versions import Versions
from zbfx.text import parse_span
from zbfx.ties import Tie, find_ties, sum_ties
from zbfx.training import Training
from zbfx.updating import Updating


@dataclass(frozen=True, slots=True)
class Observed:
    """What ran. timeline: measured, its peak that of memory (0 if not watched); held[r]: (action, bytes at its beginning)."""

    timeline: Timeline
    peak: tuple[int, ...]
    held: tuple[tuple[tuple[str, int], ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """A program's text, executed: its step and its messages."""

    step: Callable[[Rank], Any]
    messages: Mapping[str, Any]
    flush: Callable[[Rank], Any]


class Engine:
    """Binds programs to the parameters that this process holds."""

    def __init__(self, holdings: Holdings, plan: Plan, options: Options) -> None:
        self.holdings, self.device = holdings, options.device
        where = place()
        self.distributed = where is not None and where.size > 1
        self.local = (where.rank,) if where is not None and self.distributed else tuple(range(options.ranks))
        self._hold(plan, options.ranks)
        self._ties = find_ties(plan, holdings.tensor)
        pairs = _pairs(plan, self._ties) if self.distributed else ()
        apart = ("L", "T") if plan.weights == "2bw" else ()
        if self.distributed:
            self._channels = [
                connect(self.device, pairs=pairs, apart=apart, dead_after=options.dead_after, timeout=options.timeout)
            ]
        else:
            self._channels = list(Exchange(options.ranks).channels())
        self._loaded: dict[tuple[Plan, int], _Loaded] = {}
        self._bound: dict[Plan, tuple[Any, ...]] = {}
        self._watch: tuple[bool, bool] | None = None
        self.observed: Observed | None = None
        self.steps = 0  # training steps taken: dropout of each draws from a stream of its own
        self.seed = self._agree(options.seed)
        self.updating = None if options.training is None else self._update(plan, options.training)
        self._trainers: dict[tuple[Plan, int], Trainer] = {}
        self._streams: dict[int, Generator[None, bool, None]] = {}
        self._last_plan: Plan | None = None
        self._is_broken = False  # a step has failed, after which some ranks may have stepped and others not

    def _update(self, plan: Plan, training: Training) -> Updating:
        """The optimizer, shared out; tied parameters gather what it steps."""
        channels = {r: self._channels[0] if self.distributed else self._channels[r] for r in self.local}
        updating = Updating(plan, self.holdings, self.local, training, channels)
        first = {name: plan.schedule.placement[stage] for name, stage in plan.owners.items()}
        mine = {name: rank if rank in self.local else self.local[0] for name, rank in first.items()}
        updating.share(find_ties(plan, lambda name: updating.target(mine[name], name)))
        self._ties = updating.ties
        return updating

    def _agree(self, seed: int | None) -> int:
        """The seed asked for, else torch's at rank 0."""
        if seed is None:
            seed = torch.initial_seed() % 2**63
            if self.distributed:
                seed = self._channels[0].all_gather(seed)[0]
        return seed

    def _hold(self, plan: Plan, ranks: int) -> None:
        """Take what the local ranks need to the device; in a process group, let go of the rest."""
        own = [s for s in plan.stages if plan.schedule.placement[s.index] in self.local]
        names = [n for s in own for n in s.names]
        self.holdings.settle(names, [n for s in own for n in s.buffers])
        if self.distributed:
            others = [s for s in plan.stages if s not in own]
            released = {n for s in others for n in (*s.names, *s.buffers)} - {n for s in own for n in (*s.names, *s.buffers)}
            self.holdings.release(released, unused=self.local[0] != 0)

    def watch(self, *, times: bool, memory: bool) -> None:
        """Record the next steps."""
        self._watch = (times, memory) if times or memory else None

    def run(self, plan: Plan, batch: Batch) -> torch.Tensor:
        """One step of every local rank; the loss, on every rank."""
        if not plan.differentiates:
            return self._loss(plan, self._evaluated(plan, batch))
        owed = self.flush() if self._is_broken or self._last_plan is not plan else None
        refuse_lost_hooks(self.holdings)
        ranks = self._run(plan, batch)
        self.steps += 1
        if self.updating is not None:
            return self._reported(ranks, 1 if plan.weights == "2bw" else 0) if owed is None else owed
        run_hooks(self._trained(plan))
        return self._loss(plan, ranks)

    def flush(self) -> torch.Tensor | None:
        """Complete the last step: all ranks learn the state of its gradients; a stream runs to its end. The loss that was not
        reported yet, if there is one."""
        if self.updating is None or self._last_plan is None:
            return None
        if self._is_broken:
            raise RankError(
                "a step has failed, and ranks may hold the weights of different steps: give all of them the weights of one with "
                "pipe.load_state_dict (and the optimizer its state with pipe.optimizer.load_state_dict), then go on"
            )
        plan = self._last_plan
        ranks: list[Rank] = [self._trainers[plan, r] for r in self.local]
        if plan.weights == "2bw":
            if not self._streams:
                return None
            self._execute(ranks, [partial(_send, self._streams.pop(r), False) for r in self.local])
            loss = self._reported(ranks, 0)
            for rank in ranks:
                cast(Trainer, rank).end_stream()
            return loss
        if any(w.ahead for w in self.updating.ranks.values()):
            self._execute(ranks, [self._load(plan, r).flush for r in self.local])
        return None

    def _reported(self, ranks: Sequence[Rank], back: int) -> torch.Tensor:
        """The loss of the step `back` steps ago, as the programs have passed it around; NaN before the first."""
        trainer = next(r for r in ranks if isinstance(r, Trainer))
        return trainer.reported_loss(back)

    def predict(self, plan: Plan, batch: Batch) -> Any:
        """The model's outputs for a batch, on every rank: see Pipeline.predict."""
        ranks = self._evaluated(plan, batch)
        last = plan.schedule.placement[-1]
        mine = next((r for r in ranks if r.index == last), None)
        size = batch.size // batch.microbatches
        whole = []
        for i, value in enumerate(plan.results):
            parts = [] if mine is None else [mine.outputs[mb][i] for mb in range(plan.microbatches)]
            whole.append(self._joined(parts, value, size, plan.microbatches, last))
        return pytree.tree_map_only(Place, lambda p: whole[p.index], plan.template)

    def _joined(self, parts: list[torch.Tensor], value: Value, size: int, microbatches: int, last: int) -> torch.Tensor:
        """One output of all microbatches: along the batch dimension if it has one, else stacked; sent to all ranks."""
        batched = bool(value.shape) and value.shape[0] == size
        shape = (size * microbatches, *value.shape[1:]) if batched else (microbatches, *value.shape)
        joined = torch.empty(shape, dtype=value.dtype, device=self.device)
        if parts:
            joined.copy_(torch.cat(parts) if batched else torch.stack(parts))
        if self.distributed:
            self._channels[0].broadcast(joined, last)
        return joined

    def _trained(self, plan: Plan) -> list[torch.Tensor]:
        """The parameters of this process that get gradients, each once, in the order of stages."""
        own = [s for s in plan.stages if plan.schedule.placement[s.index] in self.local]
        found = {id(p): p for s in own for p in (self.holdings.tensor(s.names[i]) for i in s.gparams)}
        return list(found.values())

    def clip_grad_norm_(self, plan: Plan, max_norm: float, norm_type: float) -> torch.Tensor:
        """See Pipeline.clip_grad_norm_."""
        channel = self._channels[0] if self.distributed else None
        return clip_grad_norm_(plan, self.holdings, self.local, channel, max_norm, norm_type, self.device)

    def _evaluated(self, plan: Plan, batch: Batch) -> list[Rank]:
        """Run a plan without backward: on validated weights, or, within a stream, on the newest that all ranks have."""
        if not self._streams:
            self.flush()
            return self._run(plan, batch)
        if self.distributed and self.device.type == "cuda":
            raise InputError(
                "a 2bw stream is under way, whose messages NCCL cannot tell from an evaluation's: pipe.flush() first"
            )
        with self._consistent():
            return self._run(plan, batch)

    @property
    def streams(self) -> bool:
        """Whether a stream of steps is under way."""
        return bool(self._streams)

    def consistent_state(self) -> dict[str, torch.Tensor]:
        """Within a stream, a copy of what this process holds, as of the newest version that every rank has."""
        with self._consistent():
            return {name: value.clone() for name, value in self.holdings.state_dict().items()}

    @contextlib.contextmanager
    def _consistent(self) -> Iterator[None]:
        """Within a stream, the parameters as of the newest version that every rank has."""
        every = [(w.parameter, w.parameter.data) for v in self._all_versions() for w in v.weights]
        try:
            for versions in self._all_versions():
                table = versions.consistent()
                for w in versions.weights:
                    w.parameter.data = table[id(w.parameter)]
            yield
        finally:
            for parameter, newest in every:
                parameter.data = newest

    def _all_versions(self) -> list[Versions]:
        return [] if self.updating is None else [w for w in self.updating.ranks.values() if isinstance(w, Versions)]

    def _run(self, plan: Plan, batch: Batch) -> list[Rank]:
        with contextlib.nullcontext() if plan.differentiates else self._buffers_kept(plan):
            return self._run_ranks(plan, batch)

    @contextlib.contextmanager
    def _buffers_kept(self, plan: Plan) -> Iterator[None]:
        """Put back what a forward pass writes into buffers: evaluation leaves training as it was."""
        own = [s for s in plan.stages if plan.schedule.placement[s.index] in self.local]
        before = [(b, b.clone()) for b in {id(b): b for s in own for b in map(self.holdings.tensor, s.buffers)}.values()]
        try:
            yield
        finally:
            for buffer, value in before:
                buffer.copy_(value)

    def _run_ranks(self, plan: Plan, batch: Batch) -> list[Rank]:
        recorders = {r: self._recorder() for r in self.local}
        trains = self.updating is not None and plan.differentiates
        make = self._trainer if trains else self._rank
        ranks = [make(plan, r, batch, recorders[r]) for r in self.local]
        streams = trains and plan.weights == "2bw"
        steps = [self._stream(plan, r) if streams else self._load(plan, r).step for r in self.local]
        self._execute(ranks, steps, streams=streams or self.streams)  # evaluation leaves a stream's messages alone
        if plan.differentiates and not trains:
            sum_ties(self._ties, plan, self.local, self._channels[0] if self.distributed else None)
        if self._watch is not None:
            self.observed = _observe(self._channels[0] if self.distributed else None, plan, recorders)
        return ranks

    def _stream(self, plan: Plan, rank: int) -> Callable[[Rank], Any]:
        """The next step of a rank's stream: its beginning, or where the last step left it."""
        if rank in self._streams:
            return partial(_send, self._streams[rank], True)

        def begin(of: Rank) -> None:
            self._streams[rank] = self._load(plan, rank).step(of)
            next(self._streams[rank])

        return begin

    def _execute(self, ranks: Sequence[Rank], steps: Sequence[Callable[[Rank], Any]], *, streams: bool = False) -> None:
        try:
            if self.distributed:
                execute(ranks[0], steps[0], streams=streams)
            else:
                run_threads(ranks, steps, streams=streams)
        except BaseException:
            self._is_broken |= self.streams or any(isinstance(rank, Trainer) for rank in ranks)
            self._streams.clear()
            raise

    def restart(self) -> None:
        """All parameters are about to get new values: what a failed step has left is forgotten."""
        if self._is_broken and self.updating is not None:
            self.updating.restart()
            for trainer in self._trainers.values():
                trainer.restart()
            self._is_broken = False

    def _recorder(self) -> Recorder:
        times, memory = self._watch or (False, False)
        return Recorder(self.device, times=times, memory=Memory() if memory else None)

    def _loss(self, plan: Plan, ranks: Sequence[Rank]) -> torch.Tensor:
        """The sum over microbatches, in order, of each loss (divided by their number, for the mean)."""
        last = plan.schedule.placement[-1]
        mine = next((r for r in ranks if r.index == last), None)
        with torch.no_grad():
            blank = torch.zeros(plan.microbatches, dtype=plan.results[0].dtype, device=self.device)
            losses = torch.stack(mine.losses) if mine is not None else blank
            if self.distributed:
                self._channels[0].broadcast(losses, last)
            return sum_of_losses(tuple(losses), plan.microbatches if plan.reduction == "mean" else 1)

    def _rank(self, plan: Plan, rank: int, batch: Batch, recorder: Recorder) -> Rank:
        prefix = "" if plan.differentiates else "evaluation "  # a stream's own messages may be under way
        return Rank(recorder=recorder, inputs=self._inputs(plan, rank, batch), prefix=prefix, **self._given(plan, rank))

    def _trainer(self, plan: Plan, rank: int, batch: Batch, recorder: Recorder) -> Trainer:
        """The rank's trainer for this plan, at the beginning of a step."""
        if self.updating is None:
            raise InputError("the plan updates weights, but no optimizer was given: pass optimizer= to zbfx.load or zbfx.compile")
        key = (plan, rank)
        if key not in self._trainers:
            self.updating.refuse_unknown(plan, rank)
            divisor = plan.microbatches if plan.reduction == "mean" else 1
            given = self._given(plan, rank)
            self._trainers[key] = Trainer(inputs={}, updater=self.updating.ranks[rank], divisor=divisor, **given)
        self._last_plan = plan
        trainer = self._trainers[key]
        trainer.next_step(self._inputs(plan, rank, batch), recorder)
        return trainer

    def _inputs(self, plan: Plan, rank: int, batch: Batch) -> dict[tuple[int, int], tuple[Any, ...]]:
        """The input leaves of each stage and microbatch, and the source of its random numbers."""
        own = [s for s in plan.stages if plan.schedule.placement[s.index] == rank]
        used = {plan.leaves[name] for s in own for name in s.leaves}  # moved once, however many stages read them
        microbatches = [
            {i: leaves[i].to(self.device, non_blocking=True) for i in used}
            for leaves in map(batch.microbatch, range(plan.microbatches))
        ]
        return {
            (s.index, mb): (
                *[leaves[plan.leaves[name]] for name in s.leaves],
                Random(self.seed, self.steps, mb, self.device),
            )
            for s in own
            for mb, leaves in enumerate(microbatches)
        }

    def _given(self, plan: Plan, rank: int) -> dict[str, Any]:
        """What a rank is made of, but for a step's inputs."""
        params, grads, weights = self._bind(plan)
        own = [s for s in plan.stages if plan.schedule.placement[s.index] == rank]
        return {
            "index": rank,
            "channel": self._channels[0] if self.distributed else self._channels[rank],
            "messages": self._load(plan, rank).messages,
            "params": {s.index: params[s.index] for s in own},
            "grads": {s.index: grads[s.index] for s in own},
            "weights": weights if plan.schedule.placement[-1] == rank and plan.template is None else (),
            "device": self.device,
        }

    def _bind(self, plan: Plan) -> tuple[Any, Any, Any]:
        """For each local stage, its parameters and where their gradients go; the tangent of each microbatch's loss."""
        if plan not in self._bound:
            params, grads = {}, {}
            for s in plan.stages:
                if plan.schedule.placement[s.index] not in self.local:
                    continue
                own = [self._tensor(plan, s.index, n) for n in (*s.names, *s.buffers)]
                params[s.index] = (*own, *[plan.constants[n].to(self.device) for n in s.constants])
                grads[s.index] = tuple(self._target(plan, s.index, s.names[i]) for i in s.gparams)
            one = torch.ones((), dtype=plan.results[0].dtype, device=self.device)
            weight = one / plan.microbatches if plan.reduction == "mean" else one
            self._bound[plan] = (params, grads, (weight,) * plan.microbatches)
        return self._bound[plan]

    def _tensor(self, plan: Plan, stage: int, name: str) -> torch.Tensor:
        if self.updating is None:
            return self.holdings.tensor(name)
        return self.updating.tensor(plan.schedule.placement[stage], name)

    def _target(self, plan: Plan, stage: int, name: str) -> Any:
        """What takes a stage's gradient of a parameter."""
        for tie in self._ties:
            if stage in tie.stages and self.holdings.tensor(tie.name) is self.holdings.tensor(name):
                return tie.parts[stage]
        if self.updating is None:
            return self.holdings.tensor(name)
        return self.updating.target(plan.schedule.placement[stage], name)

    def _load(self, plan: Plan, rank: int) -> _Loaded:
        key = (plan, rank)
        if key not in self._loaded:
            self._loaded[key] = load_program(plan.programs[rank])
        return self._loaded[key]

    def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            channel.close()


def _send(stream: Generator[None, bool, None], goes_on: bool, _: Rank) -> None:
    """Run a stream to its next step's end, or to its own."""
    try:
        stream.send(goes_on)
    except StopIteration:
        if goes_on:
            raise PlanError("the rank's step has ended, where it should yield once per step: the rank file was edited") from None


def load_program(program: Program) -> _Loaded:
    """Execute a program's text. Raises PlanError with the line where it is not Python, or lacks step or MESSAGES."""
    name = program.path or f"<zbfx rank {program.rank}>"
    linecache.cache[name] = (len(program.source), None, program.source.splitlines(True), name)
    space: dict[str, Any] = {"__name__": f"zbfx_rank_{program.rank}"}
    try:
        exec(compile(program.source, name, "exec"), space)
    except Exception as error:
        raise PlanError(f"{name} does not run: {type(error).__name__}: {error}") from error
    missing = [what for what in ("step", "MESSAGES") if what not in space]
    if missing:
        raise PlanError(f"{name} defines no {' and no '.join(missing)}: a rank file has step(rank) and MESSAGES")
    return _Loaded(space["step"], space["MESSAGES"], space.get("flush", lambda _: None))


def _pairs(plan: Plan, ties: Sequence[Tie]) -> tuple[tuple[int, int], ...]:
    """Every (from, to) that messages, the loss and tied gradients travel: opened together by all ranks."""
    place = plan.schedule.placement
    found = {pair for a, b in pairwise(place) if a != b for pair in ((a, b), (b, a))}
    found |= {(place[-1], r) for r in range(len(plan.programs)) if r != place[-1]}
    found |= {pair for r in range(1, len(plan.programs)) for pair in ((r, 0), (0, r))}  # the norm of all gradients
    chain = chain_of(plan.schedule)
    found |= {pair for a, b in pairwise(chain) for pair in ((a, b), (b, a))}  # the state of the gradients
    for tie in ties:
        ranks = {place[s] for s in tie.stages}
        found |= {(a, b) for a in ranks for b in ranks if a != b}
    return tuple(sorted(found))


def _observe(channel: Any, plan: Plan, recorders: Mapping[int, Recorder]) -> Observed:
    """The measured timeline of all ranks, on one clock."""
    mine: dict[int, dict[str, Any]] = {
        rank: {
            "origin": r.origin,
            "spans": [(s.action, s.start, s.end) for s in (r.spans() if r.times else ())],
            "peak": r.memory.peak if r.memory else 0,
            "held": r.memory.held if r.memory else [],
        }
        for rank, r in recorders.items()
    }
    every = channel.all_gather(next(iter(mine.values()))) if channel is not None else [mine[r] for r in sorted(mine)]
    zero = min(e["origin"] for e in every)
    spans = tuple(
        tuple(Span(parse_span(a), e["origin"] - zero + start, e["origin"] - zero + end) for a, start, end in e["spans"])
        for e in every
    )
    peak = tuple(e["peak"] for e in every)
    return Observed(_timeline(spans, peak), peak, tuple(tuple((a, b) for a, b in e["held"]) for e in every))


def _timeline(spans: tuple[tuple[Span, ...], ...], peak: tuple[int, ...]) -> Timeline:
    busy = [s for s in spans if s]
    if not busy:
        return Timeline(spans, 0.0, 0.0, 0.0, 0.0, peak)
    span = max(s[-1].end - s[0].start for s in busy)
    makespan = max(s[-1].end for s in busy) - min(s[0].start for s in busy)
    work = max(sum(x.end - x.start for x in s) for s in busy)
    return Timeline(spans, span, makespan, max(0.0, 1 - work / span), max(0.0, 1 - work / makespan), peak)
