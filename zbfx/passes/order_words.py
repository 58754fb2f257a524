"""Words without a plan: the closed patterns of V placements, warm-up and turns on linear ones, and those of a simpler world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random

from zbfx.passes.order_chunks import v_half, v_min, zb_v
from zbfx.passes.order_decode import Rules
from zbfx.passes.order_dispatch import dispatch
from zbfx.passes.order_problem import INF, Problem, Word


def build_words(problem: Problem, family: str, x: Sequence[float]) -> list[Word] | None:
    """The family's words for its numbers x; None where the simplified world gets stuck."""
    if family == "model":
        return _model_words(problem, x)
    return _warm_up_words(problem, x) if family == "1f1b" else _v_words(family, problem.num_ranks, problem.microbatches)


def sample_model(rng: Random) -> tuple[float, ...]:
    """Numbers of the model family: W's length, B's length, the pull of depth, a head start of B, fill, share of the memory."""
    return (
        rng.choice((0.4, 0.5, 0.6, 0.7, 0.8, 1.0)),
        rng.choice((1.0, 1.0, 1.0, 0.9, 1.1)),
        rng.choice((0.5, 0.5, 0.5, 0.2, 1.0)),
        rng.choice((0.0, 0.0, 2.0, 4.0)),
        rng.choice((0.05, 0.05, 0.3, 1.0)),
        rng.choice((1.0, 1.0, 1.0, 0.97, 0.94, 0.9)),
    )


def mutate_model(x: Sequence[float], rng: Random) -> tuple[float, ...]:
    """The model's numbers with some drawn anew or moved a little."""
    fresh = sample_model(rng)
    moved = [value + rng.gauss(0, 0.05) if rng.random() < 0.5 else new for value, new in zip(x, fresh, strict=True)]
    mixed = [new if rng.random() < 0.3 else value for value, new in zip(x, moved, strict=True)]
    return (max(0.05, mixed[0]), max(0.3, mixed[1]), *mixed[2:5], min(1.0, max(0.3, mixed[5])))


def _model_words(problem: Problem, x: Sequence[float]) -> list[Word] | None:
    w, b, depth, head_start, fill, share = x
    stages, nodes, m = problem.num_stages, len(problem.rank), problem.microbatches
    model = replace(
        problem,
        seconds=(1.0,) * stages + (b,) * stages,
        hop=(0.0,) * nodes,
        w_seconds=(w / problem.parts,) * stages,
        room=tuple(
            max(room * share, sum(problem.memory[v] for v in own if v < stages))
            for room, own in zip(problem.room, problem.nodes, strict=True)
        ),
    )
    period = max(model.work) / m
    shift = [-depth * v + (head_start * problem.num_ranks if v >= stages else 0.0) for v in range(nodes)]
    keys = [[s + period * mb for mb in range(m)] + [INF] for s in shift]
    found = dispatch(model, keys, Rules(fill=fill, fill_end=1.0), keep=True)
    if found.span == INF:
        return None
    return [[s if kind == 0 else 2 * stages - 1 - s for s, kind in word if kind < 2] for word in found.words]


_V_SHAPES = {"zb-v": zb_v, "v-half": v_half, "v-min": v_min}


@lru_cache(maxsize=16)
def _v_words(name: str, ranks: int, microbatches: int) -> list[Word]:
    """Kept, for the search asks again and again with other rules; callers must not change it."""
    stages = 2 * ranks
    built = _V_SHAPES[name](ranks, 2, microbatches)
    return [[a.stage if a.kind == "F" else 2 * stages - 1 - a.stage for a in rank if a.kind != "W"] for rank in built]


def _warm_up_words(problem: Problem, x: Sequence[float]) -> list[Word] | None:
    """The warm-up of a rank is x[0] * (ranks behind it) + x[1]; every rank holds one block of stages, which it runs as one."""
    m, stages, p = problem.microbatches, problem.num_stages, problem.num_ranks
    words = []
    for own in problem.nodes:
        f = [v for v in own if v < stages]
        b = [v for v in own if v >= stages]
        depth = len({problem.placement[s] for s in range(f[0])})
        held = sum(problem.memory[v] for v in f)
        room = problem.room[problem.placement[f[0]]]
        fit = m if held <= 0 or room == INF else int(room / held + 1e-9)
        warm = max(0, min(round(x[0] * (p - 1 - depth) + x[1]), fit - 1, m - 1))
        word = f * warm
        for mb in range(m):
            word += (f if warm + mb < m else []) + b
        words.append(word)
    return words
