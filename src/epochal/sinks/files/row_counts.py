"""Counters of the rows in one file, by format, without decoding more of them than they must."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

_CSV_ROW_BYTES_MAX = 16 * 1024 * 1024
_AVRO_MAGIC = b"Obj\x01"
_AVRO_SYNC_BYTES = 16


def _parquet(file: pa.NativeFile, _path: str) -> int:
    return int(pq.ParquetFile(file).metadata.num_rows)


def _orc(file: pa.NativeFile, _path: str) -> int:
    from pyarrow import orc  # noqa: PLC0415  few files are of this kind

    return int(orc.ORCFile(file).nrows)


def _lines(file: pa.NativeFile, path: str) -> int:
    count = 0
    with _decompressed(file, path) as stream:
        while block := stream.read(1 << 20):
            count += block.count(b"\n")
    return count


def _csv(file: pa.NativeFile, path: str) -> int:
    with (
        _decompressed(file, path) as stream,
        pa_csv.open_csv(
            stream,
            read_options=pa_csv.ReadOptions(block_size=_CSV_ROW_BYTES_MAX),
            parse_options=pa_csv.ParseOptions(newlines_in_values=True),
        ) as reader,
    ):
        return sum(batch.num_rows for batch in reader)


def _avro(file: pa.NativeFile, path: str) -> int:
    """Every block of an Avro file begins with its rows and its size."""
    if file.read(len(_AVRO_MAGIC)) != _AVRO_MAGIC:
        raise OSError(f"{path} does not begin as an Avro file does")
    while entries := _avro_long(file):
        if entries < 0:
            _avro_long(file)
        for _ in range(2 * abs(entries)):
            file.read(_avro_long(file))
    file.seek(file.tell() + _AVRO_SYNC_BYTES)
    rows, size = 0, file.size()
    while file.tell() < size:
        rows += _avro_long(file)
        file.seek(_avro_long(file) + file.tell() + _AVRO_SYNC_BYTES)
    if file.tell() != size:
        raise OSError(f"{path} is cut")
    return rows


def _avro_long(file: pa.NativeFile) -> int:
    """Seven bits per byte, the lowest first, with the sign in the lowest bit."""
    value = shift = 0
    while True:
        content = file.read(1)
        if not content:
            raise OSError("an Avro file is cut")
        byte = int(content[0])
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1)


def _decompressed(file: pa.NativeFile, path: str) -> pa.NativeFile:
    return pa.CompressedInputStream(file, "gzip") if path.endswith(".gz") else file


ROW_COUNTS: Mapping[str, Callable[[pa.NativeFile, str], int]] = {
    "parquet": _parquet,
    "orc": _orc,
    "avro": _avro,
    "jsonl": _lines,
    "csv": _csv,
}
