"""Programs that change weights, run by the strictest channel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from zbfx.ir import Instr
from zbfx.training import Training

NEEDS = {"send": "post", "recv": "send", "sent": "send"}


def training(weights: str, *, checked: bool) -> Training:
    return Training(lambda ps: torch.optim.SGD(ps, lr=0.1), weights, max_norm=1.0 if checked else None)


def run_with_rendezvous(orders: Sequence[Sequence[Instr]], ends: Sequence[Sequence[int]] = ()) -> str:
    """Runs what each rank does: the n-th send of a name returns only when its n-th receive is posted, the n-th receive when that
    was sent. ends[r]: places of rank r at which all ranks meet. Empty if all come to their end, else where they stand. Nothing of
    zbfx's own check is used."""
    heads, done = [0] * len(orders), Counter[tuple[str, str]]()
    segments = [[*e, len(o)] for o, e in zip(orders, ends, strict=True)] if ends else [[len(o)] for o in orders]
    for stops in zip(*segments, strict=True):
        while _moved(orders, heads, stops, done):
            pass
        if any(h < stop for h, stop in zip(heads, stops, strict=True)):
            break
    stuck = [f"rank {r}: {o[h].verb} {o[h].action}" for r, (o, h) in enumerate(zip(orders, heads, strict=True)) if h < len(o)]
    left = [f"{a}: {verb}" for (verb, a), n in done.items() if verb in ("post", "send", "recv", "sent") and n != done["send", a]]
    return "; ".join(stuck or left)


def _moved(orders: Sequence[Sequence[Instr]], heads: list[int], stops: Sequence[int], done: Counter[tuple[str, str]]) -> bool:
    """Every rank goes as far as it can before its stop; whether any has moved."""
    moved = False
    for r, instrs in enumerate(orders):
        while heads[r] < stops[r]:
            key = (instrs[heads[r]].verb, str(instrs[heads[r]].action))
            if key[0] in NEEDS and done[NEEDS[key[0]], key[1]] <= done[key]:
                break
            done[key] += 1
            heads[r] += 1
            moved = True
    return moved


def flagged(instrs: Sequence[Instr], *flags: str) -> list[Instr]:
    """What runs of a step with these flags."""
    return [i for i in instrs if i.when in ("", *flags)]
