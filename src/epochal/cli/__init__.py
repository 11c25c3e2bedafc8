"""The command line: one file a verb. Data goes to stdout, talk to stderr."""

from __future__ import annotations

import signal
import sys

import typer

from epochal.cli.broker import broker
from epochal.cli.demo import demo
from epochal.cli.life import adopt, fork, give_up, rename
from epochal.errors import EpochalError

_INTERRUPTED = 130
_TERMINATED = 143

app = typer.Typer(
    name="epochal",
    help="Exactly-once sinks for Spark Structured Streaming.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(broker)
app.command()(adopt)
app.command()(fork)
app.command()(rename)
app.command(name="give-up")(give_up)


def main() -> None:
    """Run a verb; an error of ours ends as one message with its hint and its exit code."""
    # Ends like Ctrl-C: what was started is stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        app()
    except EpochalError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(_INTERRUPTED)
