"""A program: compacts an Iceberg and a Delta table again and again, until it is killed."""

from __future__ import annotations

import itertools
import sys

from sinks.life import Life

from epochal.errors import TryAgain
from epochal.sinks.delta import Delta
from epochal.sinks.iceberg import Iceberg


def main(folder: str, table: str) -> None:
    properties = {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
    }
    sinks = [Iceberg(f"lake.{table}", properties=properties), Delta(f"{folder}/delta")]
    committers = [Life(sink=sink).committer for sink in sinks]
    for number in itertools.count():
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        for committer in committers:
            try:
                committer.compact(target_bytes=2**20, is_dry_run=False)
            except TryAgain as error:
                sys.stderr.write(f"{error}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
