"""Models and users with the optimizer in the programs, on real ranks: each worker returns what is wrong on its rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import zbfx
from tests import modes
from tests.distributed import weights_modes
from tests.distributed.failing import Fragile, bad_batch, good_batch
from tests.test_weights_models import MODES, STEPS, Tied, adafactor, look, reference
from zbfx.runtime import Channel

SGD = modes.OPTIMIZERS["momentum"]


def everything(channel: Channel, folder: str, *table: Any) -> None:
    """Checks that share the processes, written to a file; then a step that fails, which ends them."""
    found = {}
    for weights in MODES[1:]:
        found[f"{weights}, tied"] = _tied(weights)
        found[f"{weights}, frozen"] = _frozen(weights, channel.index)
    results = {"models": found, "table": weights_modes.table(channel, folder, *table)}
    Path(folder, f"found {channel.index}").write_text(json.dumps(results))
    _fail(channel.index, folder)


def _tied(weights: str) -> list[str]:
    """A weight on the first rank and the last, looked at between steps, against one process; the copies are equal."""
    pipe = modes.pipeline(Tied(), optimizer=adafactor, weights=weights, max_norm=1e9, schedule="zb-h1")
    wrong: list[str] = []

    def between(step: int) -> None:
        if step in (2, 6):
            before, after = look(pipe)
            wrong.extend(f"{n} after step {step}" for n in modes.unlike(before, after))

    run = modes.drive(pipe, STEPS, between=between)
    _, parameters = reference(Tied(), adafactor, STEPS, delayed=weights == "2bw")
    wanted = dict(zip((n for n, _ in Tied().named_parameters()), parameters, strict=True))
    wrong += [n for n, v in run.values.items() if not torch.allclose(v, wanted[n], rtol=1e-4, atol=1e-5)]
    assert pipe._engine is not None
    copies = pipe._engine._channels[0].all_gather(run.values["table"].tolist() if "table" in run.values else None)
    held = [c for c in copies if c is not None]
    wrong += [] if len(held) == 2 and held[0] == held[1] else [f"{len(held)} copies of the table, not equal"]
    pipe.close()
    return wrong


def _frozen(weights: str, rank: int) -> list[str]:
    """The first rank has nothing to train."""
    of, twin = modes.model(dropout=0.0), modes.model(dropout=0.0)
    for each in (of, twin):
        each[:2].requires_grad_(False)
    pipe = modes.pipeline(of, 2, optimizer=SGD, weights=weights, max_norm=1e9, cuts=["2"])
    rate = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.9)
    run = modes.drive(pipe, STEPS, between=lambda _: rate.step())
    losses, parameters = reference(
        twin, SGD, STEPS, delayed=weights == "2bw", schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)
    )
    wrong = [f"loss {i}" for i, (a, b) in enumerate(zip(run.losses, losses, strict=True)) if not modes.same(a, b)]
    if rank == 1:
        names = [n for n, p in modes.model().named_parameters() if int(n[0]) >= 2]
        wrong += modes.unlike(run.values, dict(zip(names, parameters, strict=True)))
    pipe.close()
    return wrong


def _fail(rank: int, folder: str) -> None:
    """Within a stream, after two good steps rank 1 fails in 1F2; what the other is told when it steps, flushes and reads."""
    options: dict[str, Any] = {"microbatches": 4, "schedule": "1f1b", "cuts": ["second"], "max_norm": 1e9}
    pipe = zbfx.compile(
        Fragile("raise"), 2, optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9), weights="2bw", **options
    )
    for _ in range(2):
        pipe.step(good_batch())
    try:
        pipe.step(bad_batch())
    except zbfx.RankError as error:
        told = [str(error)]
        for use in (lambda: pipe.step(good_batch()), pipe.flush, pipe.state_dict):
            try:
                use()
            except zbfx.RankError as again:
                told.append(str(again))
        Path(folder, f"told {rank}").write_text("|".join(told))
        raise
