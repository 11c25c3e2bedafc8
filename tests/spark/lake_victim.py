"""
A driver to be killed: files, a Delta table and an Iceberg table under one decision, whose files
Spark itself writes. Run and killed like `victim`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from victim import connect, plain, run

from epochal.contract import Sink
from epochal.sinks.delta import Delta
from epochal.sinks.files import Files
from epochal.sinks.iceberg import Iceberg
from epochal.terms import SinkName

LAKES = "lakes"
QUERIES = {LAKES: plain}
TABLE = "shop.orders"


def catalog(root: Path) -> dict[str, str]:
    return {
        "type": "sql",
        "uri": f"sqlite:///{root}/catalog.db",
        "warehouse": f"file://{root}/warehouse",
    }


def delta(root: Path) -> Path:
    return root / "delta"


def files(root: Path) -> Path:
    return root / "files"


def sinks_of(root: Path, pipeline: str) -> list[Sink]:
    return [
        Files(str(files(root)), name=SinkName("files")),
        Delta(str(delta(root)), name=SinkName("delta"), create_table="if_missing"),
        Iceberg(
            "lake",
            TABLE,
            properties=catalog(root),
            name=SinkName("iceberg"),
            compact={"target_mb": 1, "every": "1s"},
        ),
    ]


if __name__ == "__main__":
    session = connect()
    run(session, Path(sys.argv[1]), sys.stdin.readline().strip(), QUERIES, sinks_of)
