"""Compute-only schedule -> each rank's instructions with sends and receives, free of deadlock by construction.

All actions are numbered in one order that respects dependencies and simulated time. A message's receive is posted before the
last action of its receiver that is numbered no later than its producer, so it stands ready when the producer ends; the send
follows its producer at once, and the wait for its end (`sent`) comes one action later, so that a transfer has a whole
action to hide behind. Numbering makes every wait point forward, even where a send blocks until its receive is posted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbfx.ir import Action, Instr, Schedule, Stage, Timeline, function_of
from zbfx.passes.w_parts import expanded


@dataclass(frozen=True, slots=True)
class Message:
    """What one action sends to the action that consumes it, on another rank."""

    producer: Action
    consumer: Action
    source: int
    target: int


def communicate(schedule: Schedule, stages: Sequence[Stage], timeline: Timeline) -> tuple[tuple[Instr, ...], ...]:
    """Instructions of every rank: post, recv, compute, loss, send, sent. BW becomes B, then W; empty functions vanish."""
    orders = [[part for a in rank for part in expanded(a, stages[a.stage])] for rank in schedule.ranks]
    number = _numbers(schedule, stages, timeline)
    messages = _messages(schedule, stages, orders)
    posts = _place_posts(orders, messages, number)
    into = {m.consumer: m for m in messages}
    out: dict[Action, Message] = {m.producer: m for m in messages}
    return tuple(_instructions(r, order, posts, into, out, stages, schedule) for r, order in enumerate(orders))


def _numbers(schedule: Schedule, stages: Sequence[Stage], timeline: Timeline) -> dict[Action, int]:
    """Every action's place in one order: by simulated start, ties by a dependency-respecting walk."""
    waiting = [list(rank) for rank in timeline.spans]
    heads = [0] * len(waiting)
    done: set[Action] = set()
    number: dict[Action, int] = {}
    last = schedule.num_stages - 1

    def ready(a: Action) -> bool:
        before = _feeder(a, last)
        return before is None or before in done

    while any(h < len(rank) for rank, h in zip(waiting, heads, strict=True)):
        heads_now = [(rank[h], r) for r, (rank, h) in enumerate(zip(waiting, heads, strict=True)) if h < len(rank)]
        span, r = min((s for s in heads_now if ready(s[0].action)), key=lambda s: (s[0].start, s[1]))
        heads[r] += 1
        for part in expanded(span.action, stages[span.action.stage]):
            number[part] = len(number)
            done.add(_as_consumer(part))
    return number


def _as_consumer(action: Action) -> Action:
    """The action as messages name it: what a whole backward consumes is B's."""
    return Action(action.stage, "B", action.mb) if action.kind == "BW" else action


def _feeder(action: Action, last: int) -> Action | None:
    """The action on a neighbouring stage whose result this one needs."""
    if action.kind == "F":
        return Action(action.stage - 1, "F", action.mb) if action.stage else None
    if action.kind == "W":
        return None
    return Action(action.stage + 1, "B", action.mb) if action.stage < last else None


def _messages(schedule: Schedule, stages: Sequence[Stage], orders: Sequence[Sequence[Action]]) -> list[Message]:
    found = []
    for rank, order in enumerate(orders):
        for a in order:
            consumer = _consumer(a, stages)
            if consumer is not None and schedule.placement[consumer.stage] != rank:
                found.append(Message(a, consumer, rank, schedule.placement[consumer.stage]))
    return found


def _consumer(a: Action, stages: Sequence[Stage]) -> Action | None:
    """Who gets what an action makes, if it makes anything for another stage."""
    stage = stages[a.stage]
    if a.kind == "F" and a.stage + 1 < len(stages) and stage.F.gives["y"]:
        return Action(a.stage + 1, "F", a.mb)
    backward = stage.B if a.kind == "B" else stage.BW if a.kind == "BW" else None
    if backward is not None and backward.gives["gx"] and a.stage > 0:
        return Action(a.stage - 1, "B", a.mb)
    return None


def _place_posts(
    orders: Sequence[Sequence[Action]], messages: Sequence[Message], number: dict[Action, int]
) -> dict[Action, list[Message]]:
    """Receiver's action -> the messages posted right before it, in the order in which they are sent."""
    posts: dict[Action, list[Message]] = {}
    heads = [0] * len(orders)
    for message in sorted(messages, key=lambda m: number[m.producer]):
        order, head = orders[message.target], heads[message.target]
        while head + 1 < len(order) and number[order[head + 1]] <= number[message.producer]:
            head += 1
        heads[message.target] = head
        posts.setdefault(order[head], []).append(message)
    return posts


def _instructions(
    rank: int,
    order: Sequence[Action],
    posts: dict[Action, list[Message]],
    into: dict[Action, Message],
    out: dict[Action, Message],
    stages: Sequence[Stage],
    schedule: Schedule,
) -> tuple[Instr, ...]:
    instrs: list[Instr] = []
    leaving: list[Message] = []
    for a in order:
        instrs += [Instr("post", m.consumer, peer=m.source) for m in posts.get(a, ())]
        wanted = _as_consumer(a)
        if wanted in into and a.kind != "W":
            name = _name("x" if a.kind == "F" else "gy", a.stage, a.mb)
            instrs.append(Instr("recv", wanted, writes=(name,), peer=into[wanted].source))
        computed = _compute(rank, a, stages, schedule)
        instrs += computed
        if computed:
            instrs += [Instr("sent", m.consumer, peer=m.target) for m in leaving]
            leaving = []
        if a in out:
            m = out[a]
            name = _name("y" if a.kind == "F" else "gx", a.stage, a.mb)
            instrs.append(Instr("send", m.consumer, reads=(name,), peer=m.target))
            leaving.append(m)
    instrs += [Instr("sent", m.consumer, peer=m.target) for m in leaving]
    return tuple(instrs)


def _name(group: str, stage: int, mb: int) -> str:
    return f"{group}_{stage}_{mb}"


def _compute(rank: int, a: Action, stages: Sequence[Stage], schedule: Schedule) -> list[Instr]:
    """The call of a stage function (and of the loss), with the buffers it reads and writes; nothing for an empty function."""
    stage, k, m = stages[a.stage], a.stage, a.mb
    last = k == len(stages) - 1
    fn = function_of(stage, a)
    if fn is None:
        return []
    local_x = k > 0 and schedule.placement[k - 1] == rank
    local_gy = not last and schedule.placement[k + 1] == rank
    x = _name("y", k - 1, m) if local_x else _name("x", k, m)
    gy = _name("gx", k + 1, m) if local_gy else _name("gy", k, m)
    kept = f"k{a.part}" if stage.parts else "k"
    names = {"x": x, "gy": gy, "s": _name("s", k, m), "k": _name(kept, k, m)}
    reads = tuple(names[g] for g, places in fn.takes.items() if g in names and places)
    writes = tuple(_name(g, k, m) for g, count in fn.gives.items() if count and g != "gp")
    instrs = [Instr("compute", a, reads, writes)]
    if a.kind == "F" and last:
        instrs.append(Instr("loss", a, (_name("y", k, m),), (_name("gy", k, m),) if stage.tangents else ()))
    return instrs
