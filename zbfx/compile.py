"""The whole compiler as one straight list of passes, with a verifier between each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zbfx.codegen.program import program_text
from zbfx.errors import InputError
from zbfx.ir import (
    Action,
    Captured,
    Cost,
    CostModel,
    Fn,
    Forward,
    Joint,
    Link,
    Program,
    Schedule,
    Stage,
    Timeline,
    Value,
    outputs_of,
)
from zbfx.passes.allocate import allocate, message_values, refuse_over_limit
from zbfx.passes.communicate import communicate
from zbfx.passes.liveness import Ledger, Profile, last_uses, profile
from zbfx.passes.order_fixed import block_placement, order_fixed
from zbfx.passes.partition import cuts_for_owners, partition
from zbfx.passes.recompute import recompute_regions
from zbfx.passes.simulate import simulate
from zbfx.passes.split_backward import split_backward
from zbfx.plan import Plan
from zbfx.text import format_bytes
from zbfx.trace.capture import Loss, capture
from zbfx.trace.differentiate import differentiate
from zbfx.trace.estimate import DEVICES, device_profile, graph_seconds
from zbfx.verify import verify_schedule
from zbfx.verify_program import verify_programs, verify_stage

# Between processes of one machine, and between GPUs of one server: seconds per message, bytes per second.
LINKS = {"cpu": Link(latency=5e-5, bandwidth=2e9), "cuda": Link(latency=1e-5, bandwidth=1e11)}
History = list[tuple[str, Any]]
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. schedule: a name or a Schedule; memory: bytes per rank; pins: module names to cut before."""

    num_stages: int
    microbatches: int
    ranks: int
    schedule: str | Schedule = "zb-h1"
    memory: int | None = None
    pins: tuple[str, ...] = ()
    reduction: str = "mean"
    device: torch.device = _CPU
    seed: int | None = None


def build_plan(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Any,
    *,
    loss: Loss | None,
    options: Options,
    like: Plan | None = None,
    forward_only: bool = False,
    predict: bool = False,
) -> Plan:
    """Compile for one microbatch's inputs. like: keep this plan's parameters on their stages, and its schedule.

    forward_only: programs that compute the loss alone; predict: the model's outputs alone.
    """
    history: History = []
    forward_only = forward_only or predict
    captured = capture(
        model, args, kwargs, target, loss=loss, device=options.device, differentiable=not forward_only, predict=predict
    )
    history.append(("capture", captured))
    forwards = _cut(captured, options, like)
    history.append(("partition", forwards))
    stages = _split(captured, forwards, forward_only)
    history.append(("split_backward", stages))
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs), target))
    shapes = {
        i: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)
    }
    return finish_plan(stages, captured, options, history, shapes, forward_only=forward_only)


def finish_plan(
    stages: Sequence[Stage],
    captured: Captured,
    options: Options,
    history: History,
    shapes: Mapping[int, tuple[tuple[int, ...], str]],
    *,
    forward_only: bool = False,
) -> Plan:
    """From split stages to programs: cost, order, simulate, communicate, allocate, generate."""
    history = list(history)
    profiles: dict[int, Profile] = {}
    placement = (
        options.schedule.placement if isinstance(options.schedule, Schedule) else block_placement(len(stages), options.ranks)
    )
    static = _static_bytes(stages, captured, placement, options.ranks)
    costs = estimate_costs(stages, options, static, profiles)
    history.append(("estimate", costs))
    schedule = _order(stages, options, placement, costs, forward_only)
    history.append(("order", schedule))
    timeline = simulate(schedule, costs)
    history.append(("simulate", timeline))
    instrs = communicate(schedule, stages, timeline)
    history.append(("communicate", instrs))
    programs = tuple(allocate(r, i, stages, profiles) for r, i in enumerate(instrs))
    verify_programs(programs)
    refuse_over_limit(programs, costs.limit)
    history.append(("allocate", programs))
    programs = tuple(_with_source(p, stages, schedule, timeline, options, costs) for p in programs)
    history.append(("codegen", programs))
    return Plan(
        tuple(stages),
        costs,
        schedule,
        timeline,
        programs,
        options.device,
        options.microbatches,
        options.reduction,
        captured.training and not forward_only,
        captured.leaves,
        captured.statics,
        shapes,
        captured.constants,
        static,
        stages[-1].F.group("y"),
        captured.template,
        tuple(history),
    )


