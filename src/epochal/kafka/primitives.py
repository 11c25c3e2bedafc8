"""Field types of Kafka's messages, and their encoding and decoding.

Decoders are generated as straight lines of reads without a bounds check each. That is safe because
a position only ever moves forward: a read beyond the end raises by itself (`struct.error`,
`IndexError`), a slice beyond the end leaves a position that the next read or the final comparison
refuses, and a count of elements is compared with the bytes that are left before anything is made.
So every malformed input ends in `Malformed`, after work and memory bounded by its own length. A
server bounds the elements of a whole message besides (`ALLOWED`): an element of two bytes costs a
hundred times as much as two bytes of a text.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, TypeAlias, TypeVar

from epochal.errors import EpochalError

Part: TypeAlias = bytes | bytearray | memoryview
"""A piece of an encoded message. Large pieces are passed on, never copied."""
Records: TypeAlias = bytes | bytearray | memoryview
"""The record batches of one partition, as they are on the wire. Decoded ones are a view of their
frame, which they keep alive."""
Put: TypeAlias = Callable[[Part], None]
Uuid: TypeAlias = bytes
"""Sixteen bytes."""

NO_UUID: Uuid = bytes(16)
NEVER = 1 << 15
"""Above every version: a message that is flexible from here on never is."""

new = object.__new__
"""How decoders make a message: without a call of its `__init__`, as they set every field."""

_UVARINT_BYTES_MAX = 5
_TEXT_BYTES_MAX = (1 << 15) - 1


class Allowed:
    """How many elements may still be decoded in this process, in all arrays together."""

    __slots__ = ("elements",)

    def __init__(self) -> None:
        self.elements = sys.maxsize


ALLOWED = Allowed()
"""A server sets it before it decodes a message of a client, and lifts it afterwards."""


class Malformed(EpochalError):
    """Bytes of a peer that can't be decoded. The connection can't be used any more."""

    code = "malformed"


class Oversized(Malformed):
    """Compressed records that unpack to more than is allowed."""


class Unsupported(EpochalError):
    """A message has a value for which its chosen version has no field."""

    code = "unsupported"


class Message:
    """
    A request, a response or a header. The generated classes fill in the tables.

    Unknown tagged fields are skipped when decoding, as their senders allow.
    """

    __slots__ = ()

    API_KEY: ClassVar[int] = -1
    VERSIONS: ClassVar[range]
    FLEXIBLE_FROM: ClassVar[int]
    ENCODERS: ClassVar[Mapping[int, Callable[[Put, Any], None]]]
    DECODERS: ClassVar[Mapping[int, Callable[[bytes, int], tuple[Any, int]]]]

    def encode(self, version: int) -> list[Part]:
        """The parts of this message. Raises `Unsupported` where the version lacks a field."""
        parts: list[Part] = []
        try:
            self.ENCODERS[version](parts.append, self)
        except KeyError:
            raise _no_version(type(self), version) from None
        except (struct.error, AttributeError, TypeError, UnicodeEncodeError) as error:
            raise Unsupported(
                f"{type(self).__name__} version {version} can't carry these values: {error}"
            ) from error
        return parts

    @classmethod
    def decode(cls, version: int, data: bytes, at: int = 0) -> Self:
        """The message that `data` holds from `at` to its end, which must be the message's end."""
        # The same as `decode_head`, repeated: one call less per message of a broker.
        try:
            message, end = cls.DECODERS[version](data, at)
        except KeyError:
            raise _no_version(cls, version) from None
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise Malformed(f"{cls.__name__} version {version}: {error}") from error
        if end != len(data):
            raise Malformed(f"{cls.__name__} version {version} ends at {end} of {len(data)} bytes")
        decoded: Self = message
        return decoded

    @classmethod
    def decode_head(cls, version: int, data: bytes, at: int = 0) -> tuple[Self, int]:
        """The message that begins at `at`, and where it ends."""
        try:
            message, end = cls.DECODERS[version](data, at)
        except KeyError:
            raise _no_version(cls, version) from None
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise Malformed(f"{cls.__name__} version {version}: {error}") from error
        if end > len(data):
            raise Malformed(f"{cls.__name__} version {version} ends beyond its {len(data)} bytes")
        return message, end


Answer_co = TypeVar("Answer_co", bound=Message, covariant=True)


