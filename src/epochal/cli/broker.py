"""`epochal broker`: a Kafka-protocol broker for one machine, without a JVM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epochal.cli.output import Certificate, CertificateKey, ClientCa, Port, print_address
from epochal.errors import Misconfigured


def broker(  # noqa: PLR0917  typer reads the options off the signature
    data: Annotated[Path, typer.Option(help="The folder that holds topics and transactions.")],
    port: Port = 9092,
    host: Annotated[
        str, typer.Option(help="Loopback unless users or certificates are configured.")
    ] = "127.0.0.1",
    is_synced: Annotated[
        bool,
        typer.Option(
            "--fsync/--no-fsync",
            help="Sync before acknowledging, so that a power cut loses nothing. "
            "Without: for tests and demos.",
        ),
    ] = True,
    users: Annotated[
        Path | None, typer.Option(help="SASL users: a file with name:password lines.")
    ] = None,
    certificate: Certificate = None,
    key: CertificateKey = None,
    client_ca: ClientCa = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics on this port of 127.0.0.1.")
    ] = None,
) -> None:
    """
    Run a Kafka-protocol broker for one machine, without a JVM.

    It has a real transaction coordinator, for development, tests and single-machine use. For more
    than one machine use Apache Kafka: only the address changes.
    """
    from epochal.broker.server import serve  # noqa: PLC0415  needs epochal[kafka]

    serve(
        data,
        host,
        port,
        fsync=is_synced,
        users=_read_users(users),
        certificate_file=_text(certificate),
        key_file=_text(key),
        client_ca_file=_text(client_ca),
        metrics_port=metrics_port,
        ready=print_address,
    )


def _read_users(file: Path | None) -> dict[str, str]:
    if file is None:
        return {}
    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise Misconfigured(f"--users: {file}: {error.strerror}", "name a readable file") from error
    pairs = [line.partition(":") for line in lines]
    if not pairs or not all(name and colon and password for name, colon, password in pairs):
        raise Misconfigured(
            f"--users: {file} has a line that is not name:password", "write one pair per line"
        )
    return {name: password for name, _, password in pairs}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
