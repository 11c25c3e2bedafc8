"""A program: a Spark that has what it needs for `s3a://` reads epochs and keeps keys there."""

from __future__ import annotations

import json
import sys
from typing import Any

from epochal.sinks.files import read_epochs
from epochal.spark.local_session import local_builder
from epochal.storage.hadoop import open_at


def main(given: dict[str, Any]) -> dict[str, Any]:
    """What each read finds, its rows as pairs of partition and number, and what a store answers."""
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
    answers = keep_keys(spark, given["store"])
    spark.stop()
    return {"reads": found, "store": answers}


def keep_keys(spark: Any, url: str) -> dict[str, Any]:
    """What two stores at one place answer, as each sees what the other did."""
    one, other = open_at(spark, url), open_at(spark, url)
    answers = {
        "absent": one.read("log/1"),
        "created": [one.put_if_absent("log/1", b"first"), other.put_if_absent("log/1", b"second")],
        "kept": str(other.read("log/1"), "ascii"),
    }
    other.put("log/1", b"replaced")
    one.put_if_absent("log/2", b"")
    answers |= {"replaced": str(one.read("log/1"), "ascii"), "names": [*one.names("log")]}
    one.delete(["log/2"])
    return {**answers, "left": [*other.names("log")]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
