"""Sends and receives in programs: none is missing, none can deadlock, whatever the schedule; broken programs are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.passes.graphs import captured_of, cut, split
from tests.passes.schedules import random_schedules
from zbfx.errors import MemoryBudgetError, VerifyError
from zbfx.ir import Cost, CostModel, Instr, Program, Schedule, Stage
from zbfx.passes.allocate import allocate, refuse_over_limit
from zbfx.passes.communicate import communicate
from zbfx.passes.course import bare
from zbfx.passes.order_fixed import block_placement, order_fixed
from zbfx.passes.simulate import simulate
from zbfx.verify_program import verify_programs


@cache
def stages_of(num_stages: int, *, frozen: int = 0) -> tuple[Stage, ...]:
    """Equal linear stages; the first `frozen` have no parameter to train, so their B and W are empty."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(num_stages)]
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    captured = captured_of(nn.Sequential(*layers), torch.randn(2, 4), loss=lambda out, _: out.sum())
    forwards = cut(captured, num_stages, pins=[str(i) for i in range(1, num_stages)])
    return tuple(stage for _, stage in split(captured, forwards))


def costs_for(schedule: Schedule, seconds: Sequence[float] = (1.0, 1.0, 1.0), hop: float = 0.1) -> CostModel:
    ranks = len(schedule.ranks)
    comm = tuple(tuple(0.0 if a == b else hop for b in range(ranks)) for a in range(ranks))
    return CostModel((Cost(*seconds),) * schedule.num_stages, comm, (None,) * ranks)


def programs_for(schedule: Schedule, stages: Sequence[Stage], costs: CostModel | None = None) -> tuple[Program, ...]:
    instrs = communicate(bare(schedule, simulate(schedule, costs or costs_for(schedule))), stages)
    profiles: dict[int, Any] = {}
    return tuple(allocate(r, i, stages, profiles) for r, i in enumerate(instrs))


def run_with_rendezvous(programs: Sequence[Program]) -> bool:
    """Runs the programs with the strictest channel: a send returns only when its receive is posted, a recv when its message
    was sent. True if all come to their end. Nothing of zbfx's own check is used.
    """
    heads, done = [0] * len(programs), set[tuple[str, str]]()
    needs: dict[str, str] = {"send": "post", "recv": "send", "sent": "send"}
    moved = True
    while moved:
        moved = False
        for r, program in enumerate(programs):
            while heads[r] < len(program.instrs):
                instr = program.instrs[heads[r]]
                if instr.verb in needs and (needs[instr.verb], str(instr.action)) not in done:
                    break
                done.add((instr.verb, str(instr.action)))
                heads[r] += 1
                moved = True
    return all(h == len(p.instrs) for h, p in zip(heads, programs, strict=True))


@settings(max_examples=40)
@given(st.data())
def test_any_schedule_gives_programs_that_cannot_deadlock(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, 6))
    schedule = data.draw(random_schedules(num_stages, data.draw(st.integers(1, min(4, num_stages)))))
    stages = stages_of(num_stages, frozen=data.draw(st.integers(0, num_stages - 1)))
    seconds = [data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])) for _ in range(3)]
    programs = programs_for(schedule, stages, costs_for(schedule, seconds, data.draw(st.sampled_from([0.0, 0.1, 5.0]))))
    verify_programs(programs)
    assert run_with_rendezvous(programs)
    for r, program in enumerate(programs):
        _check_computes(schedule, stages, r, program)
        assert program.held[-1:] in ((), (0,)) and program.peak >= max(program.held, default=0)


