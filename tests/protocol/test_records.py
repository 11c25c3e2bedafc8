"""The written form of a record: kept for ever, and refused by name where it can't be believed."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epochal.errors import CorruptRecord
from epochal.protocol.records import FORMAT, decode, encode
from epochal.protocol.state import (
    Accepted,
    EpochEnd,
    GivenUp,
    Pause,
    Record,
    RecordKind,
    State,
    Total,
    accepted,
    gave_up,
    rewritten,
    settled,
    sinks_done,
    stopped,
)
from epochal.terms import (
    Claim,
    Decision,
    EpochNumber,
    Fingerprint,
    Generation,
    Handle,
    Offsets,
    Receipt,
    SinkName,
    Uid,
    sink_tag,
)

GOLDEN = Path(__file__).parent / "golden"
"""Written once: a release that writes or reads them otherwise has another format number."""


def golden_records(make):
    unsettled = make.unsettled()
    noted = sinks_done(unsettled, frozenset({make.orders}))
    word = GivenUp(
        epoch=EpochNumber(0), sink=make.audit, kept_at="s3://kept/0", by="ann", because="topic gone"
    )
    done = settled(sinks_done(unsettled, frozenset({make.orders, make.audit})))
    again = make.receipt(
        "orders", generation=2, attempt=9, token={"path": "/stage/ä", "parts": [1, None]}
    )
    states = {
        RecordKind.CLAIM: make.fresh(driver="host-1 pid 4711"),
        RecordKind.COMMIT: unsettled,
        RecordKind.PROGRESS: noted,
        RecordKind.REWRITE: rewritten(unsettled, make.orders, [again]),
        RecordKind.SETTLED: done,
        RecordKind.GAVE_UP: gave_up(noted, word),
        RecordKind.STOP: replace(
            stopped(done, is_clear=True),
            ends=(EpochEnd(epoch=EpochNumber(0), sources=('{"t":{"0":7}}', '{"logOffset":0}')),),
        ),
        RecordKind.IDENTITY: replace(
            done, forked_from=Uid("zzzzzzzzzzzz"), run="2026-10-reprocess"
        ),
        RecordKind.RESOLVED: done,
        RecordKind.PAUSE: replace(
            done, pause=Pause(by="ann", because="the database is upgraded", since=1767225600.25)
        ),
        RecordKind.RESUME: done,
        RecordKind.ACCEPTED: accepted(
            done,
            Accepted(
                sink=make.audit,
                after=None,
                since=EpochNumber(0),
                through=EpochNumber(0),
                by="ann",
                because="restored",
                run="repair-audit-0-0",
            ),
        ),
    }
    return {
        kind: Record(kind=kind, nonce="00ff" * 8, written_at=1767225600.25, state=state)
        for kind, state in states.items()
    }


@pytest.mark.parametrize("kind", RecordKind)
def test_a_record_is_read_and_written_as_it_always_was(make, kind):
    data = (GOLDEN / f"{kind.value}.json").read_bytes()
    record = replace(golden_records(make)[kind], note="ann: seen in the target")
    assert decode(data, "golden") == record
    assert encode(record) == data


texts = st.text(max_size=20)
numbers = st.integers(min_value=0, max_value=2**60)
sink_names = st.text(min_size=1, max_size=12).map(SinkName)
uids = st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=12, max_size=12).map(Uid)
claims = st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=8, max_size=8).map(Claim)
counters = st.integers(min_value=0, max_value=10**14 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


totals = st.builds(
    Total,
    since=numbers.map(EpochNumber),
    epochs=numbers,
    fingerprint=st.builds(Fingerprint, numbers, st.none() | st.integers(0, 2**64 - 1), numbers),
    bytes=numbers,
)


@st.composite
def receipts(draw, sink):
    handle = Handle(
        uid=draw(uids),
        generation=Generation(draw(st.integers(0, 10**9))),
        claim=draw(claims),
        epoch=EpochNumber(draw(counters)),
        sink=sink_tag(sink),
        partition=draw(st.integers(0, 9_999_999)),
        attempt=draw(counters),
    )
    hashed = draw(st.none() | st.integers(0, 2**64 - 1))
    return Receipt(
        handle=handle,
        fingerprint=Fingerprint(draw(numbers), hashed, draw(numbers)),
        bytes=draw(numbers),
        token=draw(st.dictionaries(texts, json_values, max_size=3)),
    )


@st.composite
def records(draw):
    decision = None
    if draw(st.booleans()):
        names = draw(st.lists(sink_names, unique=True, max_size=3))
        decision = Decision(
            epoch=EpochNumber(draw(numbers)),
            generation=Generation(draw(numbers)),
            offsets=Offsets(digest=draw(texts), text=draw(texts)),
            receipts={name: tuple(draw(st.lists(receipts(name), max_size=2))) for name in names},
            decided_at=draw(st.floats(0, 1e10)),
        )
    state = State(
        uid=draw(uids),
        pipeline=draw(texts),
        location=draw(texts),
        run=draw(st.none() | texts),
        query_id=draw(st.none() | texts),
        generation=Generation(draw(numbers)),
        claims=tuple(draw(st.lists(claims, max_size=3))),
        driver=draw(texts),
        first=EpochNumber(draw(numbers)),
        unsettled=decision,
        done=frozenset(draw(st.lists(sink_names, max_size=2))),
        sinks=draw(
            st.dictionaries(sink_names, st.dictionaries(texts, json_values, max_size=2), max_size=2)
        ),
        is_stopped=draw(st.booleans()),
        is_clear=draw(st.booleans()),
        totals=draw(st.dictionaries(sink_names, totals, max_size=2)),
        newest_committed=draw(st.dictionaries(sink_names, numbers.map(EpochNumber), max_size=2)),
        ends=tuple(
            EpochEnd(epoch=EpochNumber(draw(numbers)), sources=tuple(draw(st.lists(texts))))
            for _ in range(draw(st.integers(0, 2)))
        ),
    )
    return Record(
        kind=draw(st.sampled_from(RecordKind)),
        nonce=draw(texts),
        written_at=draw(st.floats(0, 1e10)),
        state=state,
        note=draw(texts),
    )


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(records())
def test_what_is_written_is_what_is_read(record):
    assert decode(encode(record), "here") == record


@pytest.fixture
def written(make):
    return encode(golden_records(make)[RecordKind.COMMIT])


def test_a_record_cut_short_anywhere_is_refused_by_name(written):
    for length in range(len(written)):
        with pytest.raises(CorruptRecord, match="log/17"):
            decode(written[:length], "log/17")


def test_a_record_with_any_byte_changed_is_refused_or_newer(written):
    for at in range(len(written)):
        changed = bytes([*written[:at], written[at] ^ 1, *written[at + 1 :]])
        with pytest.raises(CorruptRecord, match="log/17"):
            decode(changed, "log/17")


def test_bytes_after_the_end_are_refused(written):
    with pytest.raises(CorruptRecord, match="log/17"):
        decode(written + b"\n", "log/17")


@pytest.mark.parametrize("foreign", [b"", b"\n", b"{}", b"PAR1", b"epochal-log one two three\n\n"])
def test_a_foreign_object_is_refused_and_nothing_is_overwritten(foreign):
    with pytest.raises(CorruptRecord, match="log/17: not a readable record") as caught:
        decode(foreign, "log/17")
    assert "nothing was overwritten" in caught.value.hint


def sealed(body: bytes, number: int = FORMAT) -> bytes:
    digest = hashlib.sha256(body).hexdigest().encode()
    return b"epochal-log %d %s %d\n%s\n" % (number, digest, len(body), body)


def test_a_record_of_a_newer_release_is_refused_with_the_way_out():
    with pytest.raises(CorruptRecord, match=f"log/17: format {FORMAT + 1}") as caught:
        decode(sealed(b"{}", FORMAT + 1), "log/17")
    assert "newer release" in caught.value.hint


@pytest.mark.parametrize("missing", ["uid", "generation", "unsettled", "is_stopped", "is_clear"])
def test_a_record_without_a_key_is_refused(written, missing):
    body = json.loads(written.split(b"\n")[1])
    del body["state"][missing]
    with pytest.raises(CorruptRecord, match="log/17"):
        decode(sealed(json.dumps(body).encode()), "log/17")
