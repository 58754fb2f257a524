"""W in parts: a stage's W divided by groups of gradients, so that a schedule can fill small gaps with some of it (`0W3.1`).

B: p, c, s, gy -> gx, k           W: p, c, k -> gp       to
B: p, c, s, gy -> gx, k0, k1      W_0: p, c, k -> gp of part 0      W_1: p, c, k -> gp of part 1

Gradients that share a computed value stay in one part, so that no operator runs twice; views, which compute nothing, are taken
again. What two parts need is in both lists, and its storage lives until the last of them is done. Where there was no B
(no input needs a gradient), the new one computes nothing: it deals out what is saved. A stage whose gradients all share work
stays as it is: its W runs as part 0, so that it never holds a byte for longer than its parts would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import fx

from zbfx.ir import Action, Fn, Part, Schedule, Stage
from zbfx.passes.balance import best_cuts
from zbfx.passes.split_backward import ancestors, function, root_of

Seconds = Callable[[fx.Node], float]


def with_w_parts(stages: Sequence[Stage], schedule: Schedule, seconds: Seconds) -> tuple[Stage, ...]:
    """The stages as the schedule runs them: those whose W it has in parts get B and parts in place of B and W."""
    count: dict[int, int] = {}
    for a in (a for rank in schedule.ranks for a in rank if a.part is not None):
        count[a.stage] = max(count.get(a.stage, 1), 1 + (a.part or 0))
    return tuple(divide_w(s, count.get(s.index, 1), seconds) for s in stages)


def divide_w(stage: Stage, parts: int, seconds: Seconds) -> Stage:
    """A stage with its W in `parts` parts of about the same estimated seconds, in the order of its parameters; the last ones are
    empty where there are fewer groups of gradients. seconds(node): of one operator.
    """
    if stage.W is None or parts == 1:
        return stage
    groups = _groups(stage.W, seconds)
    if len(groups) == 1:
        return stage
    divided = _divided(groups, parts)
    places = {n.name: n for n in stage.W.graph.nodes if n.op == "placeholder"}
    given = {g: [places[n] for n in names] for g, names in stage.W.takes.items()}
    fixed = {g: given.pop(g) for g in ("p", "c")}
    dynamic = [n for group in given.values() for n in group]  # k, or without a B s and gy
    made = [_part(stage.W, gradients, fixed, dynamic) for gradients in divided]
    keeps = [[] if part.W is None else [places[n] for n in part.W.takes["k"]] for part in made]
    return replace(stage, B=_dealing(stage.W, stage.B, dynamic, keeps), W=None, parts=tuple(made))


def expanded(action: Action, stage: Stage) -> tuple[Action, ...]:
    """What a rank does for an action: BW is B, then W, and a whole W is all its parts, where the stage has them so."""
    if action.kind == "BW" and stage.BW is None:
        return Action(action.stage, "B", action.mb), *expanded(Action(action.stage, "W", action.mb), stage)
    if action.kind == "W" and action.part is None and stage.parts:
        return tuple(replace(action, part=i) for i in range(len(stage.parts)))
    return (action,)


def _groups(w: Fn, seconds: Seconds) -> list[tuple[list[int], float]]:
    """(positions of gradients that share a computed value, seconds of all they need), in the order of the parameters."""
    leader: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while leader.setdefault(node, node) is not node:
            node = leader[node]
        return node

    computed = [n for n in w.graph.nodes if n.op == "call_function" and root_of(n) is n]
    for node in computed:
        for used in map(root_of, node.all_input_nodes):
            if used.op == "call_function":
                leader[find(node)] = find(used)
    work: dict[fx.Node, float] = {}
    for node in computed:
        work[find(node)] = work.get(find(node), 0.0) + seconds(node)
    found: dict[fx.Node, list[int]] = {}
    for i, output in enumerate(w.outputs):
        found.setdefault(find(root_of(output)), []).append(i)
    return [(gradients, work.get(first, 0.0)) for first, gradients in found.items()]


def _divided(groups: Sequence[tuple[list[int], float]], parts: int) -> list[list[int]]:
    """The gradients of each part: consecutive groups, the slowest part as fast as can be."""
    n = len(groups)
    cuts = best_cuts([s for _, s in groups], [0.0] * (n + 1), [True] * (n + 1), min(parts, n))
    runs = [sorted(i for gradients, _ in groups[a:b] for i in gradients) for a, b in pairwise((0, *cuts, n))]
    return runs + [[] for _ in range(parts - len(runs))]


def _part(w: Fn, gradients: list[int], fixed: dict[str, list[fx.Node]], dynamic: Sequence[fx.Node]) -> Part:
    """The function that gives these gradients, from what it needs of W's inputs."""
    if not gradients:
        return Part(None, ())
    results = [w.outputs[i] for i in gradients]
    needed = ancestors(results)
    takes = {**fixed, "k": [n for n in dynamic if n in needed]}
    return Part(function(w.graph, set(), takes, {"gp": results}), tuple(gradients))


def _dealing(w: Fn, b: Fn | None, dynamic: Sequence[fx.Node], keeps: Sequence[Sequence[fx.Node]]) -> Fn:
    """B that keeps a list for every part. dynamic: W's inputs, which keeps are chosen from; without a B, they are B's own."""
    source, count = (w, 0) if b is None else (b, b.gives["gx"])
    kept = dict(zip(dynamic, dynamic if b is None else b.outputs[count:], strict=True))
    places = {n.name: n for n in source.graph.nodes if n.op == "placeholder"}
    takes = {g: [places[n] for n in names] for g, names in source.takes.items()}
    gives = {f"k{i}": [kept[n] for n in keep] for i, keep in enumerate(keeps)}
    return function(source.graph, set(), takes, {"gx": list(source.outputs[:count]), **gives})
