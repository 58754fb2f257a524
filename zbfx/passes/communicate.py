"""Compute-only schedule -> each rank's instructions with sends and receives, free of deadlock by construction.

All actions are numbered in one order that respects dependencies and simulated time. A message's receive is posted before the
last action of its receiver that is numbered no later than its producer, so it stands ready when the producer ends; the send
follows its producer at once, and the wait for its end (`sent`) comes one action later, so that a transfer has a whole
action to hide behind. Numbering makes every wait point forward, even where a send blocks until its receive is posted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from zbfx.ir import ONCE, Action, Course, Instr, Schedule, Stage, Verb, When, function_of
from zbfx.passes.w_parts import expanded

_VERBS: dict[str, Verb] = {"L": "report", "S": "measure", "V": "learn", "U": "update", "G": "collect", "T": "tie"}


@dataclass(frozen=True, slots=True)
class Message:
    """What one action sends to the action that consumes it, on another rank."""

    producer: Action
    consumer: Action
    source: int
    target: int


Place = Callable[[Message, int], int]  # a message, the last place of its receive's post by number -> the place, in its order


def communicate(course: Course, stages: Sequence[Stage], shared: Collection[int] = ()) -> tuple[tuple[Instr, ...], ...]:
    """Instructions of every rank: post, recv, compute, loss, send, sent. BW becomes B, then W; empty functions vanish.

    shared: ranks that exchange gradients of shared parameters as soon as these are complete, before they wait for any state.
    """
    orders = expanded_orders(course, stages)
    writer = writer_for(course, stages, orders, lambda _, head: head, shared=shared)
    return tuple(tuple(i for part in writer.instructions(r, order) for i in part) for r, order in enumerate(orders))


def expanded_orders(course: Course, stages: Sequence[Stage]) -> list[list[Action]]:
    """What each rank does, in order, as the stages have it: BW as B and W where they are two functions, W in its parts."""
    return [[part for span in rank for part in expand(span.action, stages)] for rank in course.timeline.spans]


def writer_for(
    course: Course,
    stages: Sequence[Stage],
    orders: Sequence[Sequence[Action]],
    place: Place,
    late: Mapping[int, Collection[int]] | None = None,
    shared: Collection[int] = (),
) -> Writer:
    """Messages and posts of a course; late, shared: see Writer."""
    messages = _messages(course, stages, orders)
    posts = _place_posts(orders, messages, _numbers(course, stages), place)
    early = {a for order, n in zip(orders, course.repeated, strict=False) for a in order[:n]}
    return Writer(course.schedule, stages, messages, posts, early, bool(course.repeated), late, shared)


def validation(instrs: Sequence[Instr]) -> tuple[Instr, ...]:
    """The instructions by which a rank learns the state of all after its last step: what completes a run."""
    return tuple(replace(i, when="") for i in instrs if i.when == "cautious")


def expand(action: Action, stages: Sequence[Stage]) -> tuple[Action, ...]:
    """What a rank does for an action of a course."""
    return (action,) if action.kind in ONCE else expanded(action, stages[action.stage])


def _numbers(course: Course, stages: Sequence[Stage]) -> dict[Action, int]:
    """Every action's place in one order: by simulated start, ties by a dependency-respecting walk."""
    waiting = [list(rank) for rank in course.timeline.spans]
    heads = [0] * len(waiting)
    done: set[Action] = set()
    number: dict[Action, int] = {}
    last = course.schedule.num_stages - 1
    feeder = {c: p for p, consumers in course.feeds.items() for c in consumers}

    def ready(a: Action) -> bool:
        before = feeder.get(a) if a.kind in ONCE else _feeder(a, last)
        return before is None or before in done

    while any(h < len(rank) for rank, h in zip(waiting, heads, strict=True)):
        heads_now = [(rank[h], r) for r, (rank, h) in enumerate(zip(waiting, heads, strict=True)) if h < len(rank)]
        span, r = min((s for s in heads_now if ready(s[0].action)), key=lambda s: (s[0].start, s[1]))
        heads[r] += 1
        for part in expand(span.action, stages):
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


def _messages(course: Course, stages: Sequence[Stage], orders: Sequence[Sequence[Action]]) -> list[Message]:
    found, home = [], course.schedule.placement
    for rank, order in enumerate(orders):
        for a in order:
            consumer = None if a.kind in ONCE else _consumer(a, stages)
            if consumer is not None and home[consumer.stage] != rank:
                found.append(Message(a, consumer, rank, home[consumer.stage]))
            found += [Message(a, c, rank, c.stage) for c in course.feeds.get(a, ())]
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
    orders: Sequence[Sequence[Action]],
    messages: Sequence[Message],
    number: dict[Action, int],
    place: Place,
) -> dict[Action, list[Message]]:
    """Receiver's action -> the messages posted right before it, in the order in which they are sent."""
    posts: dict[Action, list[Message]] = {}
    heads = [0] * len(orders)
    for message in sorted(messages, key=lambda m: number[m.producer]):
        order, head = orders[message.target], heads[message.target]
        while head + 1 < len(order) and number[order[head + 1]] <= number[message.producer]:
            head += 1
        heads[message.target] = head
        posts.setdefault(order[place(message, head)], []).append(message)
    return posts


