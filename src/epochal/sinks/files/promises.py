"""What Files promises and what it can't do, as data for docs and conformance suite."""

from __future__ import annotations

from epochal.kit.promises import Promises

_NO_CONSTRAINTS = "a file takes every row that fits its schema"

FOLDER = Promises(
    sink="`Files`, a folder",
    at_one_instant="a file; whole epochs by `read_epochs`, and by Spark with `spark_metadata=True`",
    readers_must="ignore names that begin with `_`, as Spark, pyarrow and pandas do",
    proof="a manifest per epoch",
    limits=["driver and executors must share the file system"],
    cannot={
        "refuse rows": _NO_CONSTRAINTS,
        "be unreachable": "a folder has no server that could be away",
    },
)
S3 = Promises(
    sink="`Files`, S3",
    at_one_instant="an object; whole epochs by `read_epochs`",
    readers_must="the same",
    proof="a manifest per epoch",
    limits=['the server must list uploads by prefix; others take `uploads="manifest"`'],
    cannot={"refuse rows": _NO_CONSTRAINTS},
)
MANIFESTS = Promises(
    sink='`Files`, Google, Azure, `uploads="manifest"`',
    at_one_instant="a whole epoch",
    readers_must="read by `read_epochs`",
    proof="the manifest, which is what shows the rows",
    cannot={"refuse rows": _NO_CONSTRAINTS},
)
PROMISES = (FOLDER, S3, MANIFESTS)
