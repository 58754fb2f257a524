"""Every data type that passes exchange: frozen, slotted, plain values and tuples; no behaviour beyond tiny properties.

Order (Schedule), time (Timeline), cost (CostModel), computation (Stage) and instructions (Program) are separate types:
none mentions the internals of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import fx

Kind = Literal["F", "B", "W", "BW", "S", "V", "U", "L", "G", "T"]
ONCE = frozenset("SVULGT")  # the kinds of what a rank does once a step


WEIGHTS = ("synchronous", "post-validation", "2bw")  # when weights change

# ---------------------------------------------------------------- order


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One unit of compute: `2F0` is the forward of stage 2 for microbatch 0; `0W3.1` is part 1 of a W split in parts.

    What a rank does once per step stands under the rank's number: `1S0` (state of the gradients), `1V0` (validation by the
    state of all), `1U0` (update), `1L0` (loss), `1G0.3` (gradients of stage 3 complete), `1T0.2` (tied gradients from rank 2).
    """

    stage: int
    kind: Kind
    mb: int
    part: int | None = None

    def __str__(self) -> str:
        part = "" if self.part is None else f".{self.part}"
        return f"{self.stage}{self.kind}{self.mb}{part}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Order only, never times: what each rank does, first to last.

    placement[stage] is the rank that holds the stage; ranks[r] is the list of rank r's actions.
    """

    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    name: str = field(default="custom", compare=False)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def microbatches(self) -> int:
        return 1 + max((a.mb for rank in self.ranks for a in rank), default=-1)


# ---------------------------------------------------------------- cost and time


@dataclass(frozen=True, slots=True)
class Cost:
    """One stage: seconds of F, B and W for one microbatch, and the signed change in bytes held after each."""

    F: float
    B: float
    W: float
    bytes_F: int = 0
    bytes_B: int = 0
    bytes_W: int = 0
    peak_F: int = 0  # bytes above what is held before the action, while it runs (temporaries included)
    peak_B: int = 0
    peak_W: int = 0


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a scheduler needs to know: per-stage costs, seconds of a message between two ranks, bytes limit per rank.

    comm[a][b] is the seconds of one message from rank a to rank b (0 on the diagonal); limit[r] is in bytes, None = no limit.
    Where the messages differ in size, edge_bytes[s] (bytes between stages s and s + 1, either way) and links[a][b] replace comm.
    """

    stages: tuple[Cost, ...]
    comm: tuple[tuple[float, ...], ...]
    limit: tuple[int | None, ...]
    edge_bytes: tuple[int, ...] = ()
    links: tuple[tuple[Link, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """An action with its simulated (or measured) start and end in seconds."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a schedule costs. spans[r] are rank r's actions in order.

    span: max over ranks of (last end - first start), seconds; makespan: last end - first start over all ranks;
    bubble_* = (cost - busiest rank's work) / cost; peak[r]: largest bytes held by rank r at an action's end.
    """

    spans: tuple[tuple[Span, ...], ...]
    span: float
    makespan: float
    bubble_span: float
    bubble_makespan: float
    peak: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule with its costs, its simulated timeline, and the seconds that no schedule for the same costs falls below.

    why: how it was found, for people; seconds: how long that took.
    """

    schedule: Schedule
    costs: CostModel
    timeline: Timeline
    bound_span: float
    bound_makespan: float
    objective: str
    w_parts: int = 1
    why: str = field(default="", compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def gap(self) -> float:
        """How far the objective can lie above the optimum at most, as a share of itself."""
        found, bound = (
            getattr(source, name) for source, name in ((self.timeline, self.objective), (self, f"bound_{self.objective}"))
        )
        return max(0.0, (found - bound) / found) if found > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Course:
    """A training step: a schedule and what each rank does besides, in the order of timeline.spans.

    feeds: messages beside activations and gradients, producer -> consumers on other ranks. repeated[r]: how many of rank r's
    first actions run again where a validation finds that the weights were wrong. period: seconds from one step to the next.
    """

    schedule: Schedule
    timeline: Timeline
    feeds: Mapping[Action, tuple[Action, ...]] = field(default_factory=dict)
    repeated: tuple[int, ...] = ()
    period: float = 0.0


# ---------------------------------------------------------------- computation


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor's type: what is known of it before it exists. stride and shape in elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the dense storage that holds it."""
        n = 1 + sum((s - 1) * st for s, st in zip(self.shape, self.stride, strict=True)) if all(self.shape) else 0
        return n * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Fn:
    """An fx graph with named ends in groups. The graph is owned: nobody else mutates it.

    `takes` maps a group (p, c, x, s, gy, k) to its placeholders' names, in the graph's placeholder order; the graph returns
    the concatenation of the groups of `gives` (y, s, gx, k, gp). Every node's meta has `val` (a fake tensor) and `source`.
    """

    graph: fx.Graph
    takes: Mapping[str, tuple[str, ...]]
    gives: Mapping[str, int]

    def __str__(self) -> str:
        return "\n".join(_line(node) for node in self.graph.nodes)

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """What the graph returns."""
        return outputs_of(self.graph)

    def value(self, name: str) -> Value:
        """The type of a node."""
        return value_of(name, next(n for n in self.graph.nodes if n.name == name).meta["val"])

    def group(self, name: str) -> tuple[Value, ...]:
        """The types of an output group."""
        nodes = self.outputs
        start = 0
        for group, count in self.gives.items():
            if group == name:
                return tuple(value_of(n.name, n.meta["val"]) for n in nodes[start : start + count])
            start += count
        return ()


def outputs_of(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The nodes that a graph returns, which is always a flat tuple of nodes here."""
    return cast(tuple[fx.Node, ...], graph.output_node().args[0])


def value_of(name: str, tensor: torch.Tensor) -> Value:
    """The type of a (fake) tensor."""
    return Value(name, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


_SHORT = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "bool": "b8",
    "uint8": "u8",
}


def short(value: Any) -> str:
    """A tensor's type as text: `f32[8, 128]`; a tuple's as (f32[8], f32[8])."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(short(v) for v in value)})"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return short_type(value.dtype, value.shape)


def short_type(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A type as text: `f32[8, 128]`."""
    name = str(dtype).removeprefix("torch.")
    return f"{_SHORT.get(name, name)}{list(shape)}"


def _line(node: fx.Node) -> str:
    source = node.meta.get("source")
    kind = short(node.meta["val"]) if "val" in node.meta else ""
    if node.op == "placeholder":
        return f"{node.name}: {kind}"
    if node.op == "output":
        return f"return {', '.join(map(str, cast(tuple[fx.Node, ...], node.args[0])))}"
    args = [*map(str, node.args), *[f"{k}={v}" for k, v in node.kwargs.items()]]
    target = getattr(node.target, "__name__", str(node.target))
    return f"{node.name}: {kind} = {target}({', '.join(args)})" + (f"  # {source}" if source else "")


# ---------------------------------------------------------------- instructions

Verb = Literal[
    "post", "recv", "compute", "loss", "send", "sent", "drop", "report", "measure", "learn", "update", "collect", "tie"
]
When = Literal["", "ahead", "wrong", "cautious"]  # the rank's flag that must be set for an instruction to run


@dataclass(frozen=True, slots=True)
class Instr:
    """One instruction of a rank. `action` names the compute, or, for a message, the consumer that it feeds.

    reads and writes are buffer names; frees are the buffers deleted right after it. peer is the other rank of a message.
    """

    verb: Verb
    action: Action
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    peer: int | None = None
    when: When = ""
    back: int = 0  # in a stream: the action's microbatch is of this many steps ago


@dataclass(frozen=True, slots=True)
class Program:
    """A rank's instructions, first to last, and (once generated) the Python text that runs.

    body: in a stream, what every step after the first does, from where the step before was left. flush: what completes the
    last step, where steps reach into one another.
    """

    rank: int
    instrs: tuple[Instr, ...]
    source: str = ""
    path: str = ""  # the file that `source` was read from
    body: tuple[Instr, ...] = ()
    flush: tuple[Instr, ...] = ()
    held: tuple[int, ...] = ()  # bytes of activations held after each instruction
    peak: int = 0  # largest bytes of activations at any moment, temporaries inside the stage functions included


@dataclass(frozen=True, slots=True)
class Link:
    """Estimated speed between two ranks: seconds = latency + bytes / bandwidth."""

    latency: float
    bandwidth: float


# ---------------------------------------------------------------- the captured model


@dataclass(frozen=True, slots=True)
class Place:
    """In a template of a model's output: the position of a tensor among those that are computed."""

    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """The whole forward pass, from inputs to loss (or to the model's outputs), as one graph of aten calls.

    Placeholders of `graph` are named in `params` and `buffers` (-> the user's names), `constants` (-> tensors) and
    `leaves` (the tensor inputs, -> index into the flattened (args, kwargs, target)). Every node carries meta: `val` (a fake
    tensor), `grad` (whether it requires grad), `source` (file:line of the user's code), `module` (the user's module name) and
    `contexts` (no_grad / autocast regions it stands in). `statics` are the non-tensor input leaves the trace is valid for.
    """

    graph: fx.Graph
    params: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    leaves: Mapping[str, int]
    statics: Mapping[int, Any]
    outputs: tuple[str, ...]  # the nodes returned: the loss, or (to predict) the tensors among the model's outputs
    template: Any  # to predict: the model's output, with the position of a tensor in `outputs` in its place; else None
    device: torch.device
    training: bool = True
    numbers: Mapping[tuple[str, str], tuple[Any, ...]] = field(default_factory=dict)  # (module, attribute) -> as forward read it


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """One stage's part of the captured graph: its own copy, same node names.

    The graph's placeholders are, in this order, params + buffers + constants + leaves + inputs (names of captured
    placeholders, then of values from the stage before); it returns the values named in `outputs` (the loss, on the last).
    views_in: views that an earlier stage takes and this one takes again, each with a gradient of its own to send back, so
    that gradients are added where and in the order that the whole model adds them; views_out: the same for the stage after.
    """

    index: int
    graph: fx.Graph
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    leaves: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    seconds: float
    start: int  # position of its first node in the line of all stages' nodes
    views_in: tuple[str, ...] = ()
    views_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """A stage's joint graph. Placeholders: the Forward's, then one gradient per entry of `tangents`.

    It returns y (one per output), then gx for the positions of `gx`, then gparams for those of `gparams`.
    """

    forward: Forward
    graph: fx.Graph
    tangents: tuple[int, ...]  # positions in forward.outputs + views_out that a gradient comes back for
    gx: tuple[int, ...]  # positions in forward.inputs + views_in that a gradient is sent back for
    gparams: tuple[int, ...]  # positions in forward.params that get a gradient


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a stage's W: p, c, k -> the gradients at these positions of the stage's gparams. W is None where it is empty."""

    W: Fn | None
    gradients: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A stage's three functions. p: params + buffers + constants; c: input leaves; s: saved for B; k: kept for W.

    F: p, c, x -> y, s      B: p, c, s, gy -> gx, k      W: p, c, k -> gparams      (without B, W takes s and gy itself)

    B is None where no input needs a gradient, W where no parameter does. Each Fn's `takes` names its placeholders by group,
    `gives` its outputs. names: the user's names of p, with gparams the positions that get a gradient.
    """

    index: int
    F: Fn
    B: Fn | None
    W: Fn | None
    names: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    leaves: tuple[str, ...]
    tangents: tuple[int, ...]
    gx: tuple[int, ...]
    gparams: tuple[int, ...]
    whole: tuple[Fn, Fn] | None = None  # F and BW (p, c, s, gy -> gx, gp), for schedules that do not split this backward
    BW: Fn | None = None  # in a stage that runs whole backwards: stands for B and W
    parts: tuple[Part, ...] = ()  # in a stage that runs W in parts: stand for W; B then gives k0, k1, ..., a list for each


def function_of(stage: Stage, action: Action) -> Fn | None:
    """What an action calls, None where that is empty. Of a W that is not divided, part 0 is all."""
    if action.kind != "W":
        return {"F": stage.F, "B": stage.B, "BW": stage.BW}[action.kind]
    if stage.parts:
        return stage.parts[action.part or 0].W
    return stage.W if not action.part else None
