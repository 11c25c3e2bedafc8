"""
The encoding of a record of the epoch log: format 1.

    epochal-log 1 <sha256 of the body, hex> <length of the body in bytes>\\n
    <body: one JSON object>\\n

The header is checked before anything in the body is believed. A record that is torn, truncated,
foreign or of a newer format is refused by name and never overwritten. A key unknown to the reader
means a newer writer, and dropping it would lose state, so the format number rises with every key
that a release adds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from epochal.errors import CorruptRecord, require_known_format
from epochal.protocol.receipts import (
    ListedReceipts,
    ReadList,
    Sum,
    print_out,
    receipt_in,
    receipt_out,
)
from epochal.protocol.state import (
    Accepted,
    EpochEnd,
    GivenUp,
    LastEpoch,
    Pause,
    Record,
    RecordKind,
    State,
    Total,
)
from epochal.terms import (
    Claim,
    Decision,
    EpochNumber,
    Fingerprint,
    Generation,
    Offsets,
    Receipt,
    SinkName,
    Uid,
)

FORMAT = 1
_MAGIC = b"epochal-log"


def encode(record: Record) -> bytes:
    body = json.dumps(
        {
            "kind": record.kind.value,
            "nonce": record.nonce,
            "written_at": record.written_at,
            "note": record.note,
            "state": _state_out(record.state),
        },
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    return b"%s %d %s %d\n%s\n" % (_MAGIC, FORMAT, digest, len(body), body)


def decode(data: bytes, name: str, read_list: ReadList | None = None) -> Record:
    """
    The record in `data`; `name` says in errors which object it came from.

    Receipts that lie beside the log are read by `read_list` when they are first needed.
    """
    body = _checked_body(data, name)
    try:
        read = json.loads(body)
        return Record(
            kind=RecordKind(read["kind"]),
            nonce=read["nonce"],
            written_at=read["written_at"],
            note=read["note"],
            state=_state_in(read["state"], read_list),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _corrupt(
            name, f"its checksum is right, but its content is not ({error!r})"
        ) from error


def _checked_body(data: bytes, name: str) -> bytes:
    header, found, rest = data.partition(b"\n")
    words = header.split(b" ")
    if not found or len(words) != 4 or words[0] != _MAGIC or not words[1].isdigit():
        raise _corrupt(name, "it does not begin like a record of an epoch log")
    require_known_format(name, int(words[1]), FORMAT)
    digest, length = words[2], words[3]
    if not length.isdigit() or len(rest) != int(length) + 1 or not rest.endswith(b"\n"):
        raise _corrupt(
            name, f"{len(rest)} bytes after the header, {length.decode()} were announced"
        )
    body = rest[:-1]
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise _corrupt(name, "its checksum does not match its content")
    return body


def _corrupt(name: str, fact: str) -> CorruptRecord:
    return CorruptRecord(
        f"{name}: not a readable record of the epoch log: {fact}",
        "nothing was overwritten; keep a copy of the folder, then restore the object from a backup",
    )


def _offsets_out(offsets: Offsets) -> list[str]:
    return [offsets.digest, offsets.text]


def _offsets_in(read: Sequence[str]) -> Offsets:
    digest, text = read
    return Offsets(digest=digest, text=text)


def _decision_out(decision: Decision) -> dict[str, Any]:
    return {
        "epoch": decision.epoch,
        "generation": decision.generation,
        "offsets": _offsets_out(decision.offsets),
        "decided_at": decision.decided_at,
        "receipts": {sink: _receipts_out(receipts) for sink, receipts in decision.receipts.items()},
    }


def _receipts_out(receipts: Sequence[Receipt]) -> Any:
    if not isinstance(receipts, ListedReceipts):
        return [receipt_out(receipt) for receipt in receipts]
    counted = receipts.sum
    sums = [counted.receipts, *print_out(counted.fingerprint), counted.bytes]
    return {"sum": sums, "lists": receipts.lists}


def _receipts_in(read: Any, read_list: ReadList | None) -> Sequence[Receipt]:
    if not isinstance(read, dict):
        return tuple(receipt_in(one) for one in read)
    count, rows, hash_sum, algorithm, size = read["sum"]
    counted = Sum(receipts=count, fingerprint=Fingerprint(rows, hash_sum, algorithm), bytes=size)
    return ListedReceipts(read["lists"], counted, read=read_list)


def _decision_in(read: Mapping[str, Any], read_list: ReadList | None) -> Decision:
    return Decision(
        epoch=EpochNumber(read["epoch"]),
        generation=Generation(read["generation"]),
        offsets=_offsets_in(read["offsets"]),
        decided_at=read["decided_at"],
        receipts={
            SinkName(sink): _receipts_in(receipts, read_list)
            for sink, receipts in read["receipts"].items()
        },
    )


def _last_out(last: LastEpoch) -> dict[str, Any]:
    return {
        "epoch": last.epoch,
        "generation": last.generation,
        "offsets": _offsets_out(last.offsets),
        "rows": dict(last.rows),
        "decided_at": last.decided_at,
    }


def _last_in(read: Mapping[str, Any]) -> LastEpoch:
    return LastEpoch(
        epoch=EpochNumber(read["epoch"]),
        generation=Generation(read["generation"]),
        offsets=_offsets_in(read["offsets"]),
        rows={SinkName(sink): rows for sink, rows in read["rows"].items()},
        decided_at=read["decided_at"],
    )


def _state_out(state: State) -> dict[str, Any]:
    return {
        "uid": state.uid,
        "pipeline": state.pipeline,
        "location": state.location,
        "run": state.run,
        "forked_from": state.forked_from,
        "query_id": state.query_id,
        "generation": state.generation,
        "claims": list(state.claims),
        "driver": state.driver,
        "first": state.first,
        "last": None if state.last is None else _last_out(state.last),
        "unsettled": None if state.unsettled is None else _decision_out(state.unsettled),
        "done": sorted(state.done),
        "sinks": {sink: dict(described) for sink, described in state.sinks.items()},
        "given_up": [asdict(given_up) for given_up in state.given_up],
        "accepted": [asdict(accepted) for accepted in state.accepted],
        "totals": _totals_out(state.totals),
        "newest_committed": dict(sorted(state.newest_committed.items())),
        "pause": None if state.pause is None else asdict(state.pause),
        "ends": [[end.epoch, *end.sources] for end in state.ends],
        "is_stopped": state.is_stopped,
        "is_clear": state.is_clear,
    }


def _totals_out(totals: Mapping[SinkName, Total]) -> dict[str, Any]:
    return {
        sink: [counted.since, counted.epochs, *print_out(counted.fingerprint), counted.bytes]
        for sink, counted in totals.items()
    }


def _totals_in(read: Mapping[str, Any]) -> dict[SinkName, Total]:
    return {
        SinkName(sink): Total(
            since=EpochNumber(since),
            epochs=epochs,
            fingerprint=Fingerprint(rows, hash_sum, algorithm),
            bytes=size,
        )
        for sink, (since, epochs, rows, hash_sum, algorithm, size) in read.items()
    }


def _state_in(read: Mapping[str, Any], read_list: ReadList | None) -> State:
    last, unsettled = read["last"], read["unsettled"]
    return State(
        uid=Uid(read["uid"]),
        pipeline=read["pipeline"],
        location=read["location"],
        run=read["run"],
        forked_from=None if read["forked_from"] is None else Uid(read["forked_from"]),
        query_id=read["query_id"],
        generation=Generation(read["generation"]),
        claims=tuple(Claim(claim) for claim in read["claims"]),
        driver=read["driver"],
        first=EpochNumber(read["first"]),
        last=None if last is None else _last_in(last),
        unsettled=None if unsettled is None else _decision_in(unsettled, read_list),
        done=frozenset(SinkName(sink) for sink in read["done"]),
        sinks={SinkName(sink): described for sink, described in read["sinks"].items()},
        given_up=tuple(GivenUp(**given_up) for given_up in read["given_up"]),
        accepted=tuple(Accepted(**accepted) for accepted in read["accepted"]),
        totals=_totals_in(read["totals"]),
        newest_committed={
            SinkName(sink): EpochNumber(epoch) for sink, epoch in read["newest_committed"].items()
        },
        pause=None if read["pause"] is None else Pause(**read["pause"]),
        ends=tuple(
            EpochEnd(epoch=EpochNumber(epoch), sources=tuple(sources))
            for epoch, *sources in read["ends"]
        ),
        is_stopped=read["is_stopped"],
        is_clear=read["is_clear"],
    )
