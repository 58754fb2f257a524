"""Search results on disk, by content: the same question is answered from a file, a different one never is.

The file's name is a hash of everything the answer depends on; its text is a zbfx-schedule/1 document. What is read is
parsed, verified,
held against the limits and simulated like a schedule from a stranger; anything amiss and the search runs again.
Folder: $ZBFX_CACHE, else ~/.cache/zbfx/schedules; ZBFX_CACHE=off turns it off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from zbfx.errors import ZbfxError
from zbfx.ir import CostModel, Solution
from zbfx.passes.order_bounds import Bounds
from zbfx.passes.order_search import solution_of
from zbfx.passes.simulate import refuse_over_budget
from zbfx.text import costs_to_dict, parse_fields, schedule_from_json, solution_to_json
from zbfx.verify import verify_schedule


def cached(question: dict[str, Any], costs: CostModel, search: Callable[[], Solution]) -> Solution:
    """search()'s answer, from the disk where it is there. question: what the answer depends on besides the costs, as JSON
    values."""
    folder = cache_folder()
    if folder is None:
        return search()
    text = json.dumps([version(), question, costs_to_dict(costs)], sort_keys=True)
    file = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    found = _read(file, costs, question)
    if found is not None:
        return found
    solution = search()
    _write(file, solution_to_json(solution))
    return solution


def cache_folder() -> Path | None:
    """Where answers are kept; None when turned off."""
    chosen = os.environ.get("ZBFX_CACHE", "")
    if chosen == "off":
        return None
    return Path(chosen) if chosen else Path.home() / ".cache" / "zbfx" / "schedules"


@cache
def version() -> str:
    """A hash of the schedulers' files: answers of another version of the search are not found."""
    here = sorted(Path(__file__).parent.glob("order_*"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in here if file.suffix in (".py", ".json"))).hexdigest()


def _read(file: Path, costs: CostModel, question: dict[str, Any]) -> Solution | None:
    try:
        text = file.read_text()
        fields = parse_fields(text, str(file))
        schedule = verify_schedule(schedule_from_json(text, str(file)))
        if schedule.microbatches != question["microbatches"]:
            return None
        refuse_over_budget(schedule, costs)
        bounds = Bounds(float(fields["lower_bound"]["span"]), float(fields["lower_bound"]["makespan"]))
        why = f"{fields['why']} (from the cache)"
        return solution_of(schedule, costs, bounds, str(fields["objective"]), int(fields["w_parts"]), 0.0, why)
    except (OSError, ZbfxError, KeyError, TypeError, ValueError):
        return None  # absent, damaged or foreign: search


def _write(file: Path, text: str) -> None:
    """Whole or not at all; a folder that cannot be written costs only time."""
    part = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.replace(file)
    except OSError:
        return
