"""Checksums (CRC-32C), and whether one flipped bit explains a wrong one.

A write that a power cut tore apart and a bit that the disk changed both leave bytes that don't
match their checksum. The first was never acknowledged and may be dropped; the second was, and must
not be. A checksum separates them: every single bit of a frame has a difference of its own, and
the difference of a torn write is none of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import google_crc32c

_POLYNOMIAL = 0x82F63B78
_SEARCHED_BYTES_MAX = 4 << 20
"""No more is searched: it takes about a second per megabyte."""


def crc32c(*parts: bytes) -> int:
    found = google_crc32c.value(parts[0])
    for part in parts[1:]:
        found = crc32c_on(found, part)
    return int(found)


def crc32c_on(found: int, part: bytes) -> int:
    """The checksum of what `found` is of, and this behind it."""
    return int(google_crc32c.extend(found, part))


def with_one_bit_flipped(head: bytes) -> Iterator[bytes]:
    for bit in range(8 * len(head)):
        changed = bytearray(head)
        changed[bit >> 3] ^= 1 << (bit & 7)
        yield bytes(changed)


def is_of_one_bit(difference: int, covered_bytes: int) -> bool:
    """Whether a flip of one covered bit changes a checksum by this."""
    effect = 1
    for _ in range(8 * min(covered_bytes, _SEARCHED_BYTES_MAX)):
        # From the last bit backwards.
        effect = (effect >> 1) ^ (_POLYNOMIAL if effect & 1 else 0)
        if effect == difference:
            return True
    return False
