"""Verifier of schedules: complete, on the right ranks, in order, free of deadlock. Errors show the rank's actions with an arrow.

The rules (design, invariants 1 and 3): per stage and microbatch one F, and either one BW or one B and one W (whole, or in
parts 0..k-1, the same k for every microbatch of a stage); each action on the rank of its stage; per stage F, B and W each in
microbatch order; F before B before W; and the ranks together can run to the end when a rank does nothing but its next action.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from zbfx.errors import ScheduleError
from zbfx.ir import Action, Schedule

_AROUND = 5  # actions shown before and after the fault


def verify_schedule(schedule: Schedule) -> Schedule:
    """Returns the schedule itself when every rule holds; raises ScheduleError naming rule, place and the actions around."""
    _check_placement(schedule)
    for rank, actions in enumerate(schedule.ranks):
        _check_homes(schedule, rank, actions)
        _check_order(schedule, rank, actions)
    _check_complete(schedule)
    _check_deadlock(schedule)
    return schedule


def show_around(schedule: Schedule, rank: int, index: int) -> str:
    """The actions of `rank` around `index`, one a line, with an arrow at the fault."""
    actions = schedule.ranks[rank]
    lines = [f"rank {rank}, actions {max(0, index - _AROUND)} to {min(len(actions), index + _AROUND + 1) - 1} of {len(actions)}:"]
    for i in range(max(0, index - _AROUND), min(len(actions), index + _AROUND + 1)):
        lines.append(f"  {'-->' if i == index else '   '} [{i}] {actions[i]}")
    if index >= len(actions):
        lines.append("  --> end")
    return "\n".join(lines)


def dependencies(action: Action, last_stage: int) -> Iterator[tuple[int, str, int]]:
    """(stage, "F" or "B", microbatch) that must have ended before the action starts; BW counts as B."""
    stage, kind, mb = action.stage, action.kind, action.mb
    if kind == "F":
        if stage > 0:
            yield stage - 1, "F", mb
    elif kind == "W":
        yield stage, "B", mb
    else:
        yield stage, "F", mb
        if stage < last_stage:
            yield stage + 1, "B", mb


def _fail(schedule: Schedule, rank: int, index: int, rule: str) -> ScheduleError:
    return ScheduleError(f"{rule}\n{show_around(schedule, rank, index)}")


def _check_placement(schedule: Schedule) -> None:
    if not schedule.placement or not schedule.ranks:
        raise ScheduleError(f"{schedule.placement=}: a schedule needs at least one stage and one rank")
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < len(schedule.ranks):
            raise ScheduleError(f"placement[{stage}] = {rank}, but the ranks are 0 to {len(schedule.ranks) - 1}")


def _check_homes(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    for i, action in enumerate(actions):
        if not 0 <= action.stage < schedule.num_stages:
            raise _fail(schedule, rank, i, f"{action}: there are {schedule.num_stages} stages, 0 to {schedule.num_stages - 1}")
        home = schedule.placement[action.stage]
        if home != rank:
            raise _fail(schedule, rank, i, f"{action} on rank {rank}, but placement puts stage {action.stage} on rank {home}")


def _check_order(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    """Microbatch order of each kind, and F before B before W; W's parts in order within a microbatch."""
    done: Counter[tuple[int, str]] = Counter()  # how many microbatches have ended, per (stage, F | B | W)
    part: Counter[int] = Counter()  # parts of the current W that have ended, per stage
    parts = {(a.stage, a.mb): 1 + (a.part or 0) for a in actions if a.kind == "W"}
    _check_parts(schedule, rank, actions)
    for i, action in enumerate(actions):
        stage = action.stage
        for kind in action.kind:
            if action.mb != done[stage, kind] or (kind == "W" and (action.part or 0) != part[stage]):
                expected = f"{stage}{kind}{done[stage, kind]}" + (f".{part[stage]}" if part[stage] or action.part else "")
                rule = f"{action}: {kind} of stage {stage} must run in microbatch order; next is {expected}"
                raise _fail(schedule, rank, i, rule)
            before = {"F": "", "B": "F", "W": "B"}[kind]
            if before and len(action.kind) == 1 and done[stage, before] <= action.mb:
                raise _fail(schedule, rank, i, f"{action} before {stage}{before}{action.mb}: F, then B, then W of a microbatch")
            if action.kind == "BW" and done[stage, "F"] <= action.mb:
                raise _fail(schedule, rank, i, f"{action} before {stage}F{action.mb}: F, then B, then W of a microbatch")
            if kind == "W":
                part[stage] += 1
                if action.kind == "W" and part[stage] < parts[stage, action.mb]:
                    continue
                part[stage] = 0
            done[stage, kind] += 1


