"""The whole compiler as one straight list of passes, with a verifier between each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
    Course,
    Fn,
    Forward,
    Joint,
    Link,
    Program,
    Schedule,
    Solution,
    Stage,
    Value,
    outputs_of,
)
from zbfx.ordering import SEARCHED, Search, order, order_forward, order_places, place_stages
from zbfx.passes.allocate import Messages, refuse_over_limit
from zbfx.passes.liveness import Ledger, Profile, last_uses, profile
from zbfx.passes.partition import cuts_for_owners, partition
from zbfx.passes.recompute import recompute_regions
from zbfx.passes.reuse import Signature, renamed, signature
from zbfx.passes.simulate import highest_bytes
from zbfx.passes.split_backward import split_backward
from zbfx.passes.w_parts import with_w_parts
from zbfx.passes.whole_backward import whole_backward, with_whole_backwards
from zbfx.plan import Plan
from zbfx.programs import make_programs, messages_of, tied_ranks
from zbfx.text import format_bytes, format_prediction
from zbfx.trace.capture import capture
from zbfx.trace.differentiate import differentiate
from zbfx.trace.estimate import DEVICES, device_profile, graph_seconds, node_seconds
from zbfx.trace.whole import Loss
from zbfx.training import Resident, Training, resident_bytes
from zbfx.verify_program import verify_stage

# Between processes of one machine, and between GPUs of one server: seconds per message, bytes per second.
LINKS = {"cpu": Link(latency=5e-5, bandwidth=2e9), "cuda": Link(latency=1e-5, bandwidth=1e11)}
History = list[tuple[str, Any]]
_CPU = torch.device("cpu")
_ATTEMPTS = 4


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
    placement: str | tuple[int, ...] | None = None
    dead_after: float = 5.0
    timeout: float = 1800.0
    search: Search = field(default_factory=Search)
    training: Training | None = None  # None: the user's own optimizer steps


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
    if like is not None:  # the parameters stay where they are, and the order with them
        same = like.microbatches == options.microbatches and like.schedule.name != "forward" and not forward_only
        named = options.training is not None and options.training.weights == "2bw"  # a stream is made of a schedule by name
        kept = like.schedule if same and not named else options.schedule
        options = replace(options, placement=like.schedule.placement, schedule=kept)
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
    placement, found = _placed(stages, captured, options, profiles, forward_only)
    resident = residents(stages, captured, placement, options.ranks, None if forward_only else options.training)
    static = tuple(r.total for r in resident)
    history.append(("resident", resident))
    costs = estimate_costs(stages, options, static, profiles)
    history.append(("estimate", costs))
    if forward_only:
        options = replace(options, training=None)
    schedule, solution, course, programs = _scheduled(stages, options, placement, costs, profiles, history, forward_only, found)
    timeline = course.timeline
    running = _running(stages, schedule, options.device)
    if any(s.parts for s in running):
        history.append(("w_parts", running))
    without_barrier = options.training is not None and options.training.weights != "synchronous"
    predicted = format_prediction(timeline, solution, course.period if without_barrier else None)
    messages = messages_of(running, tied_ranks(running, schedule.placement), options.training)
    programs = tuple(_with_source(p, running, messages, schedule, predicted, options, costs) for p in programs)
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
        solution=solution,
        weights="" if options.training is None else options.training.weights,
        period=course.period,
    )


def _placed(
    stages: Sequence[Stage], captured: Captured, options: Options, profiles: dict[int, Profile], forward_only: bool
) -> tuple[tuple[int, ...], Solution | None]:
    """placement[stage]; where it was searched, with the schedule that was found for it."""
    if options.placement != "auto":
        return place_stages(options.placement, options.schedule, len(stages), options.ranks), None
    if forward_only or isinstance(options.schedule, Schedule):
        return place_stages("blocks", options.schedule, len(stages), options.ranks), None
    free = estimate_costs(stages, replace(options, memory=None), (0,) * options.ranks, profiles)

    def costs_for(place: Sequence[int]) -> CostModel:
        return replace(
            free, limit=_limits(options, [r.total for r in residents(stages, captured, place, options.ranks, options.training)])
        )

    solution = order_places(options.schedule, len(stages), options.ranks, options.microbatches, costs_for, options.search)
    return solution.schedule.placement, solution


def _scheduled(
    stages: Sequence[Stage],
    options: Options,
    placement: Sequence[int],
    costs: CostModel,
    profiles: dict[int, Profile],
    history: History,
    forward_only: bool,
    found: Solution | None,
) -> tuple[Schedule, Solution | None, Course, tuple[Program, ...]]:
    """Order, simulate, communicate and allocate. The search counts bytes at the ends of actions; where receive buffers and
    temporaries carry a rank over its limit all the same, it searches again for that much less. found: by placement's search.
    """
    tight, solution = costs, found
    for attempt in range(_ATTEMPTS):
        if forward_only:
            schedule = order_forward(placement, options.microbatches, options.ranks)
        elif found is not None and attempt == 0:
            schedule = found.schedule
        else:
            schedule, solution = order(options.schedule, placement, options.microbatches, tight, options.search)
        running = _running(stages, schedule, options.device)
        repeated = partial(_repeated, options, placement, costs)
        course, programs = make_programs(schedule, repeated, running, costs, options.training, profiles)
        over = [0 if limit is None else max(0, p.peak - limit) for p, limit in zip(programs, costs.limit, strict=True)]
        if options.schedule not in SEARCHED or forward_only or not any(over) or attempt + 1 == _ATTEMPTS:
            break
        counted = [max(highest_bytes(schedule, costs, r), default=0) for r in range(len(over))]
        limit = tuple(
            None if b is None else min(b, c) - o if o else b for b, c, o in zip(tight.limit, counted, over, strict=True)
        )
        tight = replace(tight, limit=limit)
    refuse_over_limit(programs, costs.limit)
    history += [("order", schedule), ("simulate", course.timeline), ("allocate", programs)]
    return schedule, solution, course, programs


def _repeated(options: Options, placement: Sequence[int], costs: CostModel, microbatches: int) -> Schedule:
    """The named schedule for another number of microbatches, whatever it holds: a stream is made of it."""
    if isinstance(options.schedule, Schedule) or options.schedule in SEARCHED:
        found = "your own" if isinstance(options.schedule, Schedule) else repr(options.schedule)
        raise InputError(f"weights='2bw' makes one stream of all steps, from a schedule by name; {found} is none: take '1f1b'")
    free = replace(costs, limit=(None,) * len(costs.limit))
    return order(options.schedule, placement, microbatches, free, options.search)[0]


def _running(stages: Sequence[Stage], schedule: Schedule, device: torch.device) -> tuple[Stage, ...]:
    """The stages as the schedule runs them: with whole backwards, with W in parts."""
    seconds = partial(node_seconds, device=device_profile(device))
    running = with_w_parts(with_whole_backwards(stages, schedule), schedule, seconds)
    for stage in running:
        if stage.parts:
            verify_stage(stage)
    return running


def reorder(plan: Plan, options: Options) -> Plan:
    """The same stages under another schedule, number of ranks or of microbatches (of the same size)."""
    by_name = dict(plan.history)
    kept = [(name, value) for name, value in plan.history if name in ("capture", "partition", "split_backward")]
    if "capture" not in by_name:
        raise InputError("a plan that was loaded from a folder holds no graphs: compile the model to change its schedule")
    if options.placement == "auto":  # the parameters stay where they are
        options = replace(options, placement=plan.schedule.placement)
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
    return cuts_for_owners(captured, _homes(like), options.num_stages, _shared(like))


def _homes(plan: Plan) -> dict[str, int]:
    """The stage of every parameter, and of every buffer that one stage alone uses: its rank may be the only one to update it."""
    users: dict[str, list[int]] = {}
    for stage in plan.stages:
        for name in stage.buffers:
            users.setdefault(name, []).append(stage.index)
    return {**plan.owners, **{name: stages[0] for name, stages in users.items() if len(stages) == 1}}


def _shared(plan: Plan) -> dict[str, tuple[int, int]]:
    """The parameters that several stages use, with the first and the last of these."""
    users: dict[str, list[int]] = {}
    for stage in plan.stages:
        for name in stage.names:
            users.setdefault(name, []).append(stage.index)
    return {name: (stages[0], stages[-1]) for name, stages in users.items() if len(stages) > 1}


def _operators(captured: Captured) -> list[Any]:
    return [n.target for n in captured.graph.nodes if n.op == "call_function"]


def _split(captured: Captured, forwards: Sequence[Forward], forward_only: bool) -> tuple[Stage, ...]:
    """Differentiate and split each stage, last to first: the layout of a gradient is known where it is made."""
    results = outputs_of(forwards[-1].graph)
    tangents: list[Any] = [None] * len(results) if forward_only else [results[0].meta["val"]]
    stages: list[Stage] = []
    known: dict[Signature, tuple[Stage, Joint]] = {}
    for forward in reversed(forwards):
        key = signature(forward, tangents)
        if key in known:
            stage = renamed(*known[key], forward, captured)
        else:
            joint = recompute_regions(differentiate(forward, tangents))
            stage = split_backward(joint, captured)
            if stage.B is not None and stage.W is not None:
                stage = replace(stage, whole=whole_backward(joint))
            known[key] = stage, joint
        verify_stage(stage)
        stages.append(stage)
        tangents = _gradients_sent(forward, stage)
    return tuple(reversed(stages))


def _gradients_sent(forward: Forward, stage: Stage) -> list[Any]:
    """For each of a stage's inputs and views of them, the fake gradient that it sends back, or None."""
    sent: list[Any] = [None] * len((*forward.inputs, *forward.views_in))
    if stage.B is not None:
        for i, position in enumerate(stage.gx):
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
    return CostModel(tuple(_stage_cost(s, device, profiles) for s in stages), comm, _limits(options, static))


