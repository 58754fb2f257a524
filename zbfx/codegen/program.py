"""A rank's instructions -> the Python file that runs: operators, messages, the stages' functions, and `step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from zbfx.codegen.function import function_text
from zbfx.ir import Action, Instr, Program, Stage, Value, short_type

Layouts = Mapping[Action, tuple[Value, ...]]


def program_text(
    program: Program,
    stages: Sequence[Stage],
    *,
    title: str,
    device: torch.device,
    last_uses: Mapping[int, Mapping[fx.Node, fx.Node]],
    layouts: Layouts,
) -> str:
    """The text of `rank_{program.rank}.py`.

    last_uses[id(fn)]: where each name of a function dies. layouts: message (by consumer, microbatch 0) -> what travels.
    """
    ops: dict[str, str] = {}
    own = sorted({i.action.stage for i in (*program.instrs, *program.flush) if i.verb == "compute"})
    classes = [line for k in own for line in _stage_class(stages[k], ops, last_uses)]
    messages = _messages(program, layouts)
    head = [
        f'"""{title}',
        "",
        "This file is what runs: edit it, and the edit runs. p: parameters, buffers, constants; c: input leaves; x, y:",
        "activations in and out; gx, gy: their gradients; s: what F saves for B; k: what B keeps for W. A function takes",
        "what it is given out of the lists, so that each tensor dies at its last use.",
        '"""',
        "",
        "import torch",
        "",
        f"DEVICE = torch.device({device.type!r})",
        *[f"{name} = {path}" for name, path in sorted(ops.items())],
        "",
        "# consumer of a message: (from rank, to rank, (dtype, shape, stride) of each tensor)",
        "MESSAGES = {",
        *messages,
        "}",
    ]
    return "\n".join([*head, *classes, "", "", *_steps(program, stages, layouts)]) + "\n"


def _stage_class(stage: Stage, ops: dict[str, str], last_uses: Mapping[int, Mapping[fx.Node, fx.Node]]) -> list[str]:
    users = [*stage.names, *stage.buffers]
    lines = ["", "", f"class stage_{stage.index}:"]
    if stage.parts:
        gradients = tuple(part.gradients for part in stage.parts)
        lines += [f"    GRADIENTS = {gradients}  # those of the stage that each part of W gives", ""]
    parts = [(f"W_{i}", part.W) for i, part in enumerate(stage.parts)]
    for kind, fn in (("F", stage.F), ("B", stage.B), ("W", stage.W), *parts, ("BW", stage.BW)):
        if fn is not None:
            body = function_text(kind, fn, last_uses[id(fn)], ops, users)
            lines += ["    @staticmethod", *[f"    {line}" for line in body], ""]
    return lines[:-1]


def _messages(program: Program, layouts: Layouts) -> list[str]:
    seen: dict[str, str] = {}
    for i in (*program.instrs, *program.body, *program.flush):
        if i.verb in ("post", "send"):
            ends = (i.peer, program.rank) if i.verb == "post" else (program.rank, i.peer)
            values = layouts[Action(i.action.stage, i.action.kind, 0, i.action.part)]
            what = tuple((str(v.dtype).removeprefix("torch."), v.shape, v.stride) for v in values)
            tied = i.action.kind == "T"  # each of the ranks that share a parameter sends something else
            key = str(i.action) if tied else f"{i.action.stage}{i.action.kind}"
            seen[key] = f"    {key!r}: ({ends[0]}, {ends[1]}, {what!r}),"
    return [seen[key] for key in sorted(seen)]


def _steps(program: Program, stages: Sequence[Stage], layouts: Layouts) -> list[str]:
    """`step`, and, where steps reach into one another, `flush`. A stream's `step` is a generator that yields after each step."""
    lines = ["def step(rank):", *_block(program.instrs, stages, layouts)]
    if program.body:
        lines += ["    while (yield):  # True: another step begins; False: the stream ends"]
        lines += ["    " + line for line in _block(program.body, stages, layouts)]
        return lines + _block(program.flush, stages, layouts)
    lines = lines if len(lines) > 1 else [*lines, "    pass"]
    if program.flush:
        lines += ["", "", "def flush(rank):", *_block(program.flush, stages, layouts)]
    return lines


def _block(instrs: Sequence[Instr], stages: Sequence[Stage], layouts: Layouts) -> list[str]:
    """A line or two per instruction; those that depend on a flag of the rank stand under an `if`."""
    lines: list[str] = []
    when = ""
    for index, instr in enumerate(instrs):
        if instr.when != when and instr.when:
            lines.append(f"    if rank.{instr.when}:{_WHY[instr.when]}")
        when = instr.when
        indent = "        " if when else "    "
        if instr.verb not in ("post", "send", "sent", "loss", "drop") and _begins(instrs, index):
            lines.append(f'{indent}rank.begin("{begun_action(instrs, index)}")')
        lines.append(indent + _line(instr, stages, layouts))
    return lines


