"""`epochal console`: the web console."""

from __future__ import annotations

from typing import Annotated

import typer

from epochal.cli.output import message
from epochal.errors import Misconfigured
from epochal.kit.secrets import env, file


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
        raise Misconfigured(
            f"the console needs a package that is not installed: {error.name}",
            'pip install "epochal[console]"',
        ) from error
    token = _token(token_env, token_file)
    require_safe(host, token)
    app = application(
        checkpoints,
        targets=tuple(pipeline or ()),
        token=token,
        hosts=(*LOOPBACK, host, *(name or ())),
    )
    message(f"the console of {checkpoints}: http://{host}:{port}/ (Ctrl-C stops it)")
    uvicorn.run(app, host=host, port=port, log_level="warning", server_header=False)


def _token(variable: str | None, path: str | None) -> str | None:
    if variable is not None and path is not None:
        raise Misconfigured("--token-env and --token-file are both given", "give one of them")
    if variable is not None:
        return env(variable).reveal()
    return None if path is None else file(path).reveal()
