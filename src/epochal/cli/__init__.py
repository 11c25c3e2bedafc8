"""The command line: one file a verb. Data goes to stdout, talk to stderr."""

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
    "doctor": "doctor:doctor",
    "verify": "verify:verify",
    "recover": "recover:recover",
    "resolve": "resolve:resolve",
    "adopt": "life:adopt",
    "fork": "life:fork",
    "rename": "life:rename",
    "drop": "drop:drop",
    "grants": "grants:grants",
    "log": "log:log",
    "metrics": "metrics:metrics",
    "console": "console:console",
}
"""Each verb with its file: only the one that is typed is loaded, as some bring heavy packages."""


def application(verbs: Iterable[str] = tuple(VERBS)) -> typer.Typer:
    """The command line with these verbs."""
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


def _version(is_asked: bool) -> None:
    if is_asked:
        sys.stdout.write(f"epochal {__version__}\n")
        raise typer.Exit


def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the whole stack trace of an error.")
    ] = False,
    version: Annotated[  # noqa: ARG001  asked by its callback
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_version),
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
        typed = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
        application([typed] if typed in VERBS else tuple(VERBS))()
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
    java = getattr(error, "java_exception", None)
    text = str(error if java is None else java.toString())
    first = (text.strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}\nhint: `epochal --debug …` shows the stack trace"
