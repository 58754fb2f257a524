"""Local processes, one per rank, over gloo: for the command line, the demo and the tests."""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from zbfx.errors import RankError
from zbfx.runtime.failures import Failure, describe
from zbfx.runtime.heartbeat import last_action, report
from zbfx.runtime.launch import connect, namespace


def run_processes(
    fn: Callable[..., Any],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    dead_after: float = 5.0,
    timeout: float = 1800.0,
    threads: int = 1,
) -> list[Any]:
    """fn(channel, *args) in each of `nprocs` new processes; their results, which are JSON values, in rank order.

    fn is a function of a module (processes import it by name). channel: see launch.connect; threads: CPU threads of each.
    RankError names the rank, action and cause of the first failure, a killed process included; no process is left then.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    children: list[_Child] = []
    try:
        for rank in range(nprocs):
            ours, theirs = context.Pipe(duplex=False)
            options = {"rank": rank, "size": nprocs, "port": store.port, "dead_after": dead_after, "timeout": timeout}
            process = context.Process(target=_child, args=(fn, tuple(args), theirs, threads, options), name=f"rank {rank}")
            process.start()
            theirs.close()
            children.append(_Child(rank, process, ours))
        return _collect(children, dist.PrefixStore(namespace(0), store), grace=2 * dead_after + 5)
    finally:
        for child in children:
            child.end()


class _Child:
    """A process and what it reported."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection) -> None:
        self.rank, self.process, self.pipe = rank, process, pipe
        self.report: dict[str, Any] | None = None

    def read(self) -> None:
        """Its report, if it wrote one."""
        try:
            if self.report is None and self.pipe.poll():
                self.report = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return

    def failure(self, store: dist.Store) -> Failure | None:
        """Why it failed, if it did and has ended."""
        if self.process.exitcode is None or (self.report and "value" in self.report):
            return None
        if self.report:
            return Failure.from_json(self.report["failure"])
        code = self.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return Failure(self.rank, last_action(store, self.rank), how)

    def end(self) -> None:
        """No process remains, whatever state it is in."""
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(2)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def _collect(children: Sequence[_Child], store: dist.Store, grace: float) -> list[Any]:
    """All results; or the first failure, once everybody has ended or `grace` seconds after it."""
    first: Failure | None = None
    end: float | None = None
    running = list(children)
    while running and (end is None or time.monotonic() < end):
        wait([*(child.process.sentinel for child in running), *(c.pipe for c in running if c.report is None)], timeout=0.5)
        for child in running:
            child.read()
        ended = [child for child in running if not child.process.is_alive()]
        running = [child for child in running if child not in ended]
        for child in ended:
            child.read()  # what it wrote between the last look and its end
        for failure in filter(None, (child.failure(store) for child in ended)):
            first = report(store, failure) if first is None else first
            end = end or time.monotonic() + grace
        if first is not None and all(child.rank == first.rank for child in running):  # frozen: it will not end by itself
            end = min(end or 0.0, time.monotonic() + 1)
    if first is None:
        return [child.report["value"] if child.report else None for child in children]
    error = RankError(str(first))
    for child in children:
        if child.rank == first.rank and child.report and child.report.get("traceback"):
            error.add_note(f"in rank {first.rank}:\n{child.report['traceback']}")
    raise error


def _child(fn: Callable[..., Any], args: Sequence[Any], pipe: Connection, threads: int, options: dict[str, Any]) -> None:
    """A process's life: join, run, report, leave."""
    torch.set_num_threads(threads)
    rank, limit = options["rank"], timedelta(seconds=options["timeout"])
    store, watch = (dist.TCPStore("127.0.0.1", options["port"], is_master=False, timeout=limit) for _ in range(2))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options["size"], timeout=limit)
    channel = connect(dead_after=options["dead_after"], timeout=options["timeout"], store=watch)
    try:
        report_ = {"value": fn(channel, *args)}
        pipe.send_bytes(json.dumps(report_).encode())
    except BaseException as error:
        cause = str(error) if isinstance(error, RankError) else describe(error)
        failure = channel.alarm.ring(Failure(rank, channel.action, cause))
        text = "".join(traceback.format_exception(error)) if failure.rank == rank else ""
        pipe.send_bytes(json.dumps({"failure": failure.to_json(), "traceback": text}).encode())
        sys.exit(1)
    finally:
        channel.close()
        dist.destroy_process_group()
