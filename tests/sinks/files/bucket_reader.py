"""A program: a Spark that has what it needs for `s3a://` reads whole epochs from folders there."""

from __future__ import annotations

import json
import sys
from typing import Any

from epochal.sinks.files import read_epochs
from epochal.spark.local_session import local_builder


def main(given: dict[str, Any]) -> list[list[Any]]:
    """What each read finds: its rows, as pairs of partition and number."""
    builder = local_builder("reader", threads=2)
    for name, value in given["settings"].items():
        builder.config(name, value)
    spark = builder.getOrCreate()
    found = []
    for path, epochs in given["reads"]:
        rows = read_epochs(
            path, epochs=epochs, storage_options=given["storage_options"], spark=spark
        )
        found.append(sorted([row.p, row.n] for row in rows.collect()))
    spark.stop()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
