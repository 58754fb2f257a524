"""Parse and print what people exchange: actions, schedules (JSON and torch's CSV), sizes. `parse(str(x)) == x`.

JSON is zbfx's own format, `"format": "zbfx-schedule/1"`. The CSV is the compute-only one of torch.distributed.pipelining
(`_load_csv`): one row per rank, torch's letters, which differ from ours in two places (`_TO_TORCH`).
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from zbfx.errors import InputError, ScheduleError
from zbfx.ir import Action, Cost, CostModel, Kind, Link, Schedule, Solution, Timeline

FORMAT = "zbfx-schedule/1"
KINDS: tuple[Kind, ...] = ("F", "B", "W", "BW")

# The one place where torch's letters meet ours: torch writes I for the input gradient alone and B for the whole backward.
_TO_TORCH: dict[Kind, str] = {"F": "F", "B": "I", "W": "W", "BW": "B"}
_FROM_TORCH: dict[str, Kind] = {theirs: ours for ours, theirs in _TO_TORCH.items()}

_ACTION = re.compile(r"(\d+)(F|BW|B|W)(\d+)(?:\.(\d+))?")
_ONCE = re.compile(r"(\d+)([SVULGT])(\d+)(?:\.(\d+))?")
_TORCH_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")
_TORCH_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([A-Za-z]*)")
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}IB": 2 ** (10 * i) for i, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}B": 10 ** (3 * i) for i, letter in enumerate("KMGT", 1)}


# ---------------------------------------------------------------- actions and sizes


def parse_action(text: str, where: str = "") -> Action:
    """`2F0`, `2B0`, `2W0`, `2BW0`, or `0W3.1` (part 1 of a W in parts) -> Action; `where` names the place in errors."""
    match = _ACTION.fullmatch(text) if isinstance(text, str) else None
    if match is None or (match[4] is not None and match[2] != "W"):
        forms = "2F0, 2B0, 2W0, 2BW0, or 2W0.1 for a part of W"
        raise ScheduleError(f"{where or 'action'}: {text!r} is no action; write stage, kind and microbatch: {forms}")
    part = None if match[4] is None else int(match[4])
    return Action(int(match[1]), cast(Kind, match[2]), int(match[3]), part)


def parse_span(text: str) -> Action:
    """An action as a rank records it: also what it does once a step, `1S0`, `1V0`, `1U0`, `1L0`."""
    once = _ONCE.fullmatch(text)
    return (
        parse_action(text)
        if once is None
        else Action(int(once[1]), cast(Kind, once[2]), int(once[3]), int(once[4]) if once[4] else None)
    )


def parse_size(text: str | int | float) -> int:
    """`24GiB`, `512 MiB`, `1.5e9`, `100` -> whole bytes. Powers of 1024 for KiB, MiB, GiB, TiB; of 1000 for KB, MB, GB, TB."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        text = repr(text)
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise InputError(f"{text!r} is no size; write bytes or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as 24GiB")
    whole = match[1].isdigit()
    return int(match[1]) * unit if whole else int(float(match[1]) * unit)


def format_bytes(count: int) -> str:
    """Bytes for people, four digits: 512 B, 1.5 KiB, 24 GiB. Exact for whole units only; negative counts keep their sign."""
    size, sign = abs(count), "-" if count < 0 else ""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit.upper()]:
            return f"{sign}{size / _UNITS[unit.upper()]:.4g} {unit}"
    return f"{sign}{size} B"


def format_prediction(timeline: Timeline, solution: Solution | None = None, period: float | None = None) -> str:
    """`bubble 3.1%`; of a searched schedule also how near to the optimum it is known to be. period: seconds from one step to
    the next, where that is less than the makespan because steps reach into one another."""
    if period:
        work = max((sum(s.end - s.start for s in rank) for rank in timeline.spans), default=0.0)
        return f"bubble {max(0.0, 1 - work / period):.1%} from step to step"
    if solution is None:
        return f"bubble {timeline.bubble_makespan:.1%}"
    kind = "" if solution.objective == "makespan" else " without a barrier"
    near = "optimal" if solution.gap < 5e-4 else f"within {solution.gap:.1%} of the optimum"
    return f"bubble{kind} {getattr(timeline, f'bubble_{solution.objective}'):.1%} ({near})"


