"""Commands of an operator on a Files sink: count the rows, and print the rights that it needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pyarrow as pa

from epochal.errors import EpochalError
from epochal.kit.marked_files import at_once, is_of
from epochal.kit.sink_base import Recount
from epochal.sinks.files import layout
from epochal.sinks.files.backend import Stores
from epochal.sinks.files.formats import format_of
from epochal.sinks.files.ledger import Ledger
from epochal.sinks.files.row_counts import ROW_COUNTS
from epochal.sinks.files.target import Target
from epochal.storage import FileStore
from epochal.terms import EpochNumber, Identity, Json, quantity


def recount(stores: Stores, ledger: Ledger, identity: Identity) -> Recount:
    """Every file that a manifest names, and every file of ours that plain readers see besides."""
    epochs: dict[EpochNumber, int] = {}
    faults: list[str] = []
    named: set[str] = set()
    for manifest in ledger.all():
        paths = [file.path for file in manifest.files]
        named.update(paths)
        counted = at_once(lambda path: _count(stores, path), paths)
        epochs[manifest.epoch] = sum(rows for rows in counted if isinstance(rows, int))
        faults += [
            f"epoch {manifest.epoch}: {fault}" for fault in counted if isinstance(fault, str)
        ]
    for path in _strays(stores.shown, identity, named):
        found = _count(stores, path)
        content = quantity(found, "row") if isinstance(found, int) else found
        faults.append(f"{path} ({content}) is seen by readers, and no manifest names it")
    return Recount(
        rows=sum(epochs.values()),
        epochs=epochs,
        because="rows in the files that manifests name, counted in the files",
        faults=faults,
    )


def _count(stores: Stores, path: str) -> int | str:
    """The rows of one file, or what is wrong with it."""
    try:
        file = stores.of(path).open(path)
        if file is None:
            return f"{path} is named by the manifest and is not there"
        with file:
            return ROW_COUNTS[format_of(path)](pa.PythonFile(file, mode="r"), path)
    except (EpochalError, OSError, pa.ArrowException) as error:
        return f"{path} can't be read: {error}"


def _strays(store: FileStore, identity: Identity, named: set[str]) -> Iterator[str]:
    """Visible files with a handle of this sink in their name that no manifest names."""
    for path in _visible(store, ""):
        if is_of(identity, layout.handle_in(path)) and path not in named:
            yield path


def _visible(store: FileStore, folder: str) -> Iterator[str]:
    """The files of ours in a folder and in the partition folders below it."""
    top = f"{folder}/" if folder else ""
    yield from (top + name for name in store.names(folder) if layout.handle_in(name) is not None)
    for inner in store.folders(folder):
        if "=" in inner and not inner.startswith(("_", ".")):
            yield from _visible(store, top + inner)


def iam_policy(target: Target, *, kms_key_id: str | None) -> str:
    """
    The least rights that the credentials of a sink on S3 need, as a policy document of IAM.

    For the driver and the executors alike. Removal is allowed beside the root only: no row that a
    reader sees can be removed with it.
    """
    bucket = f"arn:aws:s3:::{target.bucket}"
    rows, ours = (
        f"{bucket}/{folder}/*" for folder in (target.prefix, layout.beside(target.prefix))
    )
    listing = ["s3:ListBucket", "s3:ListBucketMultipartUploads", "s3:GetLifecycleConfiguration"]
    writing = ["s3:AbortMultipartUpload", "s3:GetObject", "s3:PutObject"]
    statements: list[Mapping[str, Json]] = [
        {"Effect": "Allow", "Action": listing, "Resource": bucket},
        {"Effect": "Allow", "Action": writing, "Resource": [rows, ours]},
        {"Effect": "Allow", "Action": "s3:DeleteObject", "Resource": ours},
    ]
    if kms_key_id is not None:
        # Completing an upload decrypts its parts.
        actions = ["kms:Decrypt", "kms:GenerateDataKey"]
        statements.append({"Effect": "Allow", "Action": actions, "Resource": kms_key_id})
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2)
