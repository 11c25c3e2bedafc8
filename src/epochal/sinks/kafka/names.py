"""What this sink calls things at a cluster: transactional ids, and the group that is its ledger.

    <prefix>epochal-<uid>-g<generation>-e<epoch>-s<sink>-p<partition>-t<attempt>   one attempt, once
    <prefix>epochal-<uid>-s<sink>-g<generation>-slot<n>    first attempts, from epoch to epoch
    <prefix>epochal-<uid>-s<sink>-ledger                   the driver's own, for epochs without rows
    <prefix>epochal-<uid>-s<sink>-check                    asked for at the start, never written to
    <prefix>epochal-<uid>-s<sink>-again-e<epoch>-<n>       rows sent again from the spool
    <prefix>epochal-ledger-<life>-<uid>                    the ledger: a consumer group
    <prefix>epochal-ledger-<life>-<uid>-again-p<n>         which rows were sent again: another one

A broker remembers an id for a week, so an id per epoch would be a flood: first attempts share a
bounded pool. The generation is part of a slot's name: a driver that wakes up late and gets its pool
ready must not touch what a newer one has prepared.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from epochal.terms import Generation, Handle, Identity, Uid, handle_prefix

_SLOT = re.compile(
    r"epochal-(?P<uid>[a-z2-7]{12})-s(?P<sink>[0-9a-f]{8})-g(?P<generation>\d{1,10})-slot(?P<slot>\d{1,7})"
)
_LIFE_DIGITS = 16
_AGAIN = "-again-p"


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the pool of one driver."""

    generation: Generation
    number: int


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one sink of one pipeline."""

    prefix: str
    identity: Identity

    @property
    def ours(self) -> str:
        """How every transactional id of the pipeline begins, its other sinks' too."""
        return self.prefix + handle_prefix(self.identity.uid)

    def attempt(self, handle: Handle) -> str:
        return f"{self.prefix}{handle}"

    def slot(self, number: int, generation: Generation | None = None) -> str:
        speaking = self.identity.generation if generation is None else generation
        return f"{self._stem}-g{speaking}-slot{number}"

    @property
    def ledger(self) -> str:
        return f"{self._stem}-ledger"

    @property
    def check(self) -> str:
        return f"{self._stem}-check"

    def again(self, epoch: int, number: int) -> str:
        return f"{self._stem}-again-e{epoch}-{number}"

    @property
    def group(self) -> str:
        return f"{self.life}{self.identity.uid}"

    def group_again(self, partition: int) -> str:
        return f"{self.group}{_AGAIN}{partition}"

    @property
    def life(self) -> str:
        """How the ledgers of all lives of this pipeline and sink begin (I10)."""
        named = f"{self.identity.pipeline}\0{self.identity.sink}".encode()
        return f"{self.prefix}epochal-ledger-{hashlib.sha256(named).hexdigest()[:_LIFE_DIGITS]}-"

    @property
    def _stem(self) -> str:
        return f"{self.ours}s{self.identity.tag}"

    def uid_of(self, group: str) -> Uid | None:
        """Whose ledger a group is, or None where it is none of this pipeline and sink."""
        found = group.removeprefix(self.life)
        is_ours = found != group and re.fullmatch(r"[a-z2-7]{12}", found)
        return Uid(found) if is_ours else None

    def is_own_group(self, group: str) -> bool:
        """Whether a group is this life's ledger, or tells of rows that it sent again."""
        return group == self.group or group.startswith(f"{self.group}{_AGAIN}")

    def has(self, transactional_id: str) -> bool:
        """Whether an id is one of this very sink's, whatever it is for."""
        is_named = transactional_id.startswith(f"{self._stem}-")
        return is_named or self.parse(transactional_id) is not None

    def parse(self, transactional_id: str) -> Handle | Slot | None:
        """What of this very sink an id names; None for anything else."""
        text = transactional_id.removeprefix(self.prefix)
        handle = Handle.parse(text)
        if handle is not None:
            is_mine = (handle.uid, handle.sink) == (self.identity.uid, self.identity.tag)
            return handle if is_mine else None
        found = _SLOT.fullmatch(text)
        if found is None or (found["uid"], found["sink"]) != (self.identity.uid, self.identity.tag):
            return None
        return Slot(Generation(int(found["generation"])), int(found["slot"]))


def slot_id(prefix: str, handle: Handle) -> str:
    """The pool's id for a task, as the task itself spells it."""
    stem = f"{prefix}{handle_prefix(handle.uid)}s{handle.sink}"
    return f"{stem}-g{handle.generation}-slot{handle.partition}"
