"""`epochal receiver`: the reference receiver of `Http` sinks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epochal.cli.output import Certificate, CertificateKey, ClientCa, Port, print_address
from epochal.errors import Misconfigured
from epochal.receiver.handlers import load_handler


def receiver(  # noqa: PLR0917  typer reads the options off the signature
    data: Annotated[Path, typer.Option(help="The folder that holds receiver.sqlite.")],
    port: Port = 8765,
    host: Annotated[
        str, typer.Option(help="Loopback unless tokens or client certificates are required.")
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None, typer.Option(help="Bearer tokens, one per line; each of them is accepted.")
    ] = None,
    handler: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Called inside the transaction of every commit."
        ),
    ] = None,
    keeps_rows: Annotated[
        bool | None,
        typer.Option(
            "--keep-rows/--drop-rows",
            help="Keep committed rows in the table `rows`; by default where there is no handler.",
        ),
    ] = None,
    body_mb_max: Annotated[int, typer.Option(min=1, help="The largest accepted body, in MB.")] = 64,
    certificate: Certificate = None,
    key: CertificateKey = None,
    client_ca: ClientCa = None,
) -> None:
    """
    Receive rows of Http sinks in two phases, durable in one SQLite file.

    Committed rows can be read by SQL or by GET /rows, or are passed to a function (--handler).

    Example: epochal receiver --data /srv/received --token-file tokens
    """
    from epochal.receiver.server import Access, Tls, serve  # noqa: PLC0415  needs epochal[receiver]

    if (certificate is None) != (key is None) or (client_ca is not None and key is None):
        raise Misconfigured("TLS needs both a certificate and its key", "--certificate and --key")
    serve(
        data,
        host=host,
        port=port,
        access=Access(tokens=_tokens(token_file), body_bytes_max=body_mb_max * 1024 * 1024),
        tls=(
            None
            if certificate is None or key is None
            else Tls(certificate=certificate, key=key, client_ca=client_ca)
        ),
        handler=None if handler is None else load_handler(handler),
        keeps_rows=handler is None if keeps_rows is None else keeps_rows,
        ready=print_address,
    )


def _tokens(file: Path | None) -> tuple[bytes, ...]:
    if file is None:
        return ()
    try:
        lines = [line.strip() for line in file.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise Misconfigured(
            f"--token-file: {file}: {error.strerror}", "name a readable file"
        ) from error
    if not lines:
        raise Misconfigured(f"--token-file: {file} holds no token", "write one token per line")
    return tuple(lines)
