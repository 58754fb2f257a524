"""The command line: `zbfx VERB ...`. Errors are one line on stderr and exit code 2; --traceback shows the rest."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console

from zbfx import cli_dump, cli_run, cli_schedule
from zbfx.errors import ZbfxError

_DESCRIPTION = "Compile a PyTorch model into one readable program per pipeline rank, look at it, and run it."
_EXAMPLES = f"""examples:
  {cli_dump.EXAMPLE}
  {cli_run.EXAMPLE}
  {cli_schedule.SCHEDULE_EXAMPLE}
  {cli_schedule.SIMULATE_EXAMPLE}
"""


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message} ({self.prog} --help)\n")
        sys.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code: 0, 2 for an error of the user's or the model's, 130 when interrupted."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args, Console(width=_width()))
        sys.stdout.flush()
    except ZbfxError as error:
        if args.traceback:
            raise
        return _complain(error)
    except BrokenPipeError:  # `zbfx dump ... | head`: the reader has left; nothing is to be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def build_parser() -> argparse.ArgumentParser:
    """All verbs."""
    parser = _Parser("zbfx", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traceback", action="store_true", help="on an error, print all of it")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=_Parser)
    cli_dump.add_dump(subparsers)
    cli_run.add_run(subparsers)
    cli_schedule.add_verbs(subparsers)
    for verb in set(subparsers.choices.values()):
        verb.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help="on an error, print all of it")
    return parser


def _width() -> int | None:
    """The terminal's width; 100 columns where there is none and COLUMNS does not say."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else 100


def _complain(error: ZbfxError) -> int:
    first, *rest = str(error).splitlines() or [type(error).__name__]
    more = " (--traceback shows the rest)" if any(line.strip() for line in rest) else ""
    sys.stderr.write(f"zbfx: {first}{more}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
