"""The command line: a module per verb. Data goes to stdout, messages to stderr."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from epochal import __version__
from epochal.errors import EpochalError

_FAILED = 1
_INTERRUPTED = 130
_TERMINATED = 143
_DEBUG = "EPOCHAL_DEBUG"

VERBS = {
    "demo": "demo:demo",
    "init": "validate:init",
    "validate": "validate:validate",
    "run": "run:run",
    "broker": "broker:broker",
    "receiver": "receiver:receiver",
    "status": "status:status",
    "epochs": "epochs:epochs",
    "visible": "visible:visible",
    "doctor": "doctor:doctor",
    "verify": "verify:verify",
    "recover": "recover:recover",
    "resolve": "resolve:resolve",
    "repair": "repair:repair",
    "pause": "pause:pause",
    "resume": "pause:resume",
    "adopt": "identity:adopt",
    "fork": "identity:fork",
    "rename": "identity:rename",
    "compact": "compact:compact",
    "drop": "drop:drop",
    "grants": "grants:grants",
    "log": "log:log",
    "metrics": "metrics:metrics",
    "console": "console:console",
}
"""The module of each verb. Only the requested one is imported: some need heavy packages."""


def application(verbs: Iterable[str] = tuple(VERBS)) -> typer.Typer:
    """Build the command line with these verbs."""
    app = typer.Typer(
        name="epochal", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )
    app.callback()(options)
    for verb in verbs:
        module, _, name = VERBS[verb].partition(":")
        found = getattr(import_module(f"epochal.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb)
        else:
            app.command(name=verb)(found)
    return app


def _version(is_requested: bool) -> None:
    if is_requested:
        sys.stdout.write(f"epochal {__version__}\n")
        raise typer.Exit


def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the whole stack trace of an error.")
    ] = False,
    version: Annotated[  # noqa: ARG001  used by its callback
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_version),
    ] = False,
) -> None:
    """Exactly-once sinks for Spark Structured Streaming."""
    if debug:
        os.environ[_DEBUG] = "1"


def main() -> None:
    """Run a verb. An error is printed as one message with its hint, and sets the exit code."""
    # Like Ctrl-C, it unwinds the stack, so that servers and Spark are stopped. SIGINT is left to
    # Python: one that the caller ignores, as shells do for background jobs, stays ignored.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        verb = next((one for one in sys.argv[1:] if not one.startswith("-")), None)
        application([verb] if verb in VERBS else tuple(VERBS))()
    except Exception as error:
        if _DEBUG in os.environ:
            raise
        sys.stderr.write(f"error: {_message(error)}\n")
        sys.exit(error.exit_code if isinstance(error, EpochalError) else _FAILED)
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(_INTERRUPTED)


def _message(error: Exception) -> str:
    """Return an error of this package in full, and the first line of any other."""
    if isinstance(error, EpochalError):
        return str(error)
    java = getattr(error, "java_exception", None)
    text = str(error if java is None else java.toString())
    first = (text.strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}\nhint: `epochal --debug …` shows the stack trace"
