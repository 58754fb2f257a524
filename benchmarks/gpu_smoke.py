"""Checks zbfx on a machine with one GPU, unattended: ranks are threads that share it. Prints what was checked.

    python benchmarks/gpu_smoke.py            # exit code 0: all held; 1: something did not; 2: there is no GPU

For five models and three schedules: loss, gradients and buffers bitwise equal to one process on the same GPU; bytes held as
predicted; no host synchronisation inside a step. Then, with a larger GPT: delays put into the rank programs change no bit
(streams and events are right); the host runs ahead of the device; actions of different ranks overlap.

Kernels that add in no fixed order (embedding and index backwards, attention) have deterministic variants, which both sides
are told to use. NCCL needs a GPU per process, and is not checked here.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic across streams with it; read when CUDA starts
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from gpt import GPT, next_token_loss
from torch.utils import _pytree as pytree

import zbfx
from tests.models import MODELS, Case
from tests.reference import Reference, differences, memory_differences

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
HUGGING_FACE = ("gpt2", "llama", "bert")
STAGES, MICROBATCHES, SAMPLES = 4, 6, 2
DEVICE = "cuda"


def main() -> int:
    """Run every check; count the failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048, help="of the larger GPT (a multiple of 64)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees no CUDA device on this machine. Nothing was checked.", file=sys.stderr)
        return 2
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")
    checks = Checks()
    for name in MODELS:
        if name in HUGGING_FACE and find_spec("transformers") is None:
            print(f"skipped {name}: transformers is not installed")
            continue
        for schedule in SCHEDULES:
            checks.run(f"{name}, {schedule}", lambda name=name, schedule=schedule: _equal_and_known(name, schedule))
    large = Large(options.width)
    checks.run("delays in the rank programs", large.delays)
    checks.run("the host runs ahead", large.host_runs_ahead)
    checks.run("ranks overlap", large.overlap)
    print(f"{checks.failed} of {checks.count} checks failed" if checks.failed else f"all {checks.count} checks held")
    return 1 if checks.failed else 0


class Checks:
    """Runs checks one by one; a failure is printed and counted, and the rest goes on."""

    def __init__(self) -> None:
        self.count = self.failed = 0

    def run(self, name: str, check: Callable[[], str]) -> None:
        """check() says what it found, or raises."""
        self.count += 1
        begun = time.perf_counter()
        try:
            print(f"ok      {name}: {check()} ({time.perf_counter() - begun:.1f} s)", flush=True)
        except Exception as error:
            self.failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, Wrong):
                traceback.print_exc()


class Wrong(Exception):
    """A check found something else than it should."""


# ---------------------------------------------------------------- five small models


def _equal_and_known(name: str, schedule: str) -> str:
    """Bits, bytes and synchronisation of one model under one schedule."""
    case = _on_gpu(MODELS[name]())
    wanted = Reference(case, SAMPLES).step(MICROBATCHES)
    model = case.fresh()
    args, kwargs, target = case.batch(MICROBATCHES * SAMPLES)
    pipe = _compiled(model, args, kwargs, target, case.loss, schedule)
    pipe.watch(times=False, memory=True)
    loss = pipe.step(*args, target=target, **kwargs)
    _refuse("not bitwise equal to one process", differences(model, loss, wanted))
    _refuse("bytes held", memory_differences(pipe.plan, pipe.observed, range(STAGES)))
    elsewhere = [n for n, t in model.state_dict().items() if not t.is_cuda]
    _refuse("not on the GPU", elsewhere)
    pipe.watch(times=False, memory=False)
    pipe.step(*args, target=target, **kwargs)
    with _no_synchronisation():
        pipe.step(*args, target=target, **kwargs)
    return f"{len(wanted.grads)} gradients bitwise equal, bytes as predicted on {STAGES} ranks, no host synchronisation"


def _on_gpu(case: Case) -> Case:
    return Case(case.model.to(DEVICE), case.loss, lambda n: _moved(case.batch(n)))


def _moved(batch: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(DEVICE), batch)


