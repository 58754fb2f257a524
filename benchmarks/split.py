"""What splitting the backward costs in time and what it saves in memory, beside torch.distributed.pipelining, in one run.

    python benchmarks/split.py

A stage of two GPT blocks in the middle of a pipeline: hidden states in, hidden states out. In every round each candidate runs
once, and the two that are compared back to back; a ratio is the median over rounds of the ratio within a round. Seconds are the
CPU's, on one thread, so that other work on the machine counts little.

    (B + W) / BW of the graph     <= 1.03   the two generated functions against the same backward generated as one
    held after B, ours / torch's  <= 0.70   bytes of all storages alive, parameters not counted
    (I + W) / B of torch                    its autograd-level split, for comparison

Exits 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpt import GPT, next_token_loss
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.profiler import ProfilerActivity, profile

import zbfx
from zbfx.codegen.function import function_text
from zbfx.ir import Fn, outputs_of
from zbfx.passes.liveness import last_uses
from zbfx.passes.whole_backward import whole_backward
from zbfx.trace.differentiate import differentiate

MOST_TIME, MOST_HELD = 1.03, 0.70
Function = Callable[..., Any]


def main() -> int:
    """Measure, print, compare with the bounds."""
    options = _options()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(layers=6, width=options.width, heads=options.width // 64, vocab=256, length=options.length)
    ids = torch.randint(0, 256, (options.batch, options.length))
    pipe = zbfx.compile(
        model, 3, example_inputs=(ids,), example_target=ids, loss=next_token_loss, microbatches=1, cuts=("blocks.2", "blocks.4")
    )
    ours, torchs = Ours(pipe.plan, model), Torchs(model.blocks[2:4])
    x, gy = (torch.randn(options.batch, options.length, options.width) for _ in range(2))
    _check_equal(ours, torchs, x, gy)
    print(f"two GPT blocks: width {options.width}, {options.batch} x {options.length} tokens, float32, torch {torch.__version__}")
    held = {"ours": _held(lambda: ours.after_b(x, gy)), "torch": _held(lambda: torchs.after_i(x, gy))}
    held["torch, what its stage object keeps"] = _held(lambda: torchs.after_i(x, gy, all_of_it=True))
    times = _times(ours, torchs, x, gy, options.rounds)
    return _report(times, held)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="a multiple of 64, the width of a head")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100)
    return parser.parse_args()


# ---------------------------------------------------------------- the candidates


class Ours:
    """The stage's generated functions, and its backward generated as one function."""

    def __init__(self, plan: Any, model: torch.nn.Module) -> None:
        history = dict(plan.history)
        stage, after = plan.stages[1], plan.stages[2]
        joint = differentiate(history["partition"][1], [n.meta["val"] for n in outputs_of(after.B.graph)[: after.B.gives["gx"]]])
        whole_f, whole_bw = whole_backward(joint)
        self.F, self.B, self.W = (_generated(kind, fn) for kind, fn in (("F", stage.F), ("B", stage.B), ("W", stage.W)))
        self.whole_F, self.whole_BW = _generated("F", whole_f), _generated("BW", whole_bw)
        self.p = [model.get_parameter(name).detach() for name in stage.names]
        self.names = [stage.names[i].removeprefix("blocks.") for i in stage.gparams]

    def after_b(self, x: Tensor, gy: Tensor) -> Any:
        """What is held between B and W, once y and gx are sent."""
        _, s = self.F(self.p, [], [x.clone()])
        return self.B(self.p, [], s, [gy.clone()])[1]

    def split(self, x: Tensor, gy: Tensor) -> tuple[float, float]:
        """Seconds of B and of W."""
        _, s = self.F(self.p, [], [x])
        begun = time.thread_time()
        _, k = self.B(self.p, [], s, [gy])
        between = time.thread_time()
        self.W(self.p, [], k)
        return between - begun, time.thread_time() - between

    def whole(self, x: Tensor, gy: Tensor) -> tuple[float]:
        """Seconds of BW."""
        _, s = self.whole_F(self.p, [], [x])
        begun = time.thread_time()
        self.whole_BW(self.p, [], s, [gy])
        return (time.thread_time() - begun,)


