"""A timeline as a trace file for Perfetto (ui.perfetto.dev) or chrome://tracing: per rank a track, and a curve of its bytes.

Trace Event Format, JSON: times in microseconds from the first action on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from zbfx.ir import Timeline

# Names of chrome://tracing's palette.
_COLOURS = {"F": "rail_response", "B": "rail_animation", "W": "rail_idle", "BW": "rail_load"}
_NAMES = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "both gradients"}


def timeline_trace(timeline: Timeline, curves: Sequence[Sequence[int]] | None = None, *, name: str = "zbfx") -> str:
    """The file's text. curves: per rank the bytes held after each of its actions (`memory_curve`); None leaves them out.

    Actions that take no time (an update, a validation) are marks.
    """
    begin = min((rank[0].start for rank in timeline.spans if rank), default=0.0)
    events: list[dict[str, Any]] = []
    for r, rank in enumerate(timeline.spans):
        events.append({"ph": "M", "pid": r, "name": "process_name", "args": {"name": f"rank {r}"}})
        events.append({"ph": "M", "pid": r, "name": "process_sort_index", "args": {"sort_index": r}})
        for n, span in enumerate(rank):
            a, at, length = span.action, (span.start - begin) * 1e6, (span.end - span.start) * 1e6
            event = {"pid": r, "tid": 0, "name": str(a), "cat": _NAMES.get(a.kind, "step"), "ts": at}
            event["args"] = {"stage": a.stage, "microbatch": a.mb} if a.kind in _NAMES else {}
            if length > 0 or a.kind in _NAMES:
                events.append({"ph": "X", "dur": length, "cname": _COLOURS.get(a.kind, "grey"), **event})
            else:
                events.append({"ph": "i", "s": "t", **event})
            if curves is not None:
                held = {"bytes": curves[r][n]}
                events.append({"ph": "C", "pid": r, "name": "held", "ts": at + length, "args": held})
    text = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "otherData": {{"name": {json.dumps(name)}}}, "traceEvents": [\n{text}\n]}}\n'
