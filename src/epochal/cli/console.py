"""`epochal console`: the web console."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from epochal.cli.output import message
from epochal.config.resolve_target import open_target
from epochal.errors import EpochalError, Misconfigured, not_installed
from epochal.kit.secrets import env, file
from epochal.storage.urls import scheme_of


def console(  # noqa: PLR0917  typer reads the options off the signature
    checkpoints: Annotated[
        str, typer.Option(help="A folder or URL above any number of checkpoints.")
    ],
    pipeline: Annotated[
        list[str] | None,
        typer.Option(help="module:object or YAML file of a pipeline that it may query."),
    ] = None,
    host: Annotated[str, typer.Option(help="Loopback, unless a token is given.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8440,
    token_env: Annotated[
        str | None, typer.Option(help="The environment variable that holds the token.")
    ] = None,
    token_file: Annotated[str | None, typer.Option(help="The file that holds the token.")] = None,
    name: Annotated[
        list[str] | None, typer.Option("--name", help="A host name that browsers use for it.")
    ] = None,
) -> None:
    """
    Serve a web console of all pipelines: what is in doubt, since when, and what is safe to do.

    Without a token it is read-only. With a token users must log in, and can recover and resolve
    the pipelines that are named with --pipeline.

    Example: epochal console --checkpoints s3://lake/checkpoints --token-env CONSOLE_TOKEN
    """
    try:
        import uvicorn  # noqa: PLC0415  an extra

        from epochal.console.access import LOOPBACK, require_safe  # noqa: PLC0415  the same
        from epochal.console.app import console as application  # noqa: PLC0415  the same
    except ModuleNotFoundError as error:
        raise not_installed("the console", error.name, "console") from error
    token = _token(token_env, token_file)
    require_safe(host, token)
    app = application(
        checkpoints,
        targets=tuple(pipeline or ()),
        token=token,
        hosts=(*LOOPBACK, host, *(name or ())),
    )
    _require_place(checkpoints)
    _report_unknown(pipeline or ())
    with _listening(host, port) as listening:
        address = f"http://{host}:{listening.getsockname()[1]}/"
        message(f"the console of {checkpoints}: {address} (Ctrl-C stops it)")
        config = uvicorn.Config(app, log_level="warning", server_header=False)
        uvicorn.Server(config).run(sockets=[listening])


def _require_place(checkpoints: str) -> None:
    """A folder that is not there is a mistake; a bucket or prefix may be empty still."""
    if scheme_of(checkpoints) is None and not Path(checkpoints).exists():
        raise Misconfigured(
            f"there is no folder {checkpoints}", "give the folder or URL above the checkpoints"
        )


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise Misconfigured(
            f"the console can't listen at {host}:{port}: {error.strerror}",
            "another program uses the port: give another one with --port, or 0 for any",
        ) from error


def _report_unknown(pipelines: Sequence[str]) -> None:
    """At once, and not when somebody acts; the console of the others is served all the same."""
    for one in pipelines:
        try:
            open_target(one).require_sinks()
        except EpochalError as error:
            message(f"--pipeline {one} can't be queried: {error}")


def _token(variable: str | None, path: str | None) -> str | None:
    if variable is not None and path is not None:
        raise Misconfigured("--token-env and --token-file are both given", "give one of them")
    if variable is None and path is None:
        return None
    try:
        return file(path).reveal() if path is not None else env(str(variable)).reveal()
    except Misconfigured as error:
        # Its own hint is for a pipeline, which reads secrets on executors too.
        way_out = "set it before the console starts" if path is None else "name a readable file"
        raise Misconfigured(error.message, way_out) from None