def reorder(plan: Plan, options: Options) -> Plan:
    """The same stages under another schedule, number of ranks or of microbatches (of the same size)."""
    by_name = dict(plan.history)
    kept = [(name, value) for name, value in plan.history if name in ("capture", "partition", "split_backward")]
    if "capture" not in by_name:
        raise InputError("a plan that was loaded from a folder holds no graphs: compile the model to change its schedule")
    return finish_plan(by_name["split_backward"], by_name["capture"], options, kept, plan.shapes)


# ---------------------------------------------------------------- the steps


def _cut(captured: Captured, options: Options, like: Plan | None) -> tuple[Forward, ...]:
    kind = options.device.type
    link, bandwidth = LINKS.get(kind, LINKS["cuda"]), DEVICES.get(kind, DEVICES["cuda"]).bandwidth
    cuts = None if like is None else _kept_cuts(captured, options, like)
    return partition(captured, options.num_stages, link=link, bandwidth=bandwidth, pins=options.pins, cuts=cuts)


def _kept_cuts(captured: Captured, options: Options, like: Plan) -> tuple[int, ...]:
    """The cuts of an earlier plan: the same positions in a graph of the same operators, else what keeps parameters in place."""
    before = dict(like.history)
    if "capture" in before and _operators(before["capture"]) == _operators(captured):
        return tuple(f.start for f in before["partition"][1:])
    return cuts_for_owners(captured, _homes(like), options.num_stages)


def _homes(plan: Plan) -> dict[str, int]:
    """The stage of every parameter, and of every buffer that one stage alone uses: its rank may be the only one to update it."""
    users: dict[str, list[int]] = {}
    for stage in plan.stages:
        for name in stage.buffers:
            users.setdefault(name, []).append(stage.index)
    return {**plan.owners, **{name: stages[0] for name, stages in users.items() if len(stages) == 1}}


def _operators(captured: Captured) -> list[Any]:
    return [n.target for n in captured.graph.nodes if n.op == "call_function"]


def _split(captured: Captured, forwards: Sequence[Forward], forward_only: bool) -> tuple[Stage, ...]:
    """Differentiate and split each stage, last to first: the layout of a gradient is known where it is made."""
    results = outputs_of(forwards[-1].graph)
    tangents: list[Any] = [None] * len(results) if forward_only else [results[0].meta["val"]]
    stages: list[Stage] = []
    for forward in reversed(forwards):
        joint = recompute_regions(differentiate(forward, tangents))
        stage = split_backward(joint, captured)
        verify_stage(stage)
        stages.append(stage)
        tangents = _gradients_sent(forward, joint, stage)
    return tuple(reversed(stages))


def _gradients_sent(forward: Forward, joint: Joint, stage: Stage) -> list[Any]:
    """For each of a stage's inputs, the fake gradient that it sends back, or None."""
    sent: list[Any] = [None] * len(forward.inputs)
    if stage.B is not None:
        for i, position in enumerate(joint.gx):
            sent[position] = stage.B.outputs[i].meta["val"]
    return sent


def estimate_costs(stages: Sequence[Stage], options: Options, static: Sequence[int], profiles: dict[int, Profile]) -> CostModel:
    """Seconds and bytes of every stage's F, B and W; seconds between ranks; bytes left for activations on each rank."""
    device = device_profile(options.device)
    link = LINKS.get(options.device.type, LINKS["cuda"])
    largest = max((sum(v.nbytes for v in s.F.group("y")) for s in stages), default=0)
    hop = link.latency + largest / link.bandwidth
    ranks = options.ranks
    comm = tuple(tuple(0.0 if a == b else hop for b in range(ranks)) for a in range(ranks))
    limit = tuple(None if options.memory is None else options.memory - s for s in static)
    for rank, left in enumerate(limit):
        if left is not None and left <= 0:
            raise InputError(
                f"memory={format_bytes(options.memory or 0)}: rank {rank}'s parameters, gradients and buffers alone take "
                f"{format_bytes(static[rank])}: use more ranks or a larger limit"
            )
    return CostModel(tuple(_stage_cost(s, device, profiles) for s in stages), comm, limit)


def _stage_cost(stage: Stage, device: Any, profiles: dict[int, Profile]) -> Cost:
    seconds = [0.0 if fn is None else graph_seconds(fn.graph, device) for fn in (stage.F, stage.B, stage.W)]
    changes, peaks = _stage_bytes(stage, profiles)
    return Cost(seconds[0], seconds[1], seconds[2], *changes, *peaks)