class Writer:
    """Writes each rank's instructions. early: the forwards that run again where a validation finds wrong weights. late, in a
    stream: per rank, the places in its order before which it awaits what it has sent once a step. shared: see communicate."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[Stage],
        messages: Sequence[Message],
        posts: Mapping[Action, Sequence[Message]],
        early: set[Action],
        validates: bool,
        late: Mapping[int, Collection[int]] | None = None,
        shared: Collection[int] = (),
    ) -> None:
        self.schedule, self.stages, self.posts, self.early, self.validates = schedule, stages, posts, early, validates
        self.messages, self.late, self.shared = messages, late, shared
        self.into = {m.consumer: m for m in messages}
        self.out: dict[Action, list[Message]] = {}
        for m in messages:
            self.out.setdefault(m.producer, []).append(m)

    def instructions(self, rank: int, order: Sequence[Action]) -> list[list[Instr]]:
        """For each of the rank's actions, and for the end, the instructions: each send is awaited one action later."""
        validation = self.into.get(Action(rank, "V", 0)) if self.validates else None
        parts: list[list[Instr]] = []
        if validation is not None:
            parts.append([Instr("post", validation.consumer, peer=validation.source, when="ahead")])
        leaving: list[Instr] = []
        awaited: list[Instr] = []
        for index, a in enumerate(order):
            instrs: list[Instr] = []
            parts.append(instrs)
            if awaited and self.late is not None and index in self.late[rank]:
                parts[-2] += awaited
                awaited = []
            if a.kind == "V" and self.validates:
                before = [i for part in parts for i in part]
                instrs += [*self._validated(a, "ahead"), *repeat(before, self._drained(rank, before)), *self._posts(a)]
                continue
            if a.kind == "U" and self.validates:
                instrs += self._validated(Action(rank, "V", 0), "cautious")
            instrs += self._posts(a)
            if a.kind == "S" and rank in self.shared:
                instrs.append(Instr("collect", a))
            wanted = _as_consumer(a)
            if wanted in self.into and a.kind != "W":
                instrs.append(Instr("recv", wanted, writes=(_received(a),), peer=self.into[wanted].source))
            computed = [self._once(a)] if a.kind in ONCE else _compute(rank, a, self.stages, self.schedule)
            instrs += computed
            if computed:
                instrs += leaving
                leaving = []
            for m in self.out.get(a, ()):
                instrs.append(Instr("send", m.consumer, reads=_sent(a), peer=m.target))
                once = self.late is not None and a.kind in ONCE
                (awaited if once else leaving).append(Instr("sent", m.consumer, peer=m.target))
        return [*parts, [*leaving, *awaited]]

    def _posts(self, a: Action) -> list[Instr]:
        """The receives that stand ready before an action; that of a later validation stands ready from the step's start on."""
        return [
            Instr("post", m.consumer, peer=m.source)
            for m in self.posts.get(a, ())
            if not (self.validates and m.consumer.kind == "V")
        ]

    def _once(self, a: Action) -> Instr:
        """What a rank does once a step: it takes what it has received, if it has."""
        verb: Verb = _VERBS[a.kind]
        return Instr(verb, a, (_received(a),) if a in self.into else ())

    def _validated(self, a: Action, when: When) -> list[Instr]:
        """Receive the state of all, if another rank has it first, learn it, and pass it on."""
        source = self.into.get(a)
        block = []
        if source is not None and when == "cautious":
            block.append(Instr("post", a, peer=source.source))
        if source is not None:
            block.append(Instr("recv", a, writes=(_received(a),), peer=source.source))
        block.append(self._once(a))
        for m in self.out.get(a, ()):
            block += [Instr("send", m.consumer, peer=m.target), Instr("sent", m.consumer, peer=m.target)]
        return [replace(i, when=when) for i in block]

    def _drained(self, rank: int, before: Sequence[Instr]) -> list[Instr]:
        """What other ranks' early forwards have sent and this rank's have not received: taken and thrown away."""
        done = {(i.verb, i.action) for i in before}
        left = [m for m in self.messages if m.target == rank and m.producer in self.early and ("recv", m.consumer) not in done]
        posts = [Instr("post", m.consumer, peer=m.source) for m in left if ("post", m.consumer) not in done]
        taken: list[Instr] = []
        for m in left:
            name = _received(m.consumer)
            taken += [Instr("recv", m.consumer, writes=(name,), peer=m.source), Instr("drop", m.consumer, (name,))]
        return [*posts, *taken]


def repeat(before: Sequence[Instr], drained: Sequence[Instr]) -> list[Instr]:
    """The instructions so far, again: first their results are thrown away, and what is under way is brought to its end."""
    once = [i for i in before if not i.when]
    alive = {name: i.action for i in once for name in i.writes}
    for i in once:
        for name in i.reads:
            del alive[name]
    posted = {i.action for i in once if i.verb == "post"} - {i.action for i in [*once, *drained] if i.verb == "recv"}
    done = {i.action for i in once if i.verb == "sent"}
    drops = [Instr("drop", a, (name,)) for name, a in alive.items()]
    ends = [Instr("sent", i.action, peer=i.peer) for i in once if i.verb == "send" and i.action not in done]
    again = [i for i in once if not (i.verb == "post" and i.action in posted)]
    return [replace(i, when="wrong") for i in [*drops, *drained, *ends, *again]]


def _received(a: Action) -> str:
    """The buffer of what an action receives."""
    if a.part is not None:  # what one of several ranks that share parameters sends
        return _name(f"t{a.part}", a.stage, a.mb)
    return _name({"F": "x", "L": "l", "S": "u", "V": "v"}.get(a.kind, "gy"), a.stage, a.mb)


def _sent(a: Action) -> tuple[str, ...]:
    """The buffer of what an action sends; the loss and the state are the rank's own."""
    return () if a.kind in ONCE else (_name("y" if a.kind == "F" else "gx", a.stage, a.mb),)


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