class Torchs:
    """torch.distributed.pipelining's eager backward, split and whole, as its stages call it."""

    def __init__(self, blocks: torch.nn.ModuleList) -> None:
        self.blocks = torch.nn.Sequential(*blocks)
        self.names = [name for name, _ in self.blocks.named_parameters()]

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.blocks.zero_grad()
        x = x.detach().requires_grad_()
        return x, self.blocks(x)

    def after_i(self, x: Tensor, gy: Tensor, all_of_it: bool = False) -> Any:
        """What W needs to be held after the input's backward; all_of_it: with the output, and the gradients at both ends."""
        x, y = self._forward(x.clone())
        gy = gy.clone()
        dinputs, groups = stage_backward_input([y], [gy], [x], self.blocks.parameters())
        if all_of_it:
            return x, y, gy, dinputs, groups
        x.grad = None
        return groups

    def split(self, x: Tensor, gy: Tensor) -> tuple[float, float]:
        """Seconds of I and of W."""
        x, y = self._forward(x)
        begun = time.thread_time()
        _, groups = stage_backward_input([y], [gy], [x], self.blocks.parameters())
        between = time.thread_time()
        stage_backward_weight(self.blocks.parameters(), groups)
        return between - begun, time.thread_time() - between

    def whole(self, x: Tensor, gy: Tensor) -> tuple[float]:
        """Seconds of the ordinary backward."""
        x, y = self._forward(x)
        begun = time.thread_time()
        stage_backward([y], [gy], [x])
        return (time.thread_time() - begun,)


def _generated(name: str, fn: Fn) -> Function:
    """The function as a rank file would define it."""
    ops: dict[str, str] = {}
    text = function_text(name, fn, last_uses(fn.graph), ops, ())
    space: dict[str, Any] = {"torch": torch, "DEVICE": torch.device("cpu")}
    exec("\n".join([*[f"{alias} = {path}" for alias, path in ops.items()], *text]), space)
    return torch.no_grad()(space[name])


def _check_equal(ours: Ours, torchs: Torchs, x: Tensor, gy: Tensor) -> None:
    """All of them compute the same gradients, bit for bit."""
    leaf, y = torchs._forward(x)
    dinputs = stage_backward([y], [gy], [leaf])
    by_name = {str(int(name[0]) + 2) + name[1:]: p.grad for name, p in torchs.blocks.named_parameters()}
    wanted = [dinputs[0], *[by_name[name] for name in ours.names]]
    _, s = ours.F(ours.p, [], [x])
    gx, k = ours.B(ours.p, [], s, [gy])
    split = [*gx, *ours.W(ours.p, [], k)]
    _, s = ours.whole_F(ours.p, [], [x])
    gx, gp = ours.whole_BW(ours.p, [], s, [gy])
    for what, found in (("B; W", split), ("BW", [*gx, *gp])):
        different = [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)]
        if different:
            sys.exit(f"{what} computes other gradients than torch: outputs {different} of {len(wanted)}")


# ---------------------------------------------------------------- measuring


def _held(run: Callable[[], Any]) -> int:
    """Bytes of all storages that are alive after `run` and were not before: what the allocator gave out less what came back."""
    run()  # what is allocated once and for all is not counted
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    events = profiler.profiler.kineto_results.events()
    del result
    return sum(e.nbytes() for e in events if e.name() == "[memory]")


def _times(ours: Ours, torchs: Torchs, x: Tensor, gy: Tensor, rounds: int) -> dict[str, list[tuple[float, ...]]]:
    """Seconds of every candidate in every round. The two of a pair run back to back, who is first changes from round to round."""
    pairs = [
        [("ours split", ours.split), ("ours whole", ours.whole)],
        [("torch split", torchs.split), ("torch whole", torchs.whole)],
    ]
    found: dict[str, list[tuple[float, ...]]] = {name: [] for pair in pairs for name, _ in pair}
    for number in range(-4, rounds):
        for pair in pairs:
            for name, candidate in pair if number % 2 else pair[::-1]:
                seconds = candidate(x, gy)
                if number >= 0:
                    found[name].append(seconds)
    return found


def _ratio(times: dict[str, list[tuple[float, ...]]], above: str, below: str) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(sum(a) / sum(b) for a, b in zip(times[above], times[below], strict=True))


def _report(times: dict[str, list[tuple[float, ...]]], held: dict[str, int]) -> int:
    whole = statistics.median(sum(round_) for round_ in times["ours whole"])
    b, w = (statistics.median(round_[i] for round_ in times["ours split"]) for i in (0, 1))
    ratio, share = _ratio(times, "ours split", "ours whole"), held["ours"] / held["torch"]
    print(f"B {b * 1e3:.1f} ms, W {w * 1e3:.1f} ms; as one function {whole * 1e3:.1f} ms; {len(times['ours whole'])} rounds")
    print(f"(B + W) / BW, zbfx:                {ratio:.3f}   (bound {MOST_TIME})")
    print(f"(I + W) / B, torch eager:          {_ratio(times, 'torch split', 'torch whole'):.3f}")
    print(f"zbfx (B + W) / torch (I + W):      {_ratio(times, 'ours split', 'torch split'):.3f}")
    for name, size in held.items():
        print(f"held after B, {name + ':':<38} {size / 2**20:7.2f} MiB")
    print(f"held after B, zbfx / torch:        {share:.3f}   (bound {MOST_HELD})")
    missed = [what for what, found, most in (("time", ratio, MOST_TIME), ("memory", share, MOST_HELD)) if found > most]
    print(f"missed: {', '.join(missed)}" if missed else "both bounds hold; all gradients are equal bit for bit")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