class Request(Protocol[Answer_co]):
    """A message that has an answer, whose type it knows."""

    @property
    def API_KEY(self) -> int: ...  # noqa: N802  the name in Kafka's schemas

    @property
    def VERSIONS(self) -> range: ...  # noqa: N802  as above

    @property
    def FLEXIBLE_FROM(self) -> int: ...  # noqa: N802  as above

    def encode(self, version: int) -> list[Part]: ...

    def decode_response(self, version: int, data: bytes, at: int = 0) -> Answer_co: ...


def _no_version(kind: type[Message], version: int) -> Unsupported:
    known = kind.VERSIONS
    return Unsupported(f"{kind.__name__} has versions {known[0]} to {known[-1]}, not {version}")


def not_in_version(field: str, version: int) -> Unsupported:
    return Unsupported(f"{field} is set, and version {version} has no place for it")


def no_null_in_version(field: str, version: int) -> Unsupported:
    return Unsupported(f"{field} is null, and version {version} has no null for it")


def null_refused(field: str) -> Malformed:
    return Malformed(f"{field} is null or of negative length, which it may not be")


def count_refused(field: str, count: int) -> Malformed:
    return Malformed(
        f"{field} claims {count} elements, more than bytes are left or than a request may have"
    )


def tag_size_refused(field: str) -> Malformed:
    return Malformed(f"the tagged field {field} is not as long as it claims")


SMALL_UVARINT: tuple[bytes, ...] = tuple(bytes([value]) for value in range(128))
"""The encoding of values below 128, which nearly all lengths are."""


def uvarint(value: int) -> bytes:
    """An unsigned number in groups of seven bits, the lowest first."""
    if value < 0:
        raise Unsupported(f"{value} is negative, and lengths are not")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_uvarint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for end in range(at + 1, at + 1 + _UVARINT_BYTES_MAX):
        byte = data[end - 1]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > 0xFFFFFFFF:
                break
            return value, end
        shift += 7
    raise Malformed(f"a variable-length number of more than 32 bits at byte {at}")


def read_text_size(data: bytes, at: int) -> tuple[int, int]:
    """
    The size of a text and 1. As in Kafka, a text has at most as many bytes as two bytes can count,
    also where its version could count more: others have to be able to ask for it by an older one.
    """
    size, at = read_uvarint(data, at)
    if size > _TEXT_BYTES_MAX + 1:
        raise Malformed(f"a text of {size - 1} bytes, above {_TEXT_BYTES_MAX}")
    return size, at


def skip_tagged(data: bytes, at: int) -> int:
    """Skip a section of unknown tagged fields."""
    count, at = read_uvarint(data, at)
    if count > ALLOWED.elements:
        raise count_refused("tagged fields", count)
    ALLOWED.elements -= count
    for _ in range(count):
        _, at = read_uvarint(data, at)
        size, at = read_uvarint(data, at)
        at += size
    return at


_unpack_i16 = struct.Struct(">h").unpack_from
_pack_i16 = struct.Struct(">h").pack


def read_strings(data: bytes, at: int, count: int) -> tuple[list[str], int]:
    found: list[str] = []
    for _ in range(count):
        (size,) = _unpack_i16(data, at)
        if size < 0:
            raise null_refused("an element of an array of strings")
        at += 2
        found.append(data[at : at + size].decode())
        at += size
    return found, at


def read_compact_strings(data: bytes, at: int, count: int) -> tuple[list[str], int]:
    found: list[str] = []
    for _ in range(count):
        size, at = read_text_size(data, at)
        if not size:
            raise null_refused("an element of an array of strings")
        end = at + size - 1
        found.append(data[at:end].decode())
        at = end
    return found, at


def put_strings(put: Put, texts: Sequence[str]) -> None:
    for text in texts:
        raw = text.encode()
        put(_pack_i16(len(raw)))
        put(raw)


def put_compact_strings(put: Put, texts: Sequence[str]) -> None:
    for text in texts:
        raw = text.encode()
        put(uvarint(len(raw) + 1))
        put(raw)


def put_tagged(put: Put, fields: Sequence[tuple[int, list[Part]]]) -> None:
    """A section of tagged fields, which must come in rising order of their tags."""
    put(uvarint(len(fields)))
    for tag, parts in fields:
        put(uvarint(tag))
        put(uvarint(sum(len(part) for part in parts)))
        for part in parts:
            put(part)
