"""Random valid schedules: any placement, any interleaving that could have run."""

from __future__ import annotations

from hypothesis import strategies as st

from zbfx.ir import Action, Schedule
from zbfx.verify import dependencies, verify_schedule


@st.composite
def random_schedules(draw: st.DrawFn, num_stages: int, ranks: int, max_microbatches: int = 4) -> Schedule:
    """Actions are appended to their ranks in an order in which they could run one after another: no deadlock by construction."""
    placement = [*range(ranks), *[draw(st.integers(0, ranks - 1)) for _ in range(num_stages - ranks)]]
    placement = list(draw(st.permutations(placement)))
    m = draw(st.integers(1, max_microbatches))
    fused = draw(st.booleans())
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[tuple[int, str, int]] = set()
    waiting = [(s, k, 0) for s in range(num_stages) for k in (("F", "BW") if fused else ("F", "B", "W"))]
    while waiting:
        ready = [a for a in waiting if all(d in done for d in dependencies(Action(*a), num_stages - 1))]  # type: ignore[arg-type]
        stage, kind, mb = draw(st.sampled_from(ready))
        waiting.remove((stage, kind, mb))
        if mb + 1 < m:
            waiting.append((stage, kind, mb + 1))
        orders[placement[stage]].append(Action(stage, kind, mb))  # type: ignore[arg-type]
        done |= {(stage, letter, mb) for letter in kind}
    return verify_schedule(Schedule(tuple(placement), tuple(map(tuple, orders)), "random"))
