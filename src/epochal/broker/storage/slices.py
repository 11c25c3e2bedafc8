"""`FileSlice`: batches of a segment on their way to a socket, each checked before it is sent.

An answer begins with its size. Were all of its batches checked before that is sent, a reader would
wait while megabytes are read, and the broker afterwards while they are received. So the first batch
is checked before the answer is made, and each of the others when those before it have been sent:

    broker   check 1 | size, send 1 | check 2 | send 2 | check 3 | send 3
    reader                          | receive 1        | receive 2        | receive 3

The bytes that are sent are those that were checked, but for batches above 512 KB, which are read
again: a reader that is slow holds no more memory than that. To have the kernel send them from the
file (`sendfile`) takes longer, as they have been read already.

Not a byte of a damaged batch is sent. In its place and in that of all behind it is the beginning of
a batch that ends behind the answer: the protocol allows an answer to end within a batch, and
readers drop such a beginning and ask for its offset. That request finds the damage in its first
batch, and is answered so.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from epochal.broker.storage.checksums import crc32c, crc32c_on
from epochal.errors import CorruptRecord
from epochal.kafka import batch_format

FRONT = struct.Struct(">qiibIhi")
"""Offset, length, leader epoch, format, checksum, attributes, last offset delta."""
CHUNK_BYTES = 1 << 16
_PIECE_BYTES = 1 << 18
"""Read, checked and sent at a time: they fit into the cache of a processor."""
_HELD_BYTES_MAX = 1 << 19
_TAKEN_BYTES_MIN = 1 << 16
"""Smaller pieces are joined."""

Read = Callable[[int, int], bytes]


class Descriptor:
    """A file descriptor that is closed when nobody holds it any more."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)

    def read(self, at: int, size: int) -> bytes:
        return os.pread(self.fd, size, at)


class Piece(NamedTuple):
    """Bytes of a batch that was checked as a whole, and the offset behind the batch."""

    data: bytes
    behind: int


def checked(read: Read, at: int, size: int, offset: int) -> Iterator[Piece]:
    """
    The batches of `size` bytes of a file, of which the first has this offset, each checked before
    its first piece. Stops before one that is damaged or not whole.
    """
    chunk, chunk_at, end = b"", at, at + size
    while at + batch_format.HEADER_BYTES <= end:
        if at + batch_format.HEADER_BYTES > chunk_at + len(chunk):
            chunk_at = at
            chunk = read(at, min(end - at, CHUNK_BYTES))
            if len(chunk) < batch_format.HEADER_BYTES:
                return
        base_offset, length, epoch, magic, crc, _, delta = FRONT.unpack_from(chunk, at - chunk_at)
        behind = at + batch_format.LENGTH_FROM + length
        is_whole = at + batch_format.HEADER_BYTES <= behind <= end
        if base_offset != offset or magic != batch_format.MAGIC or epoch or not is_whole:
            return
        offset += delta + 1
        first = chunk[at - chunk_at : behind - chunk_at]
        found = crc32c(first[batch_format.CRC_FROM :])
        # A batch larger than the chunk: the rest is read in pieces that are not copied again.
        rest: list[bytes] = []
        for piece in _pieces(read, at + len(first), behind):
            found = crc32c_on(found, piece)
            if length <= _HELD_BYTES_MAX:
                rest.append(piece)
        if found != crc:
            return
        yield Piece(first, offset)
        for piece in rest or _pieces(read, at + len(first), behind):
            yield Piece(piece, offset)
        at = behind


def _pieces(read: Read, at: int, end: int) -> Iterator[bytes]:
    """As far as there are any."""
    while at < end and (piece := read(at, min(end - at, _PIECE_BYTES))):
        yield piece
        at += len(piece)


class FileSlice:
    """
    Batches of a file that are still to be sent; the file may be removed meanwhile.

    Of `size` bytes from `at` on, where the batch with this offset begins, and at whose end one
    ends. Raises `CorruptRecord` if the first is damaged.
    """

    __slots__ = ("_first", "_front", "_left", "_offset", "_pieces")

    def __init__(self, file: Descriptor, path: str, at: int, size: int, offset: int) -> None:
        self._left = size
        self._pieces = checked(file.read, at, size, offset)
        first = next(self._pieces, None)
        if first is None:
            raise damaged(path, at)
        self._first, self._offset = first
        self._front: bytes | None = None
        """Of the batch that stands for what is damaged, once that is met; zeros follow."""

    def __len__(self) -> int:
        return self._left

    def take(self) -> bytes:
        """The next bytes to send. Raises `OSError`."""
        taken = [self._first] if self._first else []
        size, self._first = len(self._first), b""
        while size < min(_TAKEN_BYTES_MIN, self._left) and self._front is None:
            found = next(self._pieces, None)
            if found is None:
                left = self._left - size
                front = FRONT.pack(self._offset, left, 0, batch_format.MAGIC, 0, 0, 0)
                self._front = front[:left]
                taken.append(self._front)
                size += len(self._front)
            else:
                piece, self._offset = found
                taken.append(piece)
                size += len(piece)
        if not size:
            size = min(self._left, _PIECE_BYTES)
            taken.append(bytes(size))
        self._left -= size
        return b"".join(taken) if len(taken) > 1 else taken[0]


def damaged(path: str, position: int) -> CorruptRecord:
    return CorruptRecord(
        f"the broker's segment {path} is damaged at byte {position}",
        hint="restore the data folder from a backup, or delete the records up to there",
    )
