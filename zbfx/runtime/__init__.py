"""What a generated rank program needs to run: torch and this package, nothing else of zbfx."""

from zbfx.runtime.agree import agree
from zbfx.runtime.channel import Channel
from zbfx.runtime.failures import Alarm, Failure
from zbfx.runtime.in_process import Exchange, InProcess
from zbfx.runtime.launch import Place, connect, place, run_threads
from zbfx.runtime.memory import Memory
from zbfx.runtime.processes import run_processes
from zbfx.runtime.random import Random
from zbfx.runtime.rank import Rank, execute
from zbfx.runtime.record import Recorder, Span

__all__ = [
    "Alarm",
    "Channel",
    "Exchange",
    "Failure",
    "InProcess",
    "Memory",
    "Place",
    "Random",
    "Rank",
    "Recorder",
    "Span",
    "agree",
    "connect",
    "execute",
    "place",
    "run_processes",
    "run_threads",
]
