"""The verbs schedule and simulate, run as a user would: what they print, the JSON they write and read, and their errors."""

import argparse
import io
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from zbfx.cli_schedule import add_verbs
from zbfx.errors import InputError, MemoryBudgetError, ScheduleError, ZbfxError
from zbfx.text import schedule_from_json, schedule_to_csv

PROBLEM = "--ranks 4 --microbatches 8 --times 10,10,6 --comm 0.5 --bytes 400,-240,-160"


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBFX_CACHE", "off")


def zbfx(command: str) -> str:
    parser = argparse.ArgumentParser()
    add_verbs(parser.add_subparsers(required=True))
    args = parser.parse_args(command.split())
    out = io.StringIO()
    assert args.run(args, Console(file=out, width=120)) == 0
    return out.getvalue()


def test_schedule_prints_and_writes(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    text = zbfx(f"schedule {PROBLEM} --limit 1.0p --placement v --seconds 0.05 --json {file}")
    for part in ("rank 0", "bubble", "lower bound", "above the optimum", "peak 1.562 KiB", "found in"):
        assert part in text
    fields = json.loads(file.read_text())
    names = {
        "format",
        "placement",
        "microbatches",
        "ranks",
        "costs",
        "bytes",
        "limit",
        "w_parts",
        "objective",
        "method",
        "seconds",
    }
    assert names | {"predicted", "lower_bound"} <= fields.keys()
    assert fields["limit"] == [1600] * 4 and fields["costs"]["F"] == [5.0] * 8 and fields["bytes"]["W"] == [-80] * 8
    assert set(fields["predicted"]) == {"span", "makespan", "bubble_span", "bubble_makespan", "peak"}
    assert fields["lower_bound"]["span"] <= fields["predicted"]["span"]
    again = zbfx(f"simulate {file}")
    assert f"{fields['predicted']['bubble_span']:.2%}" in again and "period without a barrier" in again


def test_costs_from_a_file_and_a_searched_placement(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    stages = {"F": [1, 2, 1, 1], "B": [1, 2, 1, 1], "W": [1, 1, 1, 1], "comm": 0.1}
    file.write_text(json.dumps({"costs": stages, "bytes": {"F": [9] * 4, "B": [-5] * 4, "W": [-4] * 4}}))
    text = zbfx(f"schedule --ranks 2 --microbatches 4 --costs {file} --limit 60 --placement auto --seconds 0.05")
    assert "placement " in text and "60 B" in text
    assert "custom" in zbfx(f"schedule --ranks 2 --microbatches 4 --costs {file} --placement 0,1,1,1 --seconds 0.02")


def test_csv_needs_costs(tmp_path: Path) -> None:
    zbfx(f"schedule {PROBLEM} --method zb-h1 --json {tmp_path}/s.json")
    schedule = schedule_from_json((tmp_path / "s.json").read_text())
    (tmp_path / "s.csv").write_text(schedule_to_csv(schedule))
    with pytest.raises(InputError, match="give them with --costs FILE"):
        zbfx(f"simulate {tmp_path}/s.csv")
    assert "bubble" in zbfx(f"simulate {tmp_path}/s.csv --costs {tmp_path}/s.json --serialize-links")


def test_compare_shows_every_method() -> None:
    text = zbfx(f"schedule {PROBLEM} --limit 1.0p --compare --seconds 0.02")
    for name in ("gpipe", "1f1b", "zb-h2", "interleaved-1f1b", "zb-v", "v-min", "dualpipe-v", "zigzag"):
        assert name in text
    assert "over the limit" in text  # gpipe does not fit 1p, and says so


@pytest.mark.parametrize(
    "command, error",
    [
        ("schedule --microbatches 4 --times 1,1,1", "how many ranks"),
        ("schedule --ranks 2 --microbatches 4", "what do F, B and W cost"),
        ("schedule --ranks 2 --microbatches 4 --times 1,1", "expected three numbers"),
        (f"schedule {PROBLEM} --limit 1.xp", "expected bytes, a size"),
        (f"schedule {PROBLEM} --placement spiral", "expected linear"),
        (f"schedule {PROBLEM} --method fastest", "no scheduling method"),
        ("simulate /nowhere.json", "cannot read"),
    ],
)
def test_errors(command: str, error: str) -> None:
    with pytest.raises(ZbfxError, match=error):
        zbfx(command)


def test_bytes_are_dealt_out_whole() -> None:
    """An odd number of bytes on two stages of a rank: what a stage takes it gives back, so the limit holds for any m."""
    text = zbfx("schedule --ranks 2 --microbatches 12 --times 1,1,1 --bytes 2,-1,-1 --limit 1.0p --placement v --seconds 0.02")
    assert "peak 4 B" in text


def test_bytes_left_behind_are_refused_with_the_limit_that_would_do() -> None:
    with pytest.raises(MemoryBudgetError, match=r"leaves some behind.*for 8 microbatches: rank 0: 9 bytes"):
        zbfx("schedule --ranks 2 --microbatches 8 --times 1,1,1 --bytes 2,-1,0 --limit 8 --placement v --seconds 0.02")


def test_a_limit_too_small_names_the_smallest() -> None:
    with pytest.raises(MemoryBudgetError, match="rank 0: 400 bytes"):
        zbfx(f"schedule {PROBLEM} --limit 300")


# ---------------------------------------------------------------- weights in time


def at_100_columns(command: str) -> str:
    parser = argparse.ArgumentParser()
    add_verbs(parser.add_subparsers(required=True))
    args = parser.parse_args(command.split())
    out = io.StringIO()
    assert args.run(args, Console(file=out, width=100)) == 0
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines() if "found in" not in line)


SMALL = "schedule --ranks 4 --microbatches 8 --times 1,1,1 --comm 0.01"


@pytest.mark.parametrize(
    "options",
    [
        "--method zb-h2 --weights synchronous --checked",
        "--method zb-h2 --weights post-validation --checked",
        "--method zb-h2 --weights post-validation",
        "--method zb-h1 --weights 2bw --checked",
        "--method 1f1b --weights 2bw",
    ],
)
def test_weights_in_time(options: str, golden: Callable[..., None]) -> None:
    """Steps one after another with their updates and validations, the period, the versions."""
    golden(at_100_columns(f"{SMALL} {options}"))


def test_a_schedule_from_a_file_shows_its_weights_too(tmp_path: Path, golden: Callable[..., None]) -> None:
    zbfx(f"{SMALL} --method 1f1b --json {tmp_path}/s.json")
    golden(at_100_columns(f"simulate {tmp_path}/s.json --weights 2bw --checked"), "stream")
    golden(at_100_columns(f"simulate {tmp_path}/s.json --weights post-validation --checked"), "steps")


def test_weights_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--checked goes with --weights"):
        zbfx(f"{SMALL} --method 1f1b --checked")
    with pytest.raises(InputError, match="from a schedule by name; 'custom' is none"):
        zbfx(f"{SMALL} --method 1f1b --json {tmp_path}/s.json")
        schedule = schedule_from_json((tmp_path / "s.json").read_text())
        (tmp_path / "s.csv").write_text(schedule_to_csv(schedule))
        zbfx(f"simulate {tmp_path}/s.csv --costs {tmp_path}/s.json --weights 2bw")
    with pytest.raises(ScheduleError, match="an order that repeats itself every step; gpipe"):
        zbfx(f"{SMALL} --method gpipe --weights 2bw")


def test_a_trace_holds_every_action_and_the_bytes_of_every_rank(tmp_path: Path) -> None:
    """As written by schedule, and the same by simulate from the JSON of that schedule."""
    traces = [tmp_path / "a.json", tmp_path / "b.json"]
    zbfx(f"schedule {PROBLEM} --placement v --method zb-v --json {tmp_path / 'out.json'} --trace {traces[0]}")
    zbfx(f"simulate {tmp_path / 'out.json'} --trace {traces[1]}")
    first, second = (json.loads(file.read_text()) for file in traces)
    assert first == second and first["otherData"] == {"name": "zb-v"}
    fields = json.loads((tmp_path / "out.json").read_text())
    for r, actions in enumerate(fields["ranks"]):
        own = [e for e in first["traceEvents"] if e["pid"] == r]
        slices = [e for e in own if e["ph"] == "X"]
        assert [e["name"] for e in slices] == actions
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(slices))
        held = [e["args"]["bytes"] for e in own if e["ph"] == "C"]
        assert max(held) == fields["predicted"]["peak"][r] and held[-1] == 0
    ends = [e["ts"] + e["dur"] for e in first["traceEvents"] if e["ph"] == "X"]
    assert max(ends) == pytest.approx(1e6 * fields["predicted"]["makespan"])
    with pytest.raises(InputError, match="cannot write"):
        zbfx(f"simulate {tmp_path / 'out.json'} --trace {tmp_path}")