# ---------------------------------------------------------------- JSON


def schedule_to_json(schedule: Schedule, costs: CostModel | None = None, **facts: Any) -> str:
    """The schedule as JSON text, one rank a line. `facts` are further fields (limit, predicted, seconds ...), None left out."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "method": schedule.name,
        "placement": list(schedule.placement),
        "microbatches": schedule.microbatches,
        "w_parts": num_parts(schedule),
    }
    fields |= {} if costs is None else costs_to_dict(costs)
    fields |= {name: value for name, value in facts.items() if value is not None}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
    ranks = ",\n".join("  " + json.dumps([str(action) for action in rank]) for rank in schedule.ranks)
    return "{\n" + ",\n".join(lines) + ',\n "ranks": [\n' + ranks + "\n ]\n}\n"


def schedule_from_json(text: str, where: str = "schedule") -> Schedule:
    """JSON text -> Schedule (`costs_from_json` reads the costs). Checks the form only; `verify_schedule` checks the order."""
    fields = parse_fields(text, where)
    placement = tuple(_ints(fields, "placement", where))
    rows = _field(fields, "ranks", list, where)
    ranks = tuple(_parse_rank(row, f"{where}: ranks[{r}]") for r, row in enumerate(rows))
    schedule = Schedule(placement, ranks, str(fields.get("method", "custom")))
    if "microbatches" in fields and fields["microbatches"] != schedule.microbatches:
        stated, found = fields["microbatches"], schedule.microbatches
        raise ScheduleError(f"{where}: microbatches = {stated!r}, but the actions speak of {found}")
    return schedule


def costs_from_json(text: str, where: str = "costs") -> CostModel | None:
    """The costs, bytes and limits of a JSON schedule or costs file; None where it has no costs.

    A file without `placement` and with a single number as `comm` must say how many `num_ranks` there are.
    """
    fields = parse_fields(text, where)
    if "costs" not in fields:
        return None
    times = _field(fields, "costs", dict, where)
    columns = [_numbers(times, kind, where) for kind in ("F", "B", "W")]
    stages = len(columns[0])
    signed = _byte_columns(fields, "bytes", stages, where) + _byte_columns(fields, "temporary_bytes", stages, where)
    lengths = [len(column) for column in (*columns, *signed)]
    if set(lengths) != {stages}:
        raise ScheduleError(f"{where}: the lists in costs and bytes have lengths {lengths}; give one value per stage")
    ranks = _count_ranks(fields, where)
    table = zip(*columns, *signed, strict=True)
    rows = tuple(Cost(float(f), float(b), float(w), *map(int, counts)) for f, b, w, *counts in table)
    limits = _limits(fields.get("limit"), ranks, where)
    edges = tuple(_ints(fields, "edge_bytes", where)) if "links" in fields else ()
    return CostModel(
        rows, _comm(times.get("comm", 0), ranks, where), limits, edges, _links(fields.get("links", []), ranks, where)
    )


def costs_to_dict(costs: CostModel) -> dict[str, Any]:
    """The JSON fields `costs`, `bytes`, `temporary_bytes` (where any) and `limit` of a cost model."""
    fields: dict[str, Any] = {
        "costs": {kind: [getattr(stage, kind) for stage in costs.stages] for kind in ("F", "B", "W")},
        "bytes": {kind: [getattr(stage, f"bytes_{kind}") for stage in costs.stages] for kind in ("F", "B", "W")},
        "limit": list(costs.limit),
    }
    fields["costs"]["comm"] = [list(row) for row in costs.comm]
    if costs.links:
        fields["edge_bytes"] = list(costs.edge_bytes)
        fields["links"] = [[[link.latency, link.bandwidth] for link in row] for row in costs.links]
    temporary = {kind: [getattr(stage, f"peak_{kind}") for stage in costs.stages] for kind in ("F", "B", "W")}
    if any(any(column) for column in temporary.values()):
        fields["temporary_bytes"] = temporary
    return fields


def solution_to_json(solution: Solution) -> str:
    """A search's answer as JSON: the schedule with its costs, limits, predictions and lower bounds."""
    return schedule_to_json(solution.schedule, solution.costs, **solution_facts(solution))


