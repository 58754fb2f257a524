"""Where every buffer dies, and the exact bytes that a rank holds after every instruction.

The ledger plays the program once, storage by storage: posted receive buffers count from their post, what is being sent
until `sent`, a stage function's inside operator by operator. What is measured at run time agrees to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from zbfx.errors import MemoryBudgetError, VerifyError
from zbfx.ir import Action, Instr, Program, Stage, Value, function_of
from zbfx.passes.liveness import Ledger, Profile, Slot, profile
from zbfx.verify_program import variants

Messages = Callable[[Action], tuple[Value, ...]]  # what travels to an action


def allocate(
    rank: int,
    instrs: Sequence[Instr],
    stages: Sequence[Stage],
    profiles: dict[int, Profile],
    messages: Messages | None = None,
    flush: Sequence[Instr] = (),
) -> Program:
    """Instructions -> Program with frees, bytes held after each instruction, and the peak. `profiles` is filled as needed.

    Held is what a step holds that finds nothing wrong; the peak is the largest of all that a step may do.
    """
    instrs = _with_frees(instrs)
    play = partial(_play, stages=stages, profiles=profiles, messages=messages or partial(message_values, stages=stages))
    held, peak = play(instrs, {"", "ahead"})
    for flags in variants(instrs)[1:]:
        peak = max(peak, play(instrs, flags)[1])
    return Program(rank, tuple(instrs), flush=tuple(_with_frees(flush)), held=tuple(held), peak=peak)


def allocate_stream(
    rank: int,
    parts: Sequence[Sequence[Instr]],
    stages: Sequence[Stage],
    profiles: dict[int, Profile],
    messages: Messages,
) -> Program:
    """Start, body and end of a stream -> Program. Held is what the first step holds; the peak is that of all steps."""
    start, body, end = (_with_frees(part) for part in parts)
    held, peak = _play([*start, *body, *body, *end], {""}, stages, profiles, messages)
    return Program(rank, tuple(start), body=tuple(body), flush=tuple(end), held=tuple(held[: len(start)]), peak=peak)


def _play(
    instrs: Sequence[Instr], flags: set[str], stages: Sequence[Stage], profiles: dict[int, Profile], messages: Messages
) -> tuple[list[int], int]:
    """Bytes held after each instruction, and the peak, in a step that runs the instructions with these flags."""
    ledger = Ledger()
    buffers: dict[str, list[Slot]] = {}
    posted: dict[Action, list[Slot]] = {}
    leaving: dict[Action, list[Slot]] = {}
    held = []
    for instr in instrs:
        a = instr.action
        if instr.when not in flags:
            pass
        elif instr.verb == "post":
            posted[a] = [ledger.new(v.nbytes) for v in messages(a)]
        elif instr.verb == "recv":
            buffers[instr.writes[0]] = posted.pop(a)
        elif instr.verb == "send":
            leaving[a] = [s for name in instr.reads for s in buffers.pop(name)]
        elif instr.verb == "sent":
            ledger.drop(leaving.pop(a))
        elif instr.verb == "compute":
            _call(ledger, instr, stages, profiles, buffers)
        else:  # what these make is the rank's own, and outlives the step
            ledger.drop([s for name in instr.reads for s in buffers.pop(name)])
            buffers.update({name: [None] for name in instr.writes})
        held.append(ledger.live)
    return held, ledger.peak


def message_values(consumer: Action, stages: Sequence[Stage]) -> tuple[Value, ...]:
    """What travels to an action: the stage before's outputs, the stage after's input gradients, the loss, or the state of
    the gradients: per stage the squared norm, and whether one is not finite."""
    if consumer.kind == "L":
        return (replace(stages[-1].F.group("y")[0], name="loss"),)
    if consumer.kind in ("S", "V"):
        return (Value("state", torch.float64, (len(stages), 2), (2, 1)),)
    if consumer.kind == "F":
        return stages[consumer.stage - 1].F.group("y")
    following = stages[consumer.stage + 1]
    after = following.B or following.BW
    return after.group("gx") if after is not None else ()


def refuse_over_limit(programs: Sequence[Program], limits: Sequence[int | None]) -> None:
    """Raises MemoryBudgetError naming the rank, the instruction, and by how much."""
    for program, limit in zip(programs, limits, strict=True):
        if limit is not None and program.peak > limit:
            worst = max(range(len(program.held)), key=program.held.__getitem__)
            at = program.instrs[worst].action
            raise MemoryBudgetError(
                f"rank {program.rank} needs {program.peak} bytes of activations at its peak (most is held around {at}), "
                f"{program.peak - limit} over its limit of {limit}: raise memory=, use more ranks or smaller microbatches"
            )


def _call(
    ledger: Ledger, instr: Instr, stages: Sequence[Stage], profiles: dict[int, Profile], buffers: dict[str, list[Slot]]
) -> None:
    fn = function_of(stages[instr.action.stage], instr.action)
    if fn is None:
        raise VerifyError(f"{instr.action} is empty and cannot be called")
    if id(fn) not in profiles:
        profiles[id(fn)] = profile(fn)
    inputs = [s for name in instr.reads for s in buffers.pop(name)]
    groups = ledger.call(profiles[id(fn)], inputs)
    for group, storages in groups.items():
        if group == "gp":
            ledger.drop(storages)
        elif storages:
            buffers[f"{group}_{instr.action.stage}_{instr.action.mb}"] = storages


def _with_frees(instrs: Sequence[Instr]) -> list[Instr]:
    """Every buffer is freed by the instruction that reads it: each has exactly one reader."""
    return [replace(i, frees=i.reads) for i in instrs]
