"""Start ranks: as threads of this process, as local processes, or as what torchrun started."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zbfx.errors import InputError, RankError
from zbfx.runtime.channel import Channel
from zbfx.runtime.failures import Alarm, Failure, describe
from zbfx.runtime.gloo import Gloo
from zbfx.runtime.nccl import Nccl
from zbfx.runtime.rank import Rank, execute


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands among all: its rank of `size`, and its number on this machine."""

    rank: int
    size: int
    local_rank: int


def place() -> Place | None:
    """This process's place: of the process group if there is one, else what torchrun's variables say; None if it is alone."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if dist.is_available() and dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size(), local)
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), local)


def namespace(number: int) -> str:
    """Prefix in the store of what concerns the `number`th channel that the processes open."""
    return f"zbfx/{number}"


_connected = 0  # channels opened by this process: the same number on all ranks, for all open them together
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()  # those of them that are still there


def _shared_alarm() -> Alarm:
    """One for all channels of this process that work: a launcher's channel and a pipeline's stop together."""
    return next((c.alarm for c in _channels if c.alarm.failure is None), None) or Alarm()


def _action() -> str:
    """What this process is doing, on whichever of its channels."""
    return next((c.action for c in _channels if c.action), "")


def connect(
    device: torch.device | str = "cpu",
    *,
    pairs: Sequence[tuple[int, int]] = (),
    apart: Sequence[str] = (),
    dead_after: float = 5.0,
    timeout: float = 1800.0,
    store: dist.Store | None = None,
) -> Channel:
    """This process's channel: NCCL if `device` is CUDA (`pairs` then lists every (from, to) the programs use, `apart` the kinds
    of messages that are not sent in the order in which they are posted), else gloo.

    All ranks call it, alike. It joins the process group that torchrun's variables describe if none exists. A rank counts as
    dead after `dead_after` seconds without a heartbeat; a live one may let others wait `timeout` seconds for a message.
    store: a connection for the heartbeats alone (by default a new one to the process group's store).
    """
    global _connected
    device = torch.device(device)
    if device.type == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # read when CUDA starts; see nccl.py
        torch.cuda.set_device(device)
    own = own_store(device)
    store = dist.PrefixStore(namespace(_connected), own if store is None else store)
    _connected += 1
    host = 0 if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and "RANK" in os.environ else -1
    options: Any = {"dead_after": dead_after, "timeout": timeout, "host": host, "alarm": _shared_alarm(), "action": _action}
    channel = Nccl(store, device, pairs, apart=apart, **options) if device.type == "cuda" else Gloo(store, **options)
    _channels.add(channel)
    return channel


def own_store(device: torch.device) -> dist.Store:
    """A connection to the process group's store; the group that torchrun's variables describe is joined if none exists."""
    if not dist.is_initialized():
        if place() is None:
            raise InputError("no process group and none of torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    default: Any = _get_default_store()  # cloned: a connection of our own, which nobody's blocking call can occupy
    store: dist.Store = default.clone()
    return store


def run_threads(
    ranks: Sequence[Rank], steps: Sequence[Callable[[Rank], Any]], *, streams: bool = False, grace: float = 30.0
) -> None:
    """One step of every rank of this process, a thread each. RankError is the first failure's; all threads have ended then,
    but for one that does not come back from its computation within `grace` seconds. Afterwards the channels can be used again.
    """
    alarm = ranks[0].channel.alarm
    if alarm.failure is not None:
        for rank in ranks:
            rank.channel.reset()
        alarm.reset()
    errors: dict[int, BaseException] = {}
    threads = [_thread(rank, step, errors, streams) for rank, step in zip(ranks, steps, strict=True)]
    try:
        for thread in threads:
            thread.start()
        _join(threads, lambda: alarm.failure is not None, grace)
    except BaseException as error:  # KeyboardInterrupt: stop the ranks too
        alarm.ring(Failure(-1, "", describe(error)))
        _join(threads, lambda: True, grace)
        raise
    _rejoin_streams(ranks)
    if alarm.failure is not None:
        raise errors.get(alarm.failure.rank) or RankError(str(alarm.failure))


def _thread(rank: Rank, step: Callable[[Rank], Any], errors: dict[int, BaseException], streams: bool) -> threading.Thread:
    """A thread, not started yet, that runs the step on the rank's own stream and keeps what it raises."""
    stream = _stream(rank)
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(rank.device))  # the caller's optimizer has stepped before
    cpu_threads = torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(cpu_threads)  # oneDNN asks OpenMP, whose count for a new thread is the environment's
        with ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            try:
                execute(rank, step, streams=streams)
            except BaseException as error:
                errors[rank.index] = error

    return threading.Thread(target=run, name=f"rank {rank.index}", daemon=True)


def _join(threads: Sequence[threading.Thread], failed: Callable[[], bool], grace: float) -> None:
    """Wait for all threads; once something has failed, `grace` seconds at most."""
    end: float | None = None
    for thread in threads:
        while thread.is_alive() and (end is None or time.monotonic() < end):
            thread.join(0.1)
            if end is None and failed():
                end = time.monotonic() + grace


_streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def _stream(rank: Rank) -> torch.cuda.Stream | None:
    """The rank's stream on CUDA, the same for every step: the caching allocator keeps a pool of memory for each."""
    if rank.device.type != "cuda":
        return None
    key = (rank.device, rank.index)
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(rank.device)
    return _streams[key]


def _rejoin_streams(ranks: Sequence[Rank]) -> None:
    """On CUDA, the caller's stream goes on after the ranks': its optimizer reads what they computed."""
    for rank in ranks:
        if (stream := _stream(rank)) is not None:
            torch.cuda.current_stream(rank.device).wait_stream(stream)
