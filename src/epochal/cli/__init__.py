"""The command line: a module per verb. Data goes to stdout, messages to stderr."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from epochal import __version__
from epochal.errors import EpochalError

_FAILED = 1
_INTERRUPTED = 130
_TERMINATED = 143
_DEBUG = "EPOCHAL_DEBUG"

_START, _LOOK, _REPAIR = "Start", "Look", "Stop, recover and repair"
_MOVE, _SERVE = "Move, clean up and grant", "Servers"

VERBS = {
    "demo": ("demo:demo", _START),
    "init": ("validate:init", _START),
    "validate": ("validate:validate", _START),
    "run": ("run:run", _START),
    "status": ("status:status", _LOOK),
    "epochs": ("epochs:epochs", _LOOK),
    "visible": ("visible:visible", _LOOK),
    "doctor": ("doctor:doctor", _LOOK),
    "verify": ("verify:verify", _LOOK),
    "metrics": ("metrics:metrics", _LOOK),
    "log": ("log:log", _LOOK),
    "pause": ("pause:pause", _REPAIR),
    "resume": ("pause:resume", _REPAIR),
    "recover": ("recover:recover", _REPAIR),
    "resolve": ("resolve:resolve", _REPAIR),
    "repair": ("repair:repair", _REPAIR),
    "adopt": ("identity:adopt", _MOVE),
    "fork": ("identity:fork", _MOVE),
    "rename": ("identity:rename", _MOVE),
    "compact": ("compact:compact", _MOVE),
    "drop": ("drop:drop", _MOVE),
    "grants": ("grants:grants", _MOVE),
    "staging": ("grants:staging", _MOVE),
    "console": ("console:console", _SERVE),
    "broker": ("broker:broker", _SERVE),
    "receiver": ("receiver:receiver", _SERVE),
}
"""
The module of each verb, and its group in `epochal --help`. Only the requested one is imported: some
need heavy packages.
"""


def _hide_types_of_flags(params: list[Any]) -> list[Any]:
    """A flag takes no value, and so its help shows no type."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.display_type_rich = lambda ctx: None  # noqa: ARG005
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_types_of_flags(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_types_of_flags(super().get_params(ctx))


def application(verbs: Iterable[str] = tuple(VERBS)) -> typer.Typer:
    """Build the command line with these verbs."""
    app = typer.Typer(
        name="epochal",
        cls=_Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        epilog="Examples and options of a verb: `epochal run --help`.",
    )
    app.callback()(options)
    for verb in verbs:
        path, panel = VERBS[verb]
        module, _, name = path.partition(":")
        found = getattr(import_module(f"epochal.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            for inner in found.registered_commands:
                inner.cls = _Command
            app.add_typer(found, name=verb, cls=_Group, rich_help_panel=panel)
        else:
            app.command(name=verb, cls=_Command, rich_help_panel=panel)(found)
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
    for name in (None, "py4j.clientserver", "py4j.java_gateway"):
        logging.getLogger(name).addFilter(_is_for_a_person)
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


def _is_for_a_person(record: logging.LogRecord) -> bool:
    """Not the stack traces that PySpark logs where a signal ends a call, or the whole JVM."""
    return _DEBUG in os.environ or "py4j" not in Path(record.pathname).parts


def _message(error: Exception) -> str:
    """Return an error of this package in full, and the first line of any other."""
    if isinstance(error, EpochalError):
        return str(error)
    java = getattr(error, "java_exception", None)
    text = str(error if java is None else java.toString())
    first = (text.strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}\nhint: `epochal --debug …` shows the stack trace"