def _check_computes(schedule: Schedule, stages: Sequence[Stage], rank: int, program: Program) -> None:
    """A rank computes its schedule's actions in order, but for those that are empty; BW as B, then W."""
    wanted = [f"{a.stage}{letter}{a.mb}" for a in schedule.ranks[rank] for letter in a.kind]
    real = [w for w in wanted if getattr(stages[int(w[0])], w[1]) is not None]
    assert [str(i.action) for i in program.instrs if i.verb == "compute"] == real


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_receives_are_posted_before_the_work_that_hides_them(name: str) -> None:
    """A receive stands before an earlier compute of its rank than the one it feeds, wherever there is one to hide behind."""
    programs = programs_for(order_fixed(name, (0, 1, 2), 6), stages_of(3))
    for program in programs[1:]:
        at = {(i.verb, str(i.action)): n for n, i in enumerate(program.instrs)}
        early = 0
        for (verb, action), n in at.items():
            if verb == "post":
                between = [i for i in program.instrs[n : at["recv", action]] if i.verb == "compute"]
                early += bool(between)
        assert early >= 4


def test_a_send_is_waited_for_one_action_later() -> None:
    programs = programs_for(order_fixed("gpipe", (0, 1), 3), stages_of(2))
    verbs = [(i.verb, str(i.action)) for i in programs[0].instrs]
    assert verbs.index(("sent", "1F0")) == verbs.index(("compute", "0F1")) + 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_text_of_the_programs(name: str, golden: Callable[..., None]) -> None:
    programs = programs_for(order_fixed(name, (0, 1), 3), stages_of(2))
    lines = []
    for program in programs:
        lines.append(f"rank {program.rank}: peak {program.peak}")
        for instr, held in zip(program.instrs, program.held, strict=True):
            peer = "" if instr.peer is None else f" rank {instr.peer}"
            lines.append(
                f"  {instr.verb} {instr.action}{peer}: {', '.join(instr.reads)} -> {', '.join(instr.writes)}; holds {held}"
            )
    golden("\n".join(lines))


# ---------------------------------------------------------------- the verifier refuses


@pytest.fixture
def programs() -> tuple[Program, ...]:
    return programs_for(order_fixed("1f1b", block_placement(3, 3), 3), stages_of(3))


def edited(programs: Sequence[Program], rank: int, change: Callable[[list[Instr]], None]) -> list[Program]:
    instrs = list(programs[rank].instrs)
    change(instrs)
    return [replace(p, instrs=tuple(instrs)) if p.rank == rank else p for p in programs]


def place(instrs: Sequence[Instr], verb: str, action: str) -> int:
    return next(n for n, i in enumerate(instrs) if i.verb == verb and str(i.action) == action)


def test_refuses_a_message_without_its_other_end(programs: tuple[Program, ...]) -> None:
    for verb, action, rank in [("post", "1F0", 1), ("send", "1F1", 0), ("sent", "1F2", 0)]:
        broken = edited(programs, rank, lambda i, v=verb, a=action: i.pop(place(i, v, a)))  # type: ignore[misc]
        with pytest.raises(VerifyError, match=f"message {action} has no {verb}|never freed"):
            verify_programs(broken)


def test_refuses_a_buffer_read_before_it_exists_and_shows_where(programs: tuple[Program, ...]) -> None:
    broken = edited(programs, 1, lambda i: i.insert(0, i.pop(place(i, "compute", "1F0"))))
    with pytest.raises(VerifyError, match="buffer x_1_0 is read where it does not exist") as e:
        verify_programs(broken)
    assert "--> rank 1 [0] compute 1F0 reads x_1_0" in str(e.value) and len(str(e.value).splitlines()) <= 11


def test_refuses_a_buffer_overwritten_while_alive(programs: tuple[Program, ...]) -> None:
    def change(instrs: list[Instr]) -> None:
        n = place(instrs, "compute", "0F1")
        instrs[n] = replace(instrs[n], writes=tuple(w.replace("_1", "_0") for w in instrs[n].writes))

    with pytest.raises(VerifyError, match=r"is overwritten while alive\n(.|\n)*-->.*compute 0F1"):
        verify_programs(edited(programs, 0, change))


