"""The columns of the rows, kept beside the files: by them readers need not guess types."""

from __future__ import annotations

import hashlib

import pyarrow as pa

from epochal.errors import CorruptRecord
from epochal.sinks.files import layout
from epochal.sinks.files.places import Store


def keep_schema(store: Store, schema: pa.Schema) -> str:
    """Keep the columns, once per schema: the digest is its name."""
    content = schema.serialize().to_pybytes()
    digest = hashlib.sha256(content).hexdigest()[:16]
    if store.read(layout.schema(digest)) is None:
        store.put_if_absent(layout.schema(digest), content)
    return digest


def load_schema(store: Store, digest: str) -> pa.Schema:
    content = store.read(layout.schema(digest))
    if content is None:
        raise CorruptRecord(
            f"{store.root}/{layout.schema(digest)} is gone, and manifests cite it",
            "files below _epochal/ belong to the pipeline: bring it back from a copy",
        )
    return pa.ipc.read_schema(pa.BufferReader(content))
