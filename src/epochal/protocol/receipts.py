"""
Receipts in writing: inside a record of the epoch log, or in lists beside it where they are many.

Every record carries the whole state, and a start reads one. So a record must stay small, however
many tasks an epoch has and however many files each of them wrote: receipts above a limit lie in
lists, which the record names (`lay_beside`). It holds their number and their sums itself, so that
most readers need no list. One rule for all sinks:

    epochal-list 1 <nonce>\\n
    <zlib: a JSON line per receipt>

1. A list is named by the SHA-256 of its bytes: who reads it knows that it is the one that was
   decided on, and a put may be repeated.
2. Lists are durable before the record that names them is put (I3).
3. The digest covers a nonce, so no two appends ever write the same list. It is named by the record
   of its append, and by records that carry the same decision on: each follows one that names it.
4. A list is deleted once a record that does not name it was the newest. By 3 no later one does.

So nothing that arrives late does harm. Record 40 names list L, and driver B supersedes driver A:

    driver A                                  driver B                      newest  lists
    append 41, L is not in it: newest                                       41      L
    delete L (delayed)                        claim 42, put M, decide 43    43: M   L M
    … arrives                                                               43: M   M

    put L (delayed), for record 41            claim 41, sweep: no lists     41
    … arrives                                                               41      L
    put 41: taken, A is fenced                next sweep: delete L          41

    sweep: lists {L}
                                              claim 42, put M               42      L M
    42 is above 41: A is fenced, deletes nothing

In the last case A lists before it asks who is newest. Where A is still the newest, every list that
it found was put by a driver that claimed before the question: by A, or by one that A superseded,
whose record can't become the newest any more. The other order would delete M:

    41 is the newest: go on
                                              claim 42, put M               42      L M
    sweep: lists {L, M}, delete both          decide 43: M is gone

A list that was put again after its deletion (a late copy of the first put) is named by no record,
and the next sweep deletes it.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, overload

from epochal.errors import CorruptRecord, require_known_format
from epochal.terms import (
    Claim,
    Decision,
    Fingerprint,
    Handle,
    Receipt,
    Receipts,
    SinkName,
    total,
)

FORMAT = 1
_MAGIC = b"epochal-list"
_LIST_BYTES = 4 * 1024 * 1024
"""Where a list ends and the next one begins, before compression: stores need not take more."""
_QUICK = 1
"""The level of compression: paths and handles are much alike."""

ReadList: TypeAlias = Callable[[str], bytes]
"""Reads the list of a name; raises where it is gone."""


# A receipt is written as a list, as there are many and their keys would be most of the bytes.


def receipt_out(receipt: Receipt) -> list[Any]:
    written = [str(receipt.handle), *print_out(receipt.fingerprint), receipt.bytes, receipt.token]
    return [*written, list(receipt.replaces)] if receipt.replaces else written


def receipt_in(read: Sequence[Any]) -> Receipt:
    name, rows, hash_sum, algorithm, size, token, *replaces = read
    handle = Handle.parse(name)
    if handle is None:
        raise ValueError(f"{name!r} is not a handle")
    print_ = Fingerprint(rows, hash_sum, algorithm)
    return Receipt(
        handle=handle,
        fingerprint=print_,
        bytes=size,
        token=token,
        replaces=tuple(Claim(claim) for claims in replaces for claim in claims),
    )


def print_out(print_: Fingerprint) -> tuple[int, int | None, int]:
    return print_.rows, print_.hash_sum, print_.algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """What receipts add up to."""

    receipts: int
    fingerprint: Fingerprint
    bytes: int


def sum_of(receipts: Sequence[Receipt]) -> Sum:
    """The sum of receipts, without reading lists."""
    if isinstance(receipts, ListedReceipts):
        return receipts.sum
    return Sum(
        receipts=len(receipts),
        fingerprint=total(receipt.fingerprint for receipt in receipts),
        bytes=sum(receipt.bytes for receipt in receipts),
    )


class ListedReceipts(Sequence[Receipt]):
    """Receipts of one sink that lie in lists beside the log, read when the first one is needed."""

    __slots__ = ("_read", "_receipts", "lists", "sum")

    def __init__(
        self,
        lists: Sequence[str],
        sum_: Sum,
        *,
        read: ReadList | None = None,
        receipts: tuple[Receipt, ...] | None = None,
    ) -> None:
        self.lists = tuple(lists)
        self.sum = sum_
        self._read = read
        self._receipts = receipts

    def __len__(self) -> int:
        return self.sum.receipts

    @overload
    def __getitem__(self, at: int) -> Receipt: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Receipt, ...]: ...
    def __getitem__(self, at: int | slice) -> Receipt | tuple[Receipt, ...]:
        return self._all()[at]

    def __iter__(self) -> Iterator[Receipt]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ListedReceipts):
            return self.lists == other.lists
        return isinstance(other, tuple) and self._all() == other

    def __hash__(self) -> int:
        return hash(self.lists)

    def __repr__(self) -> str:
        return f"ListedReceipts({self.sum.receipts} in {', '.join(self.lists)})"

    def _all(self) -> tuple[Receipt, ...]:
        # A local name: two threads may both read, and find the same.
        found = self._receipts
        if found is None:
            found = self._receipts = self._checked()
        return found

    def _checked(self) -> tuple[Receipt, ...]:
        if self._read is None:
            raise ValueError("these receipts lie beside a log that can't be read here")
        found = tuple(one for name in self.lists for one in _receipts_in(name, self._read(name)))
        if sum_of(found) != self.sum:
            raise _corrupt(", ".join(self.lists), "the record that names it has other sums")
        return found


def lists_of(decision: Decision | None) -> frozenset[str]:
    """The names of all lists that a decision needs."""
    receipts = () if decision is None else decision.receipts.values()
    return frozenset(
        name for some in receipts if isinstance(some, ListedReceipts) for name in some.lists
    )


def lay_beside(
    decision: Decision, *, inline_bytes_max: int, nonce: Callable[[], str]
) -> tuple[Decision, Mapping[str, bytes]]:
    """
    Move receipts out of a decision until those left take at most `inline_bytes_max`, the longest
    first. Returns the decision and the lists to put, by name, before any record names them.
    """
    lines = {
        sink: [_line(receipt) for receipt in some]
        for sink, some in decision.receipts.items()
        if not isinstance(some, ListedReceipts)
    }
    sizes = {sink: sum(map(len, some)) for sink, some in lines.items()}
    inline_bytes = sum(sizes.values())
    moved: dict[SinkName, Sequence[Receipt]] = {}
    contents: dict[str, bytes] = {}
    for sink in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if inline_bytes <= inline_bytes_max or not lines[sink]:
            break
        pieces = [_list_out(some, nonce()) for some in _pieces(lines[sink])]
        named = {hashlib.sha256(piece).hexdigest(): piece for piece in pieces}
        some = tuple(decision.receipts[sink])
        moved[sink] = ListedReceipts(tuple(named), sum_of(some), receipts=some)
        contents |= named
        inline_bytes -= sizes[sink]
    if not moved:
        return decision, {}
    receipts: Receipts = {**decision.receipts, **moved}
    return replace(decision, receipts=receipts), contents


def _line(receipt: Receipt) -> bytes:
    return json.dumps(receipt_out(receipt), ensure_ascii=False, separators=(",", ":")).encode()


def _pieces(lines: Sequence[bytes]) -> Iterator[list[bytes]]:
    piece: list[bytes] = []
    size = 0
    for line in lines:
        if piece and size + len(line) > _LIST_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    yield piece


def _list_out(lines: Sequence[bytes], nonce: str) -> bytes:
    head = b"%s %d %s\n" % (_MAGIC, FORMAT, nonce.encode())
    return head + zlib.compress(b"\n".join(lines), _QUICK)


def _receipts_in(name: str, content: bytes) -> list[Receipt]:
    if hashlib.sha256(content).hexdigest() != name:
        raise _corrupt(name, "its name is not the digest of its content")
    head, _, packed = content.partition(b"\n")
    words = head.split(b" ")
    if words[0] != _MAGIC or len(words) < 2 or not words[1].isdigit():
        raise _corrupt(name, "it does not begin like one")
    require_known_format(f"list {name} beside the epoch log", int(words[1]), FORMAT)
    try:
        return [receipt_in(json.loads(line)) for line in zlib.decompress(packed).split(b"\n")]
    except (TypeError, ValueError, zlib.error) as error:
        raise _corrupt(name, f"its digest is right, but its content is not ({error!r})") from error


def _corrupt(name: str, fact: str) -> CorruptRecord:
    return CorruptRecord(
        f"list {name}: not a readable list of receipts beside the epoch log: {fact}",
        "nothing was overwritten; keep a copy of the folder, then restore the list from a backup",
    )
