"""A stream's instructions -> start, body and end of each rank's program, proven on what runs: start, body again and again, end.

Steps differ by their numbers alone. So microbatches are counted within their step, buffers are named after that, and what
belongs to the step before says so (`back`). The start is what the body does for its own step, the end what it does for the
step before.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from zbfx.ir import ONCE, Action, Instr, Program, Stage
from zbfx.passes.communicate import Message, expand, expanded_orders, writer_for
from zbfx.passes.stream import STEPS, Stream

Parts = tuple[tuple[Instr, ...], tuple[Instr, ...], tuple[Instr, ...]]  # start, body, end
_MODEL = STEPS // 2  # the step that is repeated
_LAST = re.compile(r"\d+$")


def fold(stream: Stream, stages: Sequence[Stage]) -> tuple[Parts, ...]:
    """For each rank, the instructions of its first step, of every further one, and of the end."""
    orders = expanded_orders(stream.course, stages)
    begins = [_begins(stream, stages, r) for r in range(len(orders))]
    posts = _Posts(orders, begins, stream.microbatches)
    writer_for(stream.course, stages, orders, posts.note)
    writer = writer_for(stream.course, stages, orders, posts.repeat, dict(enumerate(begins)))
    folded = []
    for r, order in enumerate(orders):
        written = writer.instructions(r, order)[begins[r][_MODEL] : begins[r][_MODEL + 1]]
        body = [_in_step(i, _MODEL, stream.microbatches) for part in written for i in part]
        start = tuple(i for i in body if not i.back)
        folded.append((start, tuple(body), tuple(replace(i, back=0) for i in body if i.back)))
    return tuple(folded)


class _Posts:
    """Where receives are posted: as for the messages of one step in the middle, so for those of every other."""

    def __init__(self, orders: Sequence[Sequence[Action]], begins: Sequence[Sequence[int]], microbatches: int) -> None:
        self.begins, self.microbatches = begins, microbatches
        self.at = [{a: i for i, a in enumerate(order)} for order in orders]
        self.ends = [len(order) - 1 for order in orders]
        self.noted: dict[tuple[int, Action], int] = {}

    def note(self, message: Message, head: int) -> int:
        """Not before the step has begun, for a stream may end there; and before the end of the receiver's step in which it is
        sent: so no rank needs another to be a step ahead. What comes once a step stands ready at once.
        """
        r, a = message.target, message.consumer
        step = _step_of(a, self.microbatches)
        begin = self.begins[r][step]
        if a.kind in ONCE:
            place = max(begin, 1 + self.at[r].get(replace(a, mb=a.mb - 1), -1))
        else:
            sent_in = bisect_right(self.begins[message.source], self.at[message.source][message.producer])  # counted from 1
            place = max(begin, min(head, self.begins[r][min(sent_in, STEPS)] - 1))
        if step == _MODEL:
            self.noted[r, _local(a, self.microbatches)] = place - begin
        return place

    def repeat(self, message: Message, _: int) -> int:
        """As noted for the model's message."""
        r, a = message.target, message.consumer
        place = self.begins[r][_step_of(a, self.microbatches)] + self.noted[r, _local(a, self.microbatches)]
        return min(place, self.ends[r])


def unfolded(programs: Sequence[Program], times: int) -> tuple[list[Program], list[list[int]]]:
    """The programs as they run: the first step, `times` further ones, the end; each step's buffers named apart. And where,
    in each rank's instructions, steps end."""
    result, ends = [], []
    for p in programs:
        steps = [p.instrs, *([p.body] * times), p.flush]
        instrs = [_renamed(i, t if t <= times else times) for t, step in enumerate(steps) for i in step]
        result.append(replace(p, instrs=tuple(instrs), body=(), flush=()))
        ends.append([*accumulate(len(step) for step in steps[:-1])])
    return result, ends


def _begins(stream: Stream, stages: Sequence[Stage], rank: int) -> list[int]:
    """Where each step begins in the rank's expanded order."""
    at = [0]
    for span in stream.course.timeline.spans[rank]:
        at.append(at[-1] + len(expand(span.action, stages)))
    return [at[i] for i in stream.begins[rank]]


def _step_of(a: Action, m: int) -> int:
    return a.mb if a.kind in ONCE else a.mb // m


def _local(a: Action, m: int) -> Action:
    """An action with its microbatch counted within its step."""
    return replace(a, mb=0 if a.kind in ONCE else a.mb % m)


def _in_step(instr: Instr, step: int, m: int) -> Instr:
    """An instruction as it stands in the text of a step: its own, or one of the step before."""
    return replace(
        instr,
        action=_local(instr.action, m),
        reads=tuple(_local_name(n, m) for n in instr.reads),
        writes=tuple(_local_name(n, m) for n in instr.writes),
        frees=tuple(_local_name(n, m) for n in instr.frees),
        back=step - _step_of(instr.action, m),
    )


def _local_name(name: str, m: int) -> str:
    """s_0_13 -> s_0_5 where a step has 8 microbatches; what comes once a step has the step's number: u_1_4 -> u_1_0."""
    once = name[0] in "luvt"
    return _LAST.sub(lambda found: "0" if once else str(int(found[0]) % m), name)


def _renamed(instr: Instr, step: int) -> Instr:
    """Instruction of a text, as it runs in step `step`: its names carry the step that it belongs to."""
    own = step - instr.back

    def name(n: str) -> str:
        return f"{n}_{own}"

    return replace(
        instr,
        reads=tuple(map(name, instr.reads)),
        writes=tuple(map(name, instr.writes)),
        frees=tuple(map(name, instr.frees)),
    )
