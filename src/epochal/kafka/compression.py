"""The four compressions of record batches, in the formats that brokers and other clients accept.

gzip and zstd are the common formats. The other two are not:
- lz4 is the frame format with independent blocks of 64 KB and no checksum, as the Java client
  writes it. Frames with linked blocks, which Arrow's own codec writes, are refused by brokers.
- snappy is raw blocks inside the framing of the snappy-java library. Some clients write one raw
  block without framing, so that is read too.

Data to decompress comes from a peer: its size is bounded by the caller's limit, not by its header.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from enum import IntEnum
from functools import cache

import pyarrow as pa

from epochal.kafka.primitives import Malformed, Oversized

RECORDS_BYTES_MAX = 1 << 28
"""The largest decompressed records section that is read, unless a caller gives another."""

_LZ4_BLOCK_BYTES = 1 << 16
_LZ4_HEADER = bytes.fromhex("04224d18 60 40 82")
"""Magic, version 1 with independent blocks, blocks of 64 KB at most, checksum of these two."""
_LZ4_MAGIC = _LZ4_HEADER[:4]
_LZ4_STORED = 0x80000000
_LZ4_END = bytes(4)
_SNAPPY_BLOCK_BYTES = 1 << 15
_SNAPPY_MAGIC = b"\x82SNAPPY\x00"
_SNAPPY_HEADER = _SNAPPY_MAGIC + struct.pack(">ii", 1, 1)
_SNAPPY_RATIO_MAX = 64
"""A snappy copy of 64 bytes takes three bytes: no genuine block grows as much as this."""
_U32_LITTLE = struct.Struct("<I")
_I32 = struct.Struct(">i")


class Compression(IntEnum):
    """As in the lowest three bits of a batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


def compress(kind: Compression, data: bytes) -> bytes:
    match kind:
        case Compression.NONE:
            return data
        case Compression.GZIP:
            # A fixed time stamp, so that equal records give equal bytes.
            return gzip.compress(data, compresslevel=6, mtime=0)
        case Compression.SNAPPY:
            return _snappy_framed(memoryview(data))
        case Compression.LZ4:
            return _lz4_frame(memoryview(data))
        case Compression.ZSTD:
            return _compressed(_codec("zstd"), data)


def decompress(kind: Compression, data: bytes, bytes_max: int = RECORDS_BYTES_MAX) -> bytes:
    """The plain records; raises `Malformed` where they are corrupt or above the limit."""
    if kind is Compression.NONE:
        return data
    try:
        match kind:
            case Compression.GZIP:
                plain = _gunzip(data, bytes_max)
            case Compression.SNAPPY:
                plain = _unsnap(memoryview(data), bytes_max)
            case Compression.LZ4:
                plain = _stream(data, "lz4", bytes_max)
            case Compression.ZSTD:
                plain = _stream(data, "zstd", bytes_max)
    except (pa.ArrowException, OSError, zlib.error, struct.error, ValueError, IndexError) as error:
        raise Malformed(f"records compressed with {kind.name.lower()}: {error}") from error
    if len(plain) > bytes_max:
        raise Oversized(
            f"records compressed with {kind.name.lower()} grow beyond {bytes_max} bytes",
            hint="raise the limit on decompressed records if this batch is genuine",
        )
    return plain


@cache
def _codec(name: str) -> pa.Codec:
    return pa.Codec(name)


def _compressed(codec: pa.Codec, data: bytes | memoryview) -> bytes:
    packed: bytes = codec.compress(data, asbytes=True)
    return packed


def _lz4_frame(data: memoryview) -> bytes:
    codec = _codec("lz4_raw")
    parts = [_LZ4_HEADER]
    for start in range(0, len(data), _LZ4_BLOCK_BYTES):
        block = data[start : start + _LZ4_BLOCK_BYTES]
        packed = _compressed(codec, block)
        if len(packed) < len(block):
            parts += (_U32_LITTLE.pack(len(packed)), packed)
        else:
            parts += (_U32_LITTLE.pack(len(block) | _LZ4_STORED), bytes(block))
    parts.append(_LZ4_END)
    return b"".join(parts)


def _snappy_framed(data: memoryview) -> bytes:
    codec = _codec("snappy")
    parts = [_SNAPPY_HEADER]
    for start in range(0, len(data), _SNAPPY_BLOCK_BYTES):
        packed = _compressed(codec, data[start : start + _SNAPPY_BLOCK_BYTES])
        parts += (_I32.pack(len(packed)), packed)
    return b"".join(parts)


def _unsnap(data: memoryview, bytes_max: int) -> bytes:
    if bytes(data[:8]) != _SNAPPY_MAGIC:
        return _unsnap_block(data, bytes_max)
    at = len(_SNAPPY_HEADER)
    parts: list[bytes] = []
    left = bytes_max
    while at < len(data):
        (size,) = _I32.unpack_from(data, at)
        at += 4
        if size < 0 or size > len(data) - at:
            raise ValueError(f"a block of {size} bytes where {len(data) - at} are left")
        parts.append(_unsnap_block(data[at : at + size], left))
        left -= len(parts[-1])
        at += size
    return b"".join(parts)


def _unsnap_block(block: memoryview, bytes_max: int) -> bytes:
    """One raw block. It begins with its plain size, which is believed only within reason."""
    size = shift = 0
    for byte in block[:5]:
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    else:
        raise ValueError("a block without its plain size")
    if size > min(bytes_max, len(block) * _SNAPPY_RATIO_MAX):
        raise ValueError(f"a block of {len(block)} bytes claims {size} plain bytes")
    plain: bytes = _codec("snappy").decompress(block, decompressed_size=size, asbytes=True)
    return plain


def _gunzip(data: bytes, bytes_max: int) -> bytes:
    reader = zlib.decompressobj(wbits=31)
    plain = reader.decompress(data, bytes_max + 1)
    if not reader.eof and len(plain) <= bytes_max:
        raise ValueError("the stream ends early")
    return plain


def _stream(data: bytes, codec: str, bytes_max: int) -> bytes:
    with pa.CompressedInputStream(pa.py_buffer(data), codec) as reader:
        plain: bytes = reader.read(bytes_max + 1)
    return plain
