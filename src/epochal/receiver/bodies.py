"""Bodies of requests: rows are checked when they arrive, before the decision (I3)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from epochal.receiver.transactions import Refusal

NDJSON = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
FORMATS = (NDJSON, ARROW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """JSON objects, one per line, without the last newline; and their number."""

    lines: bytes
    count: int


def read_rows(content_type: str, body: bytes) -> Rows:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == ARROW:
        body = _from_arrow(body)
    elif kind != NDJSON:
        raise Refusal(415, f"rows come as {' or '.join(FORMATS)}, not as {kind or 'nothing'}")
    lines = body.strip(b"\r\n").split(b"\n") if body.strip() else []
    for number, line in enumerate(lines):
        _require_object(line, number)
    return Rows(lines=b"\n".join(lines), count=len(lines))


def _require_object(line: bytes, number: int) -> None:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise Refusal(422, f"row {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise Refusal(422, f"row {number} is not a JSON object")


def _from_arrow(body: bytes) -> bytes:
    import pyarrow as pa  # noqa: PLC0415  slow to load, and JSON does not need it

    from epochal.kit import json_lines  # noqa: PLC0415

    try:
        batches = pa.ipc.open_stream(body).read_all().to_batches()
        return b"".join(json_lines.lines(batch).to_pybytes() for batch in batches)
    except (pa.ArrowException, OSError, TypeError) as error:
        raise Refusal(422, f"the Arrow stream can't be read: {error}") from None
