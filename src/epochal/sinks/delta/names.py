"""
What a Delta log remembers of us, in the only form it keeps for good: application transactions.

A transaction is an application id and a 64-bit number; the newest number of each id outlives
checkpoints, log clean-up and compaction. Three kinds of ids are written, in the very commit that
shows an epoch's rows:

    epochal-<uid>-s<tag>             number = the epoch: the ledger
    epochal-name-<digest>-<n>        number = the n-th uid that wrote under this name
    epochal-run-<uid>-s<tag>-<n>     number = the n-th seven bytes of the run's key

The digest is of the pipeline's and the sink's name together.
Ids can be looked up and not listed, which is why the lives of one name are numbered: whoever asks
counts up until there is none (I10). A uid is twelve characters of base32, sixty bits, and so fits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

from epochal.errors import InvariantBroken
from epochal.terms import EpochNumber, Identity, Mark, SinkTag, Uid, handle_prefix

Look = Callable[[str], "int | None"]
"""The newest number of an application id in a log, or None."""

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_UID_CHARACTERS = 12
_BYTES_A_NUMBER = 7
_LIVES_MAX = 10_000


def ledger_id(uid: Uid, tag: SinkTag) -> str:
    return f"{handle_prefix(uid)}s{tag}"


@dataclass(frozen=True, slots=True)
class Lives:
    """All that wrote to one table under one pipeline's and one sink's name."""

    identity: Identity

    def newest(self, look: Look) -> list[Mark]:
        """The newest epoch of each life, as far as it has one."""
        marks = []
        for uid in self._uids(look):
            epoch = look(ledger_id(uid, self.identity.tag))
            if epoch is not None:
                marks.append(Mark(uid=uid, epoch=EpochNumber(epoch), run=self._run(look, uid)))
        return marks

    def to_write(self, look: Look, epoch: EpochNumber) -> Mapping[str, int]:
        """Every id and number that the commit of an epoch writes. All are written each time, so
        that a table that forgets old transactions keeps those of a pipeline that is alive."""
        mine = self.identity.uid
        # No further than to my own place: to find that an id is nowhere, all of a log is read.
        place = sum(1 for _ in takewhile(lambda uid: uid != mine, self._uids(look)))
        return {
            ledger_id(mine, self.identity.tag): epoch,
            self._life_id(place): number_of(mine),
            **{
                self._run_id(mine, at): number
                for at, number in enumerate(_numbers(self.identity.run))
            },
        }

    def _uids(self, look: Look) -> Iterator[Uid]:
        for place in range(_LIVES_MAX):
            number = look(self._life_id(place))
            if number is None:
                return
            yield uid_of(number)

    def _run(self, look: Look, uid: Uid) -> str | None:
        parts: list[bytes] = []
        while (number := look(self._run_id(uid, len(parts)))) is not None:
            parts.append(_bytes_of(number))
        return b"".join(parts).decode() if parts else None

    def _life_id(self, place: int) -> str:
        name = f"{self.identity.pipeline}\0{self.identity.sink}"
        return f"epochal-name-{hashlib.sha256(name.encode()).hexdigest()[:24]}-{place}"

    def _run_id(self, uid: Uid, at: int) -> str:
        return f"epochal-run-{uid}-s{self.identity.tag}-{at}"


def number_of(uid: Uid) -> int:
    number = 0
    for character in uid:
        number = number * len(_ALPHABET) + _ALPHABET.index(character)
    return number


def uid_of(number: int) -> Uid:
    characters = []
    for _ in range(_UID_CHARACTERS):
        number, digit = divmod(number, len(_ALPHABET))
        characters.append(_ALPHABET[digit])
    if number:
        raise InvariantBroken("the table's log has a transaction of ours whose number is no uid")
    return Uid("".join(reversed(characters)))


def _numbers(run: str | None) -> Iterator[int]:
    """A run's key as numbers below 2^60, each led by how many bytes it carries."""
    if run is None:
        return
    written = run.encode()
    for start in range(0, max(len(written), 1), _BYTES_A_NUMBER):
        part = written[start : start + _BYTES_A_NUMBER]
        yield int.from_bytes(bytes([len(part)]) + part.ljust(_BYTES_A_NUMBER, b"\0"), "big")


def _bytes_of(number: int) -> bytes:
    length, *part = number.to_bytes(_BYTES_A_NUMBER + 1, "big")
    return bytes(part[:length])