def _compiled(model: torch.nn.Module, args: Any, kwargs: Any, target: Any, loss: Any, schedule: str) -> zbfx.Pipeline:
    return zbfx.compile(
        model,
        STAGES,
        example_inputs=args,
        example_kwargs=kwargs,
        example_target=target,
        loss=loss,
        microbatches=MICROBATCHES,
        schedule=schedule,
        device=DEVICE,
    )


def _refuse(what: str, found: list[str]) -> None:
    if found:
        raise Wrong(f"{what}: {'; '.join(found[:8])}{' ...' if len(found) > 8 else ''}")


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    """Within, an operator that makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------- a GPT that keeps the device busy


class Large:
    """A pipeline whose kernels take longer than their launch."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(layers=8, width=width, heads=width // 64, vocab=4096, length=512).to(DEVICE)
        self.ids = torch.randint(0, 4096, (MICROBATCHES * SAMPLES, 512), device=DEVICE)
        self.pipe = _compiled(self.model, (self.ids,), {}, self.ids, next_token_loss, "zb-h1")

    def _gradients(self, pipe: zbfx.Pipeline) -> list[torch.Tensor]:
        self.model.zero_grad()
        loss = pipe.step(self.ids, target=self.ids)
        torch.cuda.synchronize()
        return [loss, *[p.grad.clone() for p in self.model.parameters() if p.grad is not None]]

    def delays(self) -> str:
        """A kernel that waits for the wrong thing, or memory given back too early, would show as other bits."""
        wanted = self._gradients(self.pipe)
        rounds, added = 5, 0
        for number in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                self.pipe.plan.save(folder)
                added += sum(_delay(path, random.Random(number)) for path in Path(folder).glob("rank_*.py"))
                found = self._gradients(zbfx.load(folder, self.model, loss=next_token_loss, device=DEVICE))
            wrong = [str(i) for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)]
            _refuse(f"round {number}: other bits in the loss (0) or gradients", wrong)
        return f"{added} delays at random places in {rounds} rounds changed no bit of {len(wanted)} results"

    def host_runs_ahead(self) -> str:
        """`step` returns while the device still works."""
        self._gradients(self.pipe)
        begun = time.perf_counter()
        with _no_synchronisation():
            self.pipe.step(self.ids, target=self.ids)
        host = time.perf_counter() - begun
        done = torch.cuda.current_stream().record_event()
        was_done = done.query()
        torch.cuda.synchronize()
        device = time.perf_counter() - begun
        if was_done:
            raise Wrong(
                f"the device was done when step returned after {host * 1e3:.1f} ms (a larger --width gives it more to do)"
            )
        return f"step returned after {host * 1e3:.1f} ms, the device was done after {device * 1e3:.1f} ms"

    def overlap(self) -> str:
        """Actions of different ranks run at the same time, as measured by events on their streams."""
        self._gradients(self.pipe)
        self.pipe.watch(times=True)
        self._gradients(self.pipe)
        timeline = self.pipe.observed.timeline
        self.pipe.watch(times=False)
        work = sum(span.end - span.start for rank in timeline.spans for span in rank)
        at_once = work / timeline.makespan
        if at_once <= 1.05:
            raise Wrong(f"actions add up to {at_once:.2f} times the step: ranks took turns")
        return f"step of {timeline.makespan * 1e3:.1f} ms, in which actions of {at_once:.2f} ranks ran at a time on average"


def _delay(path: Path, rng: random.Random) -> int:
    """Put kernels that wait up to about 3 ms into a rank's step, before some of its lines; how many."""
    head, step = path.read_text().split("def step(rank):\n")
    lines, added = [], 0
    for line in step.splitlines():
        if re.match(r"    \S", line) and rng.random() < 0.25:
            lines.append(f"    torch.cuda._sleep({rng.randrange(5_000_000)})")
            added += 1
        lines.append(line)
    path.write_text(f"{head}def step(rank):\n" + "\n".join(lines) + "\n")
    return added


if __name__ == "__main__":
    sys.exit(main())
