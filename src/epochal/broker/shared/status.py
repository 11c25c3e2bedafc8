"""The members of a cluster and how they are: what `epochal broker status` shows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from epochal.broker.shared.journal import MemberRecord, SharedJournal
from epochal.broker.shared.peers import Peer, Status
from epochal.clock import SystemClock
from epochal.errors import Misconfigured

SILENT = "silent"
_ANSWER_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    member: str
    address: str
    role: str
    """`active`, `claiming`, `standby`, or `silent`: listed, and does not answer."""
    since: float | None
    """When it took this role, by its own clock."""
    generation: int | None
    slot: int | None
    """Up to here it has taken the journal in."""
    lag: int | None
    """How many slots the journal is ahead of it."""
    release: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerClusterReport:
    journal: str
    slots: int
    """The number of the newest."""
    snapshot: int
    """The slot of the newest, 0 without any."""
    members: Sequence[MemberStatus]


def cluster_status(url: str) -> BrokerClusterReport:
    """Ask every member that is listed in the journal at this URL."""
    journal = SharedJournal(url, SystemClock())
    try:
        secret, records = journal.secret(), journal.members()
        if secret is None:
            raise Misconfigured(
                f"no cluster of brokers has its journal at {journal.location}",
                "the URL that its members were started with: --cluster URL",
            )
        answers = asyncio.run(_ask_all(records, secret))
        snapshot = max(journal.snapshot_numbers(), default=0)
        highest = journal.highest(snapshot)
        members = [
            _status(record, answer, highest)
            for record, answer in zip(records, answers, strict=True)
        ]
        return BrokerClusterReport(
            journal=journal.location,
            slots=highest,
            snapshot=snapshot,
            members=members,
        )
    finally:
        journal.close()


def _status(record: MemberRecord, answer: Status | None, highest: int) -> MemberStatus:
    found = answer or {}
    slot = found.get("slot")
    return MemberStatus(
        member=record.member,
        address=f"{_bracketed(record.host)}:{record.port}",
        role=found.get("role", SILENT),
        since=found["since_ms"] / 1000 if found else None,
        generation=found.get("generation"),
        slot=slot,
        lag=None if slot is None else max(highest - slot, 0),
        release=found.get("release", ""),
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _ask_all(records: Sequence[MemberRecord], secret: bytes) -> list[Status | None]:
    return list(await asyncio.gather(*(_ask(record, secret) for record in records)))


async def _ask(record: MemberRecord, secret: bytes) -> Status | None:
    peer = Peer(record.peer_host, record.peer_port, secret)
    try:
        return await asyncio.wait_for(peer.ask({}), _ANSWER_WITHIN_S)
    except (OSError, TimeoutError, ValueError):
        return None
    finally:
        peer.close()
