"""Random valid schedules: any placement, any interleaving that could have run."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from zbfx.ir import Action, Kind, Schedule
from zbfx.verify import dependencies, verify_schedule


@st.composite
def random_schedules(draw: st.DrawFn, num_stages: int, ranks: int, max_microbatches: int = 4, *, max_parts: int = 1) -> Schedule:
    """Actions are appended to their ranks in an order in which they could run one after another: no deadlock by construction.

    max_parts: of a W, drawn for each stage.
    """
    placement = [*range(ranks), *[draw(st.integers(0, ranks - 1)) for _ in range(num_stages - ranks)]]
    placement = list(draw(st.permutations(placement)))
    m = draw(st.integers(1, max_microbatches))
    fused = draw(st.booleans())
    parts = [draw(st.integers(1, max_parts)) if max_parts > 1 else 1 for _ in range(num_stages)]
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[tuple[int, str, int]] = set()
    kinds: tuple[Kind, ...] = ("F", "BW") if fused else ("F", "B", "W")
    waiting = [Action(s, k, 0, 0 if k == "W" and parts[s] > 1 else None) for s in range(num_stages) for k in kinds]
    while waiting:
        ready = [a for a in waiting if all(d in done for d in dependencies(a, num_stages - 1))]
        action = draw(st.sampled_from(ready))
        waiting.remove(action)
        stage, mb, part = action.stage, action.mb, action.part
        if part is not None and part + 1 < parts[stage]:
            waiting.append(replace(action, part=part + 1))
        elif mb + 1 < m:
            waiting.append(replace(action, mb=mb + 1, part=None if part is None else 0))
        orders[placement[stage]].append(action)
        done |= {(stage, letter, mb) for letter in action.kind}
    return verify_schedule(Schedule(tuple(placement), tuple(map(tuple, orders)), "random"))


def in_parts(schedule: Schedule, parts: int) -> Schedule:
    """The same order, every W as its parts, one right after the other."""

    def expand(a: Action) -> list[Action]:
        return [replace(a, part=i) for i in range(parts)] if a.kind == "W" else [a]

    return Schedule(schedule.placement, tuple(tuple(b for a in rank for b in expand(a)) for rank in schedule.ranks), "parts")