def solution_facts(solution: Solution) -> dict[str, Any]:
    """What a search says of its schedule, as JSON fields."""
    timeline = solution.timeline
    predicted = {name: getattr(timeline, name) for name in ("span", "makespan", "bubble_span", "bubble_makespan")}
    return {
        "objective": solution.objective,
        "seconds": solution.seconds,
        "predicted": predicted | {"peak": list(timeline.peak)},
        "lower_bound": {"span": solution.bound_span, "makespan": solution.bound_makespan},
        "why": solution.why,
    }


def num_parts(schedule: Schedule) -> int:
    """Into how many parts the schedule splits each W: 1 when it does not."""
    return 1 + max((a.part for rank in schedule.ranks for a in rank if a.part is not None), default=0)


def parse_fields(text: str, where: str) -> dict[str, Any]:
    """JSON text of `zbfx-schedule/1` -> its fields; an error names line and column."""
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as e:
        raise ScheduleError(f"{where}: line {e.lineno}, column {e.colno}: {e.msg}") from e
    if not isinstance(fields, dict) or fields.get("format", FORMAT) != FORMAT:
        found = fields.get("format") if isinstance(fields, dict) else type(fields).__name__
        raise ScheduleError(f'{where}: expected an object with "format": "{FORMAT}", found {found!r}')
    return fields


def _parse_rank(row: object, where: str) -> tuple[Action, ...]:
    if not isinstance(row, list):
        raise ScheduleError(f"{where}: expected a list of actions, found {row!r}")
    return tuple(parse_action(cell, f"{where}[{i}]") for i, cell in enumerate(row))