def test_refuses_a_buffer_that_is_never_freed(programs: tuple[Program, ...]) -> None:
    def change(instrs: list[Instr]) -> None:
        del instrs[place(instrs, "compute", "0W2")]

    with pytest.raises(VerifyError, match=r"rank 0: buffers \['gy_0_2'?.*'s_0_2'\] are never freed|rank 0: buffers .*s_0_2"):
        verify_programs(edited(programs, 0, change))


def test_refuses_a_message_sent_twice(programs: tuple[Program, ...]) -> None:
    def change(instrs: list[Instr]) -> None:
        n = place(instrs, "send", "1F0")
        instrs.insert(n + 1, replace(instrs[n], reads=()))

    with pytest.raises(VerifyError, match="send of 1F0 comes twice"):
        verify_programs(edited(programs, 0, change))


def test_refuses_another_order_of_sends_than_of_posts(programs: tuple[Program, ...]) -> None:
    def change(instrs: list[Instr]) -> None:
        a, b = place(instrs, "post", "1F0"), place(instrs, "post", "1F1")
        instrs[a], instrs[b] = instrs[b], instrs[a]

    with pytest.raises(VerifyError, match="rank 0 sends to 1 in the order"):
        verify_programs(edited(programs, 1, change))


def test_refuses_a_deadlock_and_names_the_circle(programs: tuple[Program, ...]) -> None:
    """Rank 0 posts what rank 1 sends only after it has waited for something that rank 1 does later."""

    def change(instrs: list[Instr]) -> None:
        post = instrs.pop(place(instrs, "post", "0B0"))
        instrs.insert(place(instrs, "recv", "0B0"), post)

    late = edited(programs, 0, change)
    verify_programs(late)  # late, but sound: the receive is still posted before it is waited for

    def send_last(instrs: list[Instr]) -> None:
        for verb in ("send", "sent"):
            instrs.append(instrs.pop(place(instrs, verb, "1F2")))

    sends_first = edited(late, 0, send_last)
    with pytest.raises(VerifyError, match=r"the programs deadlock: each of these waits for the next\nrank (.|\n)*rank") as e:
        verify_programs(sends_first)
    assert not run_with_rendezvous(sends_first)
    assert "1F2" in str(e.value)


def test_refuses_a_wait_before_its_beginning(programs: tuple[Program, ...]) -> None:
    for end, begin, action, rank in [("sent", "send", "1F0", 0), ("recv", "post", "1F1", 1)]:
        broken = edited(programs, rank, lambda i, e=end, b=begin, a=action: i.insert(place(i, b, a), i.pop(place(i, e, a))))  # type: ignore[misc]
        with pytest.raises(VerifyError, match=f"{end} of {action} needs its {begin} before it(.|\n)*-->.*{end} {action}"):
            verify_programs(broken)


@settings(max_examples=60)
@given(st.data())
def test_the_verifier_agrees_with_running(data: st.DataObject) -> None:
    """Programs with one instruction moved: what the verifier accepts runs to its end."""
    schedule = data.draw(random_schedules(3, data.draw(st.integers(2, 3)), 3))
    programs = programs_for(schedule, stages_of(3))
    rank = data.draw(st.integers(0, len(programs) - 1))
    size = len(programs[rank].instrs)
    source, target = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    moved = edited(programs, rank, lambda i: i.insert(target, i.pop(source)))
    try:
        verify_programs(moved)
    except VerifyError as error:
        assert "rank" in str(error)
        return
    assert run_with_rendezvous(moved)


def test_a_budget_that_is_exceeded_names_rank_action_and_bytes(programs: tuple[Program, ...]) -> None:
    refuse_over_limit(programs, [p.peak for p in programs])
    peak = programs[1].peak
    message = rf"rank 1 needs {peak} bytes .* held around 1[FBW]\d\), 1 over its limit of {peak - 1}"
    with pytest.raises(MemoryBudgetError, match=message):
        refuse_over_limit(programs, [None, peak - 1, None])
