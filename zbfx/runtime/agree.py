"""One process answers a question for all: searches that depend on the clock would give each rank another answer.

Whoever asks first works it out; the others wait for the text in the process group's store. Questions are known by their
content, so it does not matter who asks what, or in which order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from zbfx.errors import RankError
from zbfx.runtime.launch import own_store


def agree(question: str, answer: Callable[[], str], *, device: torch.device, timeout: float) -> str:
    """answer() of whichever process asked this question first. Raises RankError where it gives none within `timeout` seconds."""
    store = dist.PrefixStore("zbfx/answers", own_store(device))
    key = hashlib.sha256(question.encode()).hexdigest()
    if store.add(f"asked {key}", 1) == 1:
        text = answer()
        store.set(key, text)
        return text
    try:
        store.wait([key], timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        raise RankError(f"another process searches for a schedule and gave no answer in {timeout:g} s: {error}") from error
    return store.get(key).decode()
