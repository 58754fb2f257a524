"""Where every buffer dies, and the exact bytes that a rank holds after every instruction.

The ledger plays the program once, storage by storage: posted receive buffers count from their post, what is being sent
until `sent`, a stage function's inside operator by operator. What is measured at run time agrees to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zbfx.errors import MemoryBudgetError, VerifyError
from zbfx.ir import Action, Instr, Program, Stage, Value, function_of
from zbfx.passes.liveness import Ledger, Profile, Slot, profile


def allocate(rank: int, instrs: Sequence[Instr], stages: Sequence[Stage], profiles: dict[int, Profile]) -> Program:
    """Instructions -> Program with frees, bytes held after each instruction, and the peak. `profiles` is filled as needed."""
    instrs = _with_frees(instrs)
    ledger = Ledger()
    buffers: dict[str, list[Slot]] = {}
    posted: dict[Action, list[Slot]] = {}
    leaving: dict[Action, list[Slot]] = {}
    held = []
    for instr in instrs:
        a = instr.action
        if instr.verb == "post":
            posted[a] = [ledger.new(v.nbytes) for v in message_values(a, stages)]
        elif instr.verb == "recv":
            buffers[instr.writes[0]] = posted.pop(a)
        elif instr.verb == "send":
            leaving[a] = buffers.pop(instr.reads[0])
        elif instr.verb == "sent":
            ledger.drop(leaving.pop(a))
        elif instr.verb == "loss":
            ledger.drop(buffers.pop(instr.reads[0]))
            buffers.update({name: [None] for name in instr.writes})
        else:
            _call(ledger, instr, stages, profiles, buffers)
        held.append(ledger.live)
    return Program(rank, tuple(instrs), held=tuple(held), peak=ledger.peak)


def message_values(consumer: Action, stages: Sequence[Stage]) -> tuple[Value, ...]:
    """What travels to an action: the stage before's outputs, or the stage after's input gradients."""
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
