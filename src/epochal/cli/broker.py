"""`epochal broker`: a Kafka-protocol broker without a JVM, on one machine or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from epochal.cli.output import (
    EXIT_FAILED,
    AsJson,
    Certificate,
    CertificateKey,
    ClientCa,
    Port,
    message,
    moment,
    number,
    print_address,
    show_json,
    show_table,
)
from epochal.errors import Misconfigured, not_installed


def broker(  # noqa: PLR0917  typer reads the options off the signature
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA | status URL]",
            help="The folder, as --data; or show the members of the cluster with this journal.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The folder that holds topics and transactions.")
    ] = None,
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
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Be a member of a cluster with its journal there: postgresql://…#name, "
            "etcd://…/prefix, s3://…, or a folder for members on one machine.",
        ),
    ] = None,
    member: Annotated[
        str | None, typer.Option(help="The name of this member, its own for life.")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where clients reach this member.")
    ] = None,
    segments: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Where snapshots keep records, and batches over 64 KB go, if not in the journal.",
        ),
    ] = "",
    peer_port: Annotated[
        int, typer.Option(help="Where members ask each other how they are; 0: any free port.")
    ] = 0,
    is_json: AsJson = False,
) -> None:
    """
    Run a Kafka-protocol broker, without a JVM.

    It has a real transaction coordinator, for development, tests and small loads. With --cluster it
    runs on several machines: one member is active, the others take over within seconds. For large
    volumes use Apache Kafka: only the address changes.

    Example: epochal broker /srv/broker

    Example: epochal broker status postgresql://etl@db/shop#broker
    """
    if what and (len(what) > 1 or what[0] == "status"):
        _status(what, is_json=is_json)
        return
    if (data is None) == (not what):
        raise Misconfigured(
            "--data is missing or given twice",
            "name the folder of this broker: epochal broker --data FOLDER",
        )
    folder = data if data is not None else Path((what or [])[0])
    try:
        from epochal.broker.server import serve  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        raise not_installed("the broker", error.name, "kafka") from error
    serve(
        folder,
        host,
        port,
        fsync=is_synced,
        users=_read_users(users),
        certificate_file=_text(certificate),
        key_file=_text(key),
        client_ca_file=_text(client_ca),
        metrics_port=metrics_port,
        cluster=_cluster(cluster, member, advertise, segments, peer_port),
        ready=print_address,
    )


def _cluster(
    journal: str | None, member: str | None, advertise: str | None, segments: str, peer_port: int
) -> dict[str, Any] | None:
    if journal is None:
        if member or advertise or segments:
            raise Misconfigured(
                "--member, --advertise and --segments are for members of a cluster",
                "add --cluster URL, or leave them out",
            )
        return None
    if not member or not advertise:
        raise Misconfigured(
            "a member of a cluster needs a name, and an address that clients reach it by",
            "add --member NAME --advertise HOST:PORT",
        )
    return {
        "journal": journal,
        "member": member,
        "advertised": advertise,
        "segments": segments,
        "peer_port": peer_port,
    }


def _status(what: list[str], *, is_json: bool) -> None:
    if len(what) != 2 or what[0] != "status":
        raise Misconfigured(
            f"epochal broker {' '.join(what)}: not known", "epochal broker status URL"
        )
    try:
        from epochal.broker.shared.status import cluster_status  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        raise not_installed("the broker", error.name, "kafka") from error
    report = cluster_status(what[1])
    if is_json:
        show_json(report)
    else:
        show_table(
            ["member", "role", "since", "generation", "slot", "lag", "release", "address"],
            [
                [
                    one.member,
                    one.role,
                    moment(one.since),
                    number(one.generation),
                    number(one.slot),
                    number(one.lag),
                    one.release,
                    one.address,
                ]
                for one in report.members
            ],
            optional=["release", "since"],
        )
        snapshot = number(report.snapshot) if report.snapshot else "none"
        message(f"{report.journal}: {number(report.slots)} slots, newest snapshot: {snapshot}")
    if sum(one.role == "active" for one in report.members) != 1:
        raise typer.Exit(EXIT_FAILED)


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
