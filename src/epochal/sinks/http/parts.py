"""Rows as bodies of requests, none larger than it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import pyarrow as pa

from epochal.kit import json_lines

NDJSON = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"


def _as_ndjson(batches: Sequence[pa.RecordBatch]) -> bytes:
    return b"".join(json_lines.lines(batch).to_pybytes() for batch in batches)


def _as_arrow(batches: Sequence[pa.RecordBatch]) -> bytes:
    stream = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(stream, batches[0].schema, options=options) as encoder:
        for batch in batches:
            encoder.write_batch(batch)
    encoded: bytes = stream.getvalue().to_pybytes()
    return encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    content_type: str
    encode: Callable[[Sequence[pa.RecordBatch]], bytes]


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "ndjson": Format(content_type=NDJSON, encode=_as_ndjson),
        "arrow": Format(content_type=ARROW, encode=_as_arrow),
    }
)


def sliced(batch: pa.RecordBatch, most_bytes: int) -> Iterator[pa.RecordBatch]:
    """The batch in pieces of about so many bytes, and of one row at least."""
    pieces = max(1, -(-batch.nbytes // most_bytes))
    rows = max(1, -(-batch.num_rows // pieces))
    for first in range(0, batch.num_rows, rows):
        yield batch.slice(first, rows)
