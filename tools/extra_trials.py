"""
What one extra must be enough for, tried in an environment that has nothing else: `make release`.

Every module of its parts is imported; its sink is declared and asked, as `check` does. Servers are
not there, so a sink that needs one must answer that nobody does, and not that a package is missing.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

NOBODY = "127.0.0.1:1"

PARTS: Mapping[str, Sequence[str]] = {
    "": ("epochal.cli", "epochal.session", "epochal.sinks.memory", "epochal.kit"),
    "connect": ("epochal.spark",),
    "console": ("epochal.console",),
    "delta": ("epochal.sinks.delta",),
    "demo": ("epochal.demo",),
    "etcd": ("epochal.storage.etcd",),
    "http": ("epochal.sinks.http",),
    "iceberg": ("epochal.sinks.iceberg",),
    "kafka": ("epochal.sinks.kafka", "epochal.kafka", "epochal.broker"),
    "metrics": ("epochal.telemetry.prometheus",),
    "mysql": ("epochal.sinks.mysql",),
    "oracle": ("epochal.sinks.oracle",),
    "otel": ("epochal.telemetry.otel",),
    "postgres": ("epochal.sinks.postgres",),
    "receiver": ("epochal.receiver",),
    "registry": (),
    "s3": ("epochal.sinks.files",),
    "spark": ("epochal.spark",),
    "testing": ("epochal.testing",),
}


def import_all(parts: Sequence[str]) -> None:
    for part in parts:
        module = importlib.import_module(part)
        for found in pkgutil.walk_packages(getattr(module, "__path__", []), f"{part}."):
            importlib.import_module(found.name)


def sinks(folder: Path) -> Mapping[str, Callable[[], Any]]:
    """The sink of an extra; those whose target is a folder are written to."""
    import epochal as ep  # noqa: PLC0415  only as far as its extra reaches

    return {
        "": lambda: ep.Files(folder / "files"),
        "delta": lambda: ep.Delta(folder / "delta", create_table="if_missing"),
        "http": lambda: ep.Http(f"http://{NOBODY}", connect_timeout_s=1, retries_max=0),
        "iceberg": lambda: ep.Iceberg(
            "lake",
            table="shop.orders",
            properties={
                "type": "sql",
                "uri": f"sqlite:///{folder}/lake.db",
                "warehouse": f"file://{folder}",
            },
        ),
        "kafka": lambda: ep.Kafka(NOBODY, topic="orders"),
        "mysql": lambda: ep.MySQL(f"mysql://etl@{NOBODY}/shop", table="t", connect_timeout_s=1),
        "oracle": lambda: ep.Oracle(f"oracle://etl@{NOBODY}/shop", table="t", connect_timeout_s=1),
        "postgres": lambda: ep.Postgres(
            f"postgresql://etl@{NOBODY}/shop", table="t", connect_timeout_s=1
        ),
        "s3": lambda: ep.Files(
            "s3://bucket/orders",
            storage_options={
                "endpoint_url": f"http://{NOBODY}",
                "region": "eu-central-1",
                "access_key_id": "x",
                "secret_access_key": "x",
            },
        ),
    }


def ask(sink: Any, folder: Path) -> str:
    """Start a session on the sink: what it says, or that it took a row."""
    import pyarrow as pa  # noqa: PLC0415  the same

    from epochal import EpochalError, Limits, Session  # noqa: PLC0415  the same

    schema = pa.schema([("id", pa.int64())])
    try:
        with Session(
            "trial",
            sinks=[sink],
            schema=schema,
            log=folder / "log",
            limits=Limits(commit_retry_max_s=1.0, decide_retry_max_s=1.0),
        ) as session:
            session.begin(0)
            session.write([{"id": 1}])
            session.commit()
    except EpochalError as error:
        return f"{error.message} {error.hint}"
    return "took a row"


def main() -> None:
    (extra,) = sys.argv[1:]
    import_all(PARTS[extra])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        declared = sinks(folder).get(extra)
        if declared is not None:
            answer = ask(declared(), folder)
            sys.stderr.write(f"  {answer[:200]}\n")
            if "pip install" in answer or "not installed" in answer:
                sys.exit(1)


if __name__ == "__main__":
    main()
