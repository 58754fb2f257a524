"""torch.distributed.pipelining as an oracle: its own runtime loads our CSV, and its simulation of the messages ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _add_send_recv, _PipelineScheduleRuntime, _simulate_comms_compute
from torch.testing._internal.distributed.fake_pg import FakeStore

from zbfx.ir import Cost, CostModel, Schedule
from zbfx.passes.order_chunks import CHUNKED
from zbfx.passes.order_fixed import FIXED, order_fixed
from zbfx.passes.order_search import order_auto
from zbfx.passes.placements import build_placement
from zbfx.text import schedule_from_csv, schedule_to_csv

P, M = 4, 8


@pytest.fixture(scope="module", autouse=True)
def four_fake_ranks() -> Iterator[None]:
    if dist.is_initialized():
        pytest.skip("another test of this process holds the default process group")
    dist.init_process_group("fake", rank=0, world_size=P, store=FakeStore())
    yield
    dist.destroy_process_group()


def load(schedule: Schedule, folder: Path) -> _PipelineScheduleRuntime:
    """What torch makes of the CSV, on rank 0 with its real stages."""
    file = folder / "schedule.csv"
    file.write_text(schedule_to_csv(schedule))
    own = [s for s, home in enumerate(schedule.placement) if home == 0]
    stages = [PipelineStage(torch.nn.Linear(2, 2), s, schedule.num_stages, torch.device("cpu")) for s in own]
    runtime = _PipelineScheduleRuntime(stages, n_microbatches=schedule.microbatches)
    runtime._load_csv(str(file))
    return runtime


def check(schedule: Schedule, folder: Path) -> None:
    runtime = load(schedule, folder)
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    actions = {r: [str(a) for a in order if a is not None] for r, order in runtime.pipeline_order.items()}
    assert actions == {r: line.split(",") for r, line in enumerate(schedule_to_csv(schedule).splitlines())}
    orders = {r: [a for a in order if a is not None] for r, order in runtime.pipeline_order.items()}
    with_messages = _add_send_recv(orders, schedule.placement.__getitem__, schedule.num_stages)
    # Both raise where torch's sends and receives would wait for one another for ever.
    _simulate_comms_compute(with_messages, schedule.placement.__getitem__, schedule.num_stages)


@pytest.mark.parametrize("name", FIXED)
def test_fixed_schedules(name: str, tmp_path: Path) -> None:
    kind = CHUNKED[name][1] if name in CHUNKED else "linear"
    check(order_fixed(name, build_placement(kind, P), M), tmp_path)


@pytest.mark.parametrize("place", ["linear", "v", "zigzag", "interleaved"])
def test_searched_schedules(place: str, tmp_path: Path) -> None:
    placement = build_placement(place, P)
    costs = CostModel((Cost(1, 1, 0.7, 10, -6, -4),) * len(placement), ((0.1,) * P,) * P, (10 * len(placement),) * P)
    schedule = order_auto(placement, M, costs, w_parts=2, seconds=0.02).schedule
    assert "W0.1" in " ".join(map(str, schedule.ranks[0]))
    check(schedule, tmp_path)


def test_torch_s_own_csv_is_read(tmp_path: Path) -> None:
    runtime = load(order_fixed("interleaved-zb", build_placement("interleaved", P), M), tmp_path)
    file = tmp_path / "torch.csv"
    runtime._dump_csv(str(file), format="compute_only")
    assert schedule_from_csv(file.read_text()) == order_fixed("interleaved-zb", build_placement("interleaved", P), M)