def _check_parts(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    """A W in parts has as many for every microbatch of a stage; a whole one may stand among them."""
    last = {(a.stage, a.mb): i for i, a in enumerate(actions) if a.part is not None}
    most: dict[int, Action] = {}
    for i in last.values():
        most[actions[i].stage] = max(most.get(actions[i].stage, actions[i]), actions[i], key=lambda a: a.part or 0)
    for i in last.values():
        action, wanted = actions[i], most[actions[i].stage]
        if action.part != wanted.part:
            rule = f"{action} is the last part of its W, but stage {action.stage} has more: its {wanted} is a part as well"
            raise _fail(schedule, rank, i, rule)


def _check_complete(schedule: Schedule) -> None:
    """Every stage runs F, B and W of every microbatch: the order check leaves only a missing tail to look for."""
    count: Counter[tuple[int, str]] = Counter()
    m = schedule.microbatches
    for rank in schedule.ranks:
        for action in rank:
            for kind in action.kind:
                count[action.stage, kind] = max(count[action.stage, kind], action.mb + 1)
    for stage, rank_ in enumerate(schedule.placement):
        for kind in "FBW":
            if count[stage, kind] < m:
                missing = f"{stage}{kind}{count[stage, kind]}"
                rule = f"{missing} is missing: {m} microbatches need {kind} of each"
                raise _fail(schedule, rank_, len(schedule.ranks[rank_]), rule)


def _check_deadlock(schedule: Schedule) -> None:
    """Runs the order without times: each rank moves on while its next action's dependencies have ended."""
    last = schedule.num_stages - 1
    next_action = [0] * len(schedule.ranks)
    ended: set[tuple[int, str, int]] = set()
    waiting: dict[tuple[int, str, int], int] = {}  # dependency -> the rank that stopped at it
    ready = list(range(len(schedule.ranks)))
    while ready:
        rank = ready.pop()
        actions = schedule.ranks[rank]
        while next_action[rank] < len(actions):
            action = actions[next_action[rank]]
            missing = next((d for d in dependencies(action, last) if d not in ended), None)
            if missing is not None:
                waiting[missing] = rank
                break
            next_action[rank] += 1
            if action.kind != "W":
                key = (action.stage, action.kind[0], action.mb)
                ended.add(key)
                if key in waiting:
                    ready.append(waiting.pop(key))
    if waiting:
        raise _deadlock(schedule, next_action, waiting)


def _deadlock(schedule: Schedule, next_action: Sequence[int], waiting: dict[tuple[int, str, int], int]) -> ScheduleError:
    need = {rank: dependency for dependency, rank in waiting.items()}
    chain = [min(need)]
    while True:  # each stuck rank waits for a rank that is stuck too, so following the waits must close a circle
        following = schedule.placement[need[chain[-1]][0]]
        if following in chain:
            chain = chain[chain.index(following) :]
            break
        chain.append(following)
    waits = []
    for rank in chain:
        stage, kind, mb = need[rank]
        at = schedule.ranks[rank][next_action[rank]]
        waits.append(f"rank {rank} stands at {at} and waits for {stage}{kind}{mb} of rank {schedule.placement[stage]}")
    return _fail(schedule, chain[0], next_action[chain[0]], "deadlock: " + "; ".join(waits))