def _stage_bytes(stage: Stage, profiles: dict[int, Profile]) -> tuple[list[int], list[int]]:
    """Change in bytes held after F, B and W of one microbatch, and how far each climbs above what was held before."""
    ledger = Ledger()
    groups: dict[str, Any] = {}
    changes, peaks = [], []
    for fn, comes, goes in ((stage.F, "x", "y"), (stage.B, "gy", "gx"), (stage.W, "", "gp")):
        before, ledger.peak = ledger.live, ledger.live
        if comes:
            groups[comes] = [ledger.new(v.nbytes) for v in _arriving(stage, comes)]
        if fn is not None:
            known = profiles.setdefault(id(fn), profile(fn))
            taken = [s for g, places in fn.takes.items() if g not in ("p", "c") for s in groups.pop(g, ())]
            groups.update(ledger.call(known, taken))
            ledger.drop(groups.pop(goes, ()))
        changes.append(ledger.live - before)
        peaks.append(ledger.peak - before)
    return changes, peaks


def _arriving(stage: Stage, group: str) -> list[Any]:
    """Types of what a stage receives: its x, or its gy."""
    reader: Fn | None = stage.F if group == "x" else stage.B or stage.W
    if reader is None:
        return []
    return [reader.value(n) for n in reader.takes.get(group, ())]


def _static_bytes(stages: Sequence[Stage], captured: Captured, placement: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Bytes of each rank's parameters (each once), their gradients, buffers and constants."""
    values = {n.name: n.meta["val"] for n in captured.graph.nodes if n.op == "placeholder"}
    places = {v: k for k, v in {**captured.params, **captured.buffers}.items()}
    totals = [0] * ranks
    for rank in range(ranks):
        own = [s for s in stages if placement[s.index] == rank]
        params = {n for s in own for n in s.names}
        trained = [s.names[i] for s in own for i in s.gparams]  # a tied parameter gathers one gradient per stage,
        trained += [n for n in {*trained} if sum(n in s.names for s in stages) > 1]  # and their sum
        others = {places[n] for s in own for n in s.buffers} | {n for s in own for n in s.constants}
        totals[rank] = sum(values[places[n]].nbytes for n in [*params, *trained]) + sum(values[n].nbytes for n in others)
    return tuple(totals)


def _order(stages: Sequence[Stage], options: Options, placement: Sequence[int], costs: CostModel, forward_only: bool) -> Schedule:
    if forward_only:
        by_rank = [[k for k, r in enumerate(placement) if r == rank] for rank in range(options.ranks)]
        ranks = tuple(tuple(Action(k, "F", mb) for mb in range(options.microbatches) for k in own) for own in by_rank)
        return Schedule(tuple(placement), ranks, "forward")
    if isinstance(options.schedule, Schedule):
        schedule = options.schedule
        if schedule.num_stages != len(stages) or len(schedule.ranks) != options.ranks:
            raise InputError(
                f"the schedule is for {schedule.num_stages} stages on {len(schedule.ranks)} ranks, "
                f"compile was asked for {len(stages)} stages on {options.ranks}"
            )
        if schedule.microbatches != options.microbatches:
            raise InputError(
                f"the schedule runs {schedule.microbatches} microbatches, compile was asked for {options.microbatches}"
            )
    else:
        schedule = order_fixed(options.schedule, placement, options.microbatches, costs=costs)
    return verify_schedule(schedule)


def _with_source(
    program: Program, stages: Sequence[Stage], schedule: Schedule, timeline: Timeline, options: Options, costs: CostModel
) -> Program:
    own = [k for k, r in enumerate(schedule.placement) if r == program.rank]
    layouts: dict[Action, tuple[Value, ...]] = {}
    for instr in program.instrs:
        if instr.verb in ("post", "send"):
            key = Action(instr.action.stage, instr.action.kind, 0)
            layouts.setdefault(key, message_values(key, stages))
    limit = costs.limit[program.rank]
    budget = "" if limit is None else f" of {format_bytes(limit)}"
    title = (
        f"Rank {program.rank} of {options.ranks}: stage{'s' * (len(own) > 1)} {' and '.join(map(str, own))}. {schedule.name}, "
        f"{options.microbatches} microbatches; predicted bubble {timeline.bubble_makespan:.1%}, "
        f"peak {format_bytes(program.peak)}{budget}."
    )
    fns = [fn for k in own for fn in (stages[k].F, stages[k].B, stages[k].W) if fn is not None]
    uses = {id(fn): last_uses(fn.graph) for fn in fns}
    text = program_text(program, stages, title=title, device=options.device, last_uses=uses, layouts=layouts)
    return replace(program, source=text)