def _limits(options: Options, static: Sequence[int]) -> tuple[int | None, ...]:
    """Bytes left for activations on each rank. Raises InputError where there are none."""
    if options.memory is None:
        return (None,) * len(static)
    for rank, taken in enumerate(static):
        if taken >= options.memory:
            raise InputError(
                f"memory={format_bytes(options.memory)}: rank {rank}'s parameters, gradients and buffers alone take "
                f"{format_bytes(taken)}: use more ranks or a larger limit"
            )
    return tuple(options.memory - taken for taken in static)


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


def residents(
    stages: Sequence[Stage], captured: Captured, placement: Sequence[int], ranks: int, training: Training | None
) -> tuple[Resident, ...]:
    """What each rank holds from step to step: its parameters (each once), their gradients, buffers, constants and more."""
    values = {n.name: n.meta["val"] for n in captured.graph.nodes if n.op == "placeholder"}
    places = {v: k for k, v in {**captured.params, **captured.buffers}.items()}
    found = []
    for rank in range(ranks):
        own = [s for s in stages if placement[s.index] == rank]
        gathered = [s.names[i] for s in own for i in s.gparams]  # a tied parameter gathers one gradient per stage,
        trained = {*gathered}
        gathered += [n for n in trained if sum(n in s.names for s in stages) > 1]  # and their sum
        frozen = sum(values[places[n]].nbytes for n in {n for s in own for n in s.names} - trained)
        others = {places[n] for s in own for n in s.buffers} | {n for s in own for n in s.constants}
        tensors = [values[places[n]] for n in sorted(trained)]
        grads = [values[places[n]] for n in gathered]
        overlap = len(own) > 1 or len(gathered) > len(trained)  # a stage, or a tie's other end, is behind the others
        knows = rank == max(range(ranks), key=list(placement).index)  # it has heard from all before it steps
        found.append(resident_bytes(tensors, frozen, grads, sum(values[n].nbytes for n in others), training, knows, overlap))
    return tuple(found)