_WHY = {
    "ahead": "  # the last step was taken before the state of all was known",
    "wrong": "  # and it was wrong: what has used its weights runs again",
    "cautious": "  # one of the last steps was clipped or skipped: wait for the state of all",
}


def _begins(instrs: Sequence[Instr], index: int) -> bool:
    """Whether an action begins here: with what it receives, unless that is thrown away."""
    if instrs[index].verb == "recv":
        return index + 1 == len(instrs) or instrs[index + 1].verb != "drop"
    return not _received(instrs, index)


def _received(instrs: Sequence[Instr], index: int) -> bool:
    before = instrs[index - 1] if index else None
    return before is not None and before.verb == "recv" and begun_action(instrs, index - 1) == instrs[index].action


def begun_action(instrs: Sequence[Instr], index: int) -> Action:
    """The action that an instruction belongs to: what a whole backward receives is named after B."""
    a = instrs[index].action
    if instrs[index].verb == "recv" and index + 1 < len(instrs):
        after = instrs[index + 1]
        if after.verb == "compute" and after.action == Action(a.stage, "BW", a.mb):
            return after.action
    return a


def _line(instr: Instr, stages: Sequence[Stage], layouts: Layouts) -> str:
    a = instr.action
    delete = f"; del {', '.join(instr.frees)}" if instr.frees else ""
    if instr.verb == "recv":
        what = ", ".join(short_type(v.dtype, v.shape) for v in layouts[Action(a.stage, a.kind, 0, a.part)])
        return f'{instr.writes[0]} = [*rank.recv("{a}")]  # {what} from rank {instr.peer}'
    if instr.verb == "send":
        own = {"L": "rank.result()", "T": f"rank.tied({instr.peer})"}.get(a.kind, "rank.state()")
        what = instr.reads[0] if instr.reads else own
        return f'rank.send("{a}", *{what}){delete}  # to rank {instr.peer}'
    if instr.verb in ("post", "sent"):
        return f'rank.{instr.verb}("{a}")'
    if instr.verb == "drop":
        return f"del {instr.reads[0]}"
    if instr.verb == "tie":
        return f"rank.tie({a.part}, *{instr.reads[0]}){delete}"
    if instr.verb == "collect":
        return f"rank.collect({'' if a.part is None else a.part})"
    if instr.verb in ("report", "measure", "update"):
        return f"rank.{instr.verb}({''.join(f'*{name}' for name in instr.reads)}){delete}"
    if instr.verb == "learn":
        return f"rank.learn(*{instr.reads[0] if instr.reads else 'rank.state()'}){delete}"
    if instr.verb == "loss":
        back = f", back={instr.back}" if instr.back else ""
        call = f"rank.loss({a.mb}, *{instr.reads[0]}{back})"
        return (f"{instr.writes[0]} = [{call}]" if instr.writes else call) + delete
    return _call(instr, stages[a.stage], delete)


def _call(instr: Instr, stage: Stage, delete: str) -> str:
    """A stage's function: in a stream, on the weights and inputs of the microbatch's own step."""
    a, back = instr.action, f", {instr.back}" if instr.back else ""
    name = f"W_{a.part}" if a.kind == "W" and stage.parts else a.kind
    given = [f"rank.params({a.stage}{back})", f"rank.inputs({a.stage}, {a.mb}{back})", *instr.reads]
    call = f"stage_{a.stage}.{name}({', '.join(given)})"
    if a.kind == "W":
        which = f", stage_{a.stage}.GRADIENTS[{a.part}]" if stage.parts else ""
        return f"rank.accumulate({a.stage}, {call}{which}){delete}"
    if a.kind == "BW":
        return f"{instr.writes[0]}, gp = {call}{delete}; rank.accumulate({a.stage}, gp); del gp"
    return f"{_targets(instr, stage)} = {call}{delete}"


def _targets(instr: Instr, stage: Stage) -> str:
    """F gives y, s; B gives gx, k (or k0, k1, ...): an empty list still takes a name."""
    fn = stage.F if instr.action.kind == "F" else stage.B
    groups = tuple(fn.gives) if fn is not None else ()
    names = {w.split("_", 1)[0]: w for w in instr.writes}
    return ", ".join(names.get(g, "_") for g in groups)