def _field(fields: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    if not isinstance(fields.get(name), kind):
        raise ScheduleError(f"{where}: field {name!r} must be a {kind.__name__}, found {fields.get(name)!r}")
    return fields[name]


def _ints(fields: Mapping[str, Any], name: str, where: str) -> list[int]:
    values = _field(fields, name, list, where)
    for i, value in enumerate(values):
        if type(value) is not int or value < 0:
            raise ScheduleError(f"{where}: {name}[{i}] = {value!r} must be a whole number, 0 or more")
    return cast(list[int], values)


def _numbers(fields: Mapping[str, Any], name: str, where: str) -> list[float]:
    values = _field(fields, name, list, where)
    for i, value in enumerate(values):
        if type(value) not in (int, float):
            raise ScheduleError(f"{where}: {name}[{i}] = {value!r} must be a number")
    return cast(list[float], values)


def _byte_columns(fields: Mapping[str, Any], name: str, stages: int, where: str) -> list[list[float]]:
    if name not in fields:
        return [[0] * stages] * 3
    columns = _field(fields, name, dict, where)
    return [_numbers(columns, kind, f"{where}: {name}") for kind in ("F", "B", "W")]


def _count_ranks(fields: Mapping[str, Any], where: str) -> int:
    if "placement" in fields:
        return 1 + max(_ints(fields, "placement", where), default=-1)
    comm = fields["costs"].get("comm", 0)
    ranks = len(comm) if isinstance(comm, list) else fields.get("num_ranks")
    if type(ranks) is not int or ranks < 1:
        raise ScheduleError(f"{where}: how many ranks? Give placement, num_ranks, or comm as a rank x rank matrix")
    return ranks


def _comm(value: object, ranks: int, where: str) -> tuple[tuple[float, ...], ...]:
    if type(value) in (int, float):
        return tuple(tuple(0.0 if a == b else float(cast(float, value)) for b in range(ranks)) for a in range(ranks))
    if not isinstance(value, list) or len(value) != ranks or any(not isinstance(row, list) or len(row) != ranks for row in value):
        raise ScheduleError(f"{where}: costs.comm must be a number or a {ranks} x {ranks} matrix, found {value!r}")
    return tuple(tuple(float(x) for x in _numbers({"comm": row}, "comm", where)) for row in value)


def _links(value: object, ranks: int, where: str) -> tuple[tuple[Link, ...], ...]:
    """A rank x rank matrix of [latency in seconds, bandwidth in bytes per second], or nothing."""
    rows = value if isinstance(value, list) else None
    shaped = rows is not None and all(isinstance(row, list) and len(row) == ranks for row in rows) and len(rows) in (0, ranks)
    cells = [cell for row in rows for cell in row] if rows and shaped else []
    if not shaped or not all(isinstance(c, list) and len(c) == 2 and type(c[0]) in (int, float) and c[1] > 0 for c in cells):
        raise ScheduleError(f"{where}: links must be a {ranks} x {ranks} matrix of [latency, bandwidth], found {value!r}")
    return tuple(tuple(Link(float(latency), float(bandwidth)) for latency, bandwidth in row) for row in rows or [])


def _limits(value: object, ranks: int, where: str) -> tuple[int | None, ...]:
    values: list[Any] = value if isinstance(value, list) else [value] * ranks
    if len(values) != ranks or any(type(x) not in (int, float, type(None)) for x in values):
        raise ScheduleError(f"{where}: limit must be bytes or null, one or {ranks} of them, found {value!r}")
    return tuple(None if x is None else int(x) for x in values)


# ---------------------------------------------------------------- torch's CSV


def schedule_to_csv(schedule: Schedule) -> str:
    """The compute-only CSV that torch.distributed.pipelining loads. torch has no parts of W: a W goes where its last part is."""
    last = {(a.stage, a.mb): a.part for rank in schedule.ranks for a in rank if a.part is not None}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank in schedule.ranks:
        whole = (a for a in rank if a.part is None or last[a.stage, a.mb] == a.part)
        writer.writerow([f"{a.stage}{_TO_TORCH[a.kind]}{a.mb}" for a in whole])
    return out.getvalue()


def schedule_from_csv(text: str, where: str = "csv") -> Schedule:
    """torch's compute-only CSV -> Schedule; idle cells are dropped, OVERLAP_F_B becomes its parts in order."""
    try:
        rows = [cells for line in text.splitlines() for cells in csv.reader([line])]
    except csv.Error as e:
        raise ScheduleError(f"{where}: {e}") from e
    ranks = tuple(_parse_torch_row(row, f"{where}: line {r + 1}") for r, row in enumerate(rows))
    return Schedule(_infer_placement(ranks, where), ranks)


def _parse_torch_row(row: Sequence[str], where: str) -> tuple[Action, ...]:
    cells = [(f"{where}, cell {i + 1}", part) for i, cell in enumerate(row) for part in _torch_parts(cell.strip())]
    return tuple(_parse_torch_action(part, place) for place, part in cells)


def _torch_parts(cell: str) -> Iterable[str]:
    overlap = _TORCH_OVERLAP.fullmatch(cell)
    return (cell,) * bool(cell) if overlap is None else (part.strip() for part in overlap[1].split(";"))


def _parse_torch_action(text: str, where: str) -> Action:
    match = _TORCH_ACTION.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{where}: {text!r} is not a compute action of torch's CSV: 2F0, 2I0, 2W0 or 2B0")
    return Action(int(match[1]), _FROM_TORCH[match[2]], int(match[3]))


def _infer_placement(ranks: Sequence[Sequence[Action]], where: str) -> tuple[int, ...]:
    home: dict[int, int] = {}
    for r, rank in enumerate(ranks):
        for action in rank:
            if home.setdefault(action.stage, r) != r:
                raise ScheduleError(
                    f"{where}: {action} on rank {r}, but stage {action.stage} is on rank {home[action.stage]} too"
                )
    missing = [stage for stage in range(len(home)) if stage not in home]
    if missing:
        raise ScheduleError(f"{where}: no rank runs stage {missing[0]}, yet stage {max(home)} is there; number the stages from 0")
    return tuple(home[stage] for stage in range(len(home)))