def _with_source(
    program: Program,
    stages: Sequence[Stage],
    messages: Messages,
    schedule: Schedule,
    predicted: str,
    options: Options,
    costs: CostModel,
) -> Program:
    own = [k for k, r in enumerate(schedule.placement) if r == program.rank]
    layouts: dict[Action, tuple[Value, ...]] = {}
    for instr in (*program.instrs, *program.body, *program.flush):
        if instr.verb in ("post", "send"):
            key = Action(instr.action.stage, instr.action.kind, 0, instr.action.part)
            layouts.setdefault(key, messages(key))
    limit = costs.limit[program.rank]
    budget = "" if limit is None else f" of {format_bytes(limit)}"
    title = (
        f"Rank {program.rank} of {options.ranks}: stage{'s' * (len(own) > 1)} {' and '.join(map(str, own))}. {schedule.name}, "
        f"{options.microbatches} microbatches; predicted {predicted}, "
        f"peak {format_bytes(program.peak)}{budget}."
    )
    parts = [part.W for k in own for part in stages[k].parts]
    fns = [fn for k in own for fn in (stages[k].F, stages[k].B, stages[k].W, stages[k].BW)]
    uses = {id(fn): last_uses(fn.graph) for fn in (*fns, *parts) if fn is not None}
    text = program_text(program, stages, title=title, device=options.device, last_uses=uses, layouts=layouts)
    return replace(program, source=text)
