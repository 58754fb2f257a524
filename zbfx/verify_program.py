"""Proofs about generated programs: every buffer is made once and read once, no order of messages can deadlock.

Rendezvous semantics, the strictest a channel may have: a send blocks until its receive is posted, a receive until its send
has begun. A set of programs is free of deadlock if the graph of "happens before" has no circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import networkx as nx

from zbfx.errors import VerifyError
from zbfx.ir import Fn, Instr, Program, Stage

_Place = tuple[int, int]  # rank, index of the instruction
_BARRIER = -1  # in a rank's place: the end of a step on all ranks, whose number is the index


def verify_stream(programs: Sequence[Program], ends: Sequence[Sequence[int]]) -> None:
    """A stream as it runs for some steps; ends[r]: the instructions of rank r before which a step has ended. Raises VerifyError.

    No rank may need another to be a step ahead: ranks of one process end each step together.
    """
    for program in programs:
        _verify_buffers(program)
    _verify_messages(programs, stream=True, cuts=ends)


def verify_programs(programs: Sequence[Program]) -> None:
    """Raises VerifyError with the program around the fault. A program without text is checked all the same.

    Where instructions depend on a flag, which all ranks set alike, every way through the programs is checked.
    """
    ways = variants([i for p in programs for i in p.instrs])
    for flags in ways:
        run = [replace(p, instrs=tuple(i for i in p.instrs if i.when in flags)) for p in programs]
        for program in run:
            _verify_buffers(program)
        _verify_messages(run)
    _verify_messages([replace(p, instrs=p.flush) for p in programs])


def variants(instrs: Sequence[Instr]) -> list[set[str]]:
    """The sets of flags that a step may run with: nothing wrong, first forwards again, waiting for the state of all."""
    used = {i.when for i in instrs}
    return [{"", "ahead"}, *[flags for flags in ({"", "ahead", "wrong"}, {"", "cautious"}) if flags & used > {""}]]


def show(program: Program, index: int) -> str:
    """The ten instructions around one, with an arrow."""
    lines = []
    for i in range(max(0, index - 5), min(len(program.instrs), index + 5)):
        arrow = "-->" if i == index else "   "
        lines.append(f"{arrow} rank {program.rank} [{i}] {_text(program.instrs[i])}")
    return "\n".join(lines)


def _text(instr: Instr) -> str:
    peer = "" if instr.peer is None else f" (rank {instr.peer})"
    reads, writes = ", ".join(instr.reads), ", ".join(instr.writes)
    return f"{instr.verb} {instr.action}{peer}" + (f" reads {reads}" if reads else "") + (f" writes {writes}" if writes else "")


def _verify_buffers(program: Program) -> None:
    live: set[str] = set()
    for i, instr in enumerate(program.instrs):
        for name in instr.reads:
            if name not in live:
                raise VerifyError(f"buffer {name} is read where it does not exist\n{show(program, i)}")
        live -= set(instr.frees)
        for name in instr.writes:
            if name in live:
                raise VerifyError(f"buffer {name} is overwritten while alive\n{show(program, i)}")
        live |= set(instr.writes)
    unread = sorted(n for n in live if not n.startswith("gy_"))  # the loss's tangent is static: it needs no reader
    if unread:
        raise VerifyError(f"rank {program.rank}: buffers {unread} are never freed")


def _verify_messages(programs: Sequence[Program], *, stream: bool = False, cuts: Sequence[Sequence[int]] = ()) -> None:
    at: dict[tuple[str, str], _Place] = {}
    times: Counter[tuple[str, str]] = Counter()  # what is run again sends again: the second time it is another message
    again = stream or any(i.when == "wrong" for p in programs for i in p.instrs)
    edges: dict[tuple[str, int, int], list[str]] = {}
    graph: nx.DiGraph[_Place] = nx.DiGraph()
    for program in programs:
        for i, instr in enumerate(program.instrs):
            graph.add_edge((program.rank, i - 1), (program.rank, i))
            if instr.verb not in ("post", "recv", "send", "sent"):
                continue
            key = (instr.verb, str(instr.action))
            times[key] += 1
            if again and times[key] > 1:
                key = (instr.verb, f"{instr.action} (time {times[key]})")
            if key in at or instr.peer is None:
                raise VerifyError(f"{instr.verb} of {instr.action} comes twice, or has no peer\n{show(program, i)}")
            at[key] = (program.rank, i)
            if instr.verb in ("post", "send") and not (
                stream and instr.action.kind in "LSVT"
            ):  # these have channels of their own
                ends = (program.rank, instr.peer) if instr.verb == "send" else (instr.peer, program.rank)
                edges.setdefault((instr.verb, *ends), []).append(str(instr.action))
    for name in {n for _, n in at}:
        missing = [v for v in ("post", "recv", "send", "sent") if (v, name) not in at]
        if missing:
            raise VerifyError(f"message {name} has no {', no '.join(missing)}")
        for begin, end in (("post", "recv"), ("send", "sent")):
            (rank, start), (other, stop) = at[begin, name], at[end, name]
            if rank != other or stop < start:
                program = next(p for p in programs if p.rank == other)
                raise VerifyError(f"{end} of {name} needs its {begin} before it, on the same rank\n{show(program, stop)}")
        graph.add_edge(at["post", name], at["send", name])
        graph.add_edge(at["send", name], at["recv", name])
    for (verb, source, target), names in edges.items():
        if verb == "send" and names != edges.get(("post", source, target)):
            raise VerifyError(
                f"rank {source} sends to {target} in the order {names}, which is posted as {edges.get(('post', source, target))}"
            )
    for program, places in zip(programs, cuts, strict=False):
        for step, place in enumerate(places):
            graph.add_edge((program.rank, place - 1), (_BARRIER, step))
            graph.add_edge((_BARRIER, step), (program.rank, place))
    _refuse_circle(graph, programs)


def _refuse_circle(graph: nx.DiGraph[_Place], programs: Sequence[Program]) -> None:
    if nx.is_directed_acyclic_graph(graph):
        return
    circle = [edge[0] for edge in nx.find_cycle(graph)]
    by_rank = {p.rank: p for p in programs}
    lines = [f"rank {r} [{i}] {_text(by_rank[r].instrs[i])}" for r, i in circle if r != _BARRIER]
    raise VerifyError("the programs deadlock: each of these waits for the next\n" + "\n".join(lines))


def verify_stage(stage: Stage) -> None:
    """A stage's functions fit together: each group that one gives is what the next takes; every value has a type."""
    parts = [(f"W_{i}", part.W) for i, part in enumerate(stage.parts)]
    for kind, fn in (("F", stage.F), ("B", stage.B), ("W", stage.W), *parts):
        if fn is not None:
            _verify_fn(f"stage {stage.index} {kind}", fn)
    saved = stage.F.gives["s"]
    reader = stage.B or stage.W
    wanted = len(reader.takes.get("s", ())) if reader is not None else 0
    if saved != wanted:
        raise VerifyError(f"stage {stage.index}: F saves {saved} values, {'B' if stage.B else 'W'} takes {wanted}")
    if stage.B is None:
        return
    for number, w in ((f"{i}", part.W) for i, part in enumerate(stage.parts)) if stage.parts else (("", stage.W),):
        kept, wanted = stage.B.gives.get(f"k{number}", 0), 0 if w is None else len(w.takes.get("k", ()))
        if kept != wanted:
            raise VerifyError(f"stage {stage.index}: B keeps {kept} values, W{number and '_' + number} takes {wanted}")
    given = sorted(i for part in stage.parts for i in part.gradients)
    if stage.parts and given != list(range(len(stage.gparams))):
        raise VerifyError(f"stage {stage.index} has {len(stage.gparams)} gradients, the parts of its W give {given}")


def _verify_fn(place: str, fn: Fn) -> None:
    fn.graph.lint()
    names = [n.name for n in fn.graph.nodes if n.op == "placeholder"]
    declared = [n for group in fn.takes.values() for n in group]
    if names != declared:
        raise VerifyError(f"{place}: its graph takes {names}, its groups say {declared}")
    outputs = fn.outputs
    if not isinstance(outputs, tuple) or len(outputs) != sum(fn.gives.values()):
        raise VerifyError(f"{place}: its graph returns {outputs}, its groups say {dict(fn.gives)}")
    untyped = [n.name for n in fn.graph.nodes if n.op == "call_function" and "val" not in n.meta]
    if untyped:
        raise VerifyError(f"{place}: {untyped} have no type\n{fn}")
