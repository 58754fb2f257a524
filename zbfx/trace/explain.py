"""What torch says when a trace fails -> the line of the user's own code, the reason, and what to change."""

from __future__ import annotations

import re
import traceback
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zbfx.errors import TraceError
from zbfx.trace.whole import __file__ as whole_file

_USER_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_BRANCH = "use torch.where in place of a Python branch on a tensor's values, and masks in place of boolean indexing"
_HINTS = (
    ("data-dependent", _BRANCH),
    ("guard on", _BRANCH),
    (".item()", "keep the value a tensor; .item() has no value while tracing"),
    ("nonzero", "avoid shapes that depend on values: use a mask and torch.where in place of boolean indexing"),
    ("higher order operator", "write the branch with torch.where, or the loop as a Python loop"),
    ("numpy", "use torch operations in forward: numpy calls cannot be traced"),
    ("no part of the model", "make it a parameter of the model (or of a module in it), where it gets a gradient, or detach() it"),
    ("a gradient taken in forward", "write the derivative out in plain operators: its formula is differentiated like any other"),
    ("a hook on a tensor", "write a torch.autograd.Function whose backward does what the hook does"),
    ("_ctc_loss", "pass input_lengths and target_lengths as tuples of ints"),
    ("not an instance of torch.nn.parameter", "use the Python module that a torch.jit one was made from"),
    ("not a known type", "have the model return tensors in tuples, lists and dicts (Hugging Face: pass use_cache=False)"),
    ("sparse", "use dense gradients and tensors (nn.Embedding(sparse=False))"),
    ("device", "put all parameters and inputs on one device"),
)


# What torch's own code is stopped at, where the message names nothing that the user wrote: file, function -> what to do.
_KNOWN = {
    ("nn/modules/batchnorm.py", "forward"): (
        "give batch norm a momentum (0.1, say): with momentum=None it divides by num_batches_tracked, a count that changes"
    ),
}


def explain(error: BaseException) -> str:
    """The model's own line that could not be traced, torch's reason, and what to change."""
    message = str(error)
    frames = [(frame.filename, frame.lineno, frame.name) for frame in _frames(error)]
    frames += [(f, int(line), name) for f, line, name in _USER_FRAME.findall(message)]
    own = [f for f in frames if not _is_library(f[0])]
    place = "{}:{} in {}".format(*own[-1]) if own else "no line of the model's own code is on the stack"
    lowered = message.lower()
    known = [text for (file, name), text in _KNOWN.items() for f in frames if f[0].endswith(file) and f[2] == name]
    hints = [*known, *[text for key, text in _HINTS if key in lowered], "rewrite the line with traceable torch operations"]
    reason = next((line.strip() for line in message.splitlines() if line.strip()), type(error).__name__)
    return f"the model cannot be traced at {place}\n  reason: {type(error).__name__}: {reason}\n  what to do: {hints[0]}"


def _frames(error: BaseException) -> list[Any]:
    return list(traceback.extract_tb(error.__traceback__))


def _is_library(filename: str) -> bool:
    here = __file__.replace("\\", "/").rsplit("/zbfx/", 1)[0] + "/zbfx/"
    return "/torch/" in filename or filename.startswith("<") or filename.replace("\\", "/").startswith(here)


def source_of(node: fx.Node) -> str:
    """file:line of the innermost frame of the user's own code (of any code, if there is none)."""
    frames = _USER_FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f for f in frames if not _is_library(f[0])] or frames
    if own and own[-1][0] == whole_file:
        return "loss"  # torch keeps the frames of forward methods alone, and the loss function has none
    return f"{own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]}" if own else ""


def refuse_symbols(module: fx.GraphModule) -> None:
    """Raises TraceError where a Python number or a shape depends on a tensor's values: graphs here have fixed shapes."""
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            for value in pytree.tree_leaves(node.meta.get("val")):
                sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
                if any(isinstance(s, (torch.SymInt, torch.SymFloat, torch.SymBool)) for s in sizes):
                    what = "shape" if isinstance(value, torch.Tensor) else "number"
                    raise TraceError(
                        f"the model cannot be traced at {source_of(node)}\n"
                        f"  reason: {node.target} makes a {what} that depends on a tensor's values\n"
                        "  what to do: keep values in tensors (no .item(), int() or float()), and use masks and torch.where "
                        "in place of boolean indexing or nonzero()"
                    )
