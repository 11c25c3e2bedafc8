"""The command line: one file a verb. Data goes to stdout, talk to stderr."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from epochal.cli.broker import broker
from epochal.cli.demo import demo
from epochal.cli.doctor import doctor
from epochal.cli.drop import drop
from epochal.cli.epochs import epochs
from epochal.cli.grants import grants
from epochal.cli.life import adopt, fork, rename
from epochal.cli.log import log
from epochal.cli.receiver import receiver
from epochal.cli.recover import recover
from epochal.cli.resolve import resolve
from epochal.cli.run import run
from epochal.cli.status import status
from epochal.cli.validate import init, validate
from epochal.cli.verify import verify
from epochal.errors import EpochalError

_FAILED = 1
_INTERRUPTED = 130
_TERMINATED = 143
_DEBUG = "EPOCHAL_DEBUG"

app = typer.Typer(
    name="epochal",
    help="Exactly-once sinks for Spark Structured Streaming.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(init)
app.command()(validate)
app.command()(run)
app.command()(broker)
app.command()(receiver)
app.command()(status)
app.command()(epochs)
app.command()(doctor)
app.command()(verify)
app.command()(recover)
app.add_typer(resolve, name="resolve")
app.command()(adopt)
app.command()(fork)
app.command()(rename)
app.command()(drop)
app.command()(grants)
app.add_typer(log, name="log")


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the whole stack trace of an error.")
    ] = False,
) -> None:
    """Exactly-once sinks for Spark Structured Streaming."""
    if debug:
        os.environ[_DEBUG] = "1"


def main() -> None:
    """Run a verb; an error ends as one message with its hint and its exit code."""
    # Ends like Ctrl-C: what was started is stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        app()
    except Exception as error:
        if _DEBUG in os.environ:
            raise
        sys.stderr.write(f"error: {_told(error)}\n")
        sys.exit(error.exit_code if isinstance(error, EpochalError) else _FAILED)
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(_INTERRUPTED)


def _told(error: Exception) -> str:
    """One of ours speaks for itself; anything else is told shortly, with the way to see more."""
    if isinstance(error, EpochalError):
        return str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}\nhint: `epochal --debug …` shows the stack trace"
