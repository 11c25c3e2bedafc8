"""Pages of the history: bounded time at any length, completed from the log."""

from __future__ import annotations

import time

import pytest
from pyarrow import ArrowInvalid

from epochal import Memory
from epochal.coordinator import Trouble
from epochal.errors import CorruptRecord, Misconfigured
from epochal.logs import open_log
from epochal.reports.epochs import epoch_attempts, epochs, export
from epochal.telemetry.history import (
    PastEpoch,
    PastSink,
    epoch_line,
    header,
    history_of,
    segment_name,
)
from epochal.terms import EpochNumber, Generation, SinkName


def line(epoch: int, outcome: str = "committed") -> bytes:
    return epoch_line(
        PastEpoch(
            epoch=EpochNumber(epoch),
            generation=Generation(1),
            outcome=outcome,
            opened_at=1000.0 + epoch,
            finished_at=1001.0 + epoch,
            seconds={"preparing": 0.5, "committing": 0.25},
            sinks={SinkName("orders"): PastSink(rows=2, bytes=20)},
            trouble=None if outcome == "committed" else Trouble(code="gate-refused", message="no"),
        )
    )


def segment(place, first: int, count: int, part: int = 0) -> None:
    first_line = header(uid="u", pipeline="shop", generation=Generation(1), driver="d")
    lines = b"".join(line(first + at) for at in range(count))
    place.put(segment_name(EpochNumber(first), Generation(1), part), first_line + lines)


def test_every_epoch_is_reported_with_its_phases_and_sinks(shop):
    shop.run(epochs=3, rows=2)
    found = epochs(shop.log).epochs
    assert [one.epoch for one in found] == [2, 1, 0]
    assert {one.outcome for one in found} == {"committed"}
    assert {"preparing", "prepared", "decided", "committing"} <= set(found[0].seconds)
    assert found[0].sinks["orders"]["rows"] == 2
    assert "committing" in found[0].sinks["orders"]["seconds"]


def test_an_aborted_epoch_is_reported_with_its_error_beside_its_next_attempt(shop):
    with shop.session() as session:
        session.begin(0)
        session.write([{"id": "not a number"}])
        with pytest.raises(ArrowInvalid):
            session.commit()
        shop.epoch(session)
    found = epoch_attempts(shop.log, 0)
    assert [one.outcome for one in found] == ["aborted", "committed"]
    assert found[0].trouble["code"] == "ArrowInvalid"
    assert [one.outcome for one in epochs(shop.log, only="aborted").epochs] == ["aborted"]


def test_pages_meet_without_a_gap_or_a_repeat(shop):
    shop.run(epochs=1)
    place = history_of(shop.log).store
    for at in range(4):
        segment(place, 1 + at * 10, 10, at)
    found, cursor = [], None
    while True:
        page = epochs(shop.log, limit=7, cursor=cursor)
        found += [one.epoch for one in page.epochs]
        cursor = page.cursor
        if cursor is None:
            break
    assert found == list(range(40, -1, -1))


def test_a_page_of_a_million_epochs_takes_less_than_a_second(shop):
    shop.run(epochs=1)
    place = history_of(shop.log).store
    full = b"".join(line(at) for at in range(500))
    first_line = header(uid="u", pipeline="shop", generation=Generation(1), driver="d")
    for at in range(2000):
        place.put(segment_name(EpochNumber(1 + at * 500), Generation(1), at), first_line + full)
    began_s = time.process_time()
    page = epochs(shop.log, limit=50)
    older = epochs(shop.log, limit=50, cursor="00000000000000500001-0000000001-1000.jsonl:7")
    assert time.process_time() - began_s < 1
    assert (len(page.epochs), len(older.epochs)) == (50, 50)


def test_a_rare_outcome_is_found_by_bounded_pages(shop):
    shop.run(epochs=1)
    place = history_of(shop.log).store
    first_line = header(uid="u", pipeline="shop", generation=Generation(1), driver="d")
    for at in range(50):
        first, rare = 1 + at * 500, 7 if at in (2, 45) else None
        lines = [line(first + n, "aborted" if n == rare else "committed") for n in range(500)]
        place.put(segment_name(EpochNumber(first), Generation(1), at), first_line + b"".join(lines))
    found, cursors = [], [None]
    while len(cursors) == 1 or cursors[-1] is not None:
        page = epochs(shop.log, limit=5, cursor=cursors[-1], only="aborted")
        found += [one.epoch for one in page.epochs]
        cursors.append(page.cursor)
        assert page.because == ""
    assert found == [45 * 500 + 8, 2 * 500 + 8]
    assert len(cursors) == 4, "51 segments are searched in three pages"
    assert epochs(shop.log, only="failed").epochs == []


def test_epochs_that_the_history_lacks_are_read_from_the_log(shop):
    shop.run(epochs=1)
    driver = shop.die("decided")
    found = epochs(shop.log).epochs
    assert [(one.epoch, one.outcome, one.read_from) for one in found] == [
        (1, "decided", "log"),
        (0, "committed", "history"),
    ]
    assert found[0].rows == 4
    assert driver is not None


def test_without_a_history_the_epochs_of_the_log_are_reported(shop):
    driver = shop.die("decided")
    report = epochs(shop.log)
    assert [one.read_from for one in report.epochs] == ["log"]
    assert "only the epochs of the log's newest records" in report.because
    assert driver is not None


@pytest.mark.parametrize(("limit", "cursor"), [(0, None), (10**6, None), (5, "nonsense")])
def test_an_invalid_page_is_refused(shop, limit, cursor):
    shop.run(epochs=1)
    with pytest.raises(Misconfigured):
        epochs(shop.log, limit=limit, cursor=cursor)


def test_a_torn_segment_is_refused_by_name_and_may_be_removed(shop):
    shop.run(epochs=1)
    history_of(shop.log).store.put(segment_name(EpochNumber(9), Generation(1), 0), b"{torn")
    with pytest.raises(CorruptRecord, match=r"00000000000000000009.*can't be read") as caught:
        epochs(shop.log)
    assert "remove the file" in caught.value.hint


def test_sqlite_logs_have_a_history(tmp_path, shop, monkeypatch):
    monkeypatch.setattr(type(shop), "log_path", f"sqlite://{tmp_path}/log.db")
    shop.run(epochs=2)
    assert [one.epoch for one in epochs(open_log(shop.log_path)).epochs] == [1, 0]


def test_a_pipeline_without_decisions_is_reported_as_such(shop):
    with shop.session():
        report = epochs(shop.log)
        assert (report.epochs, report.because) == ([], "no epoch has been decided yet")


def test_an_export_holds_every_kept_record_and_no_secret(shop):
    shop.audit = Memory(name="audit")
    shop.run(epochs=1)
    records = export(shop.log).records
    assert [record["kind"] for record in records] == ["claim", "commit", "stop"]
    assert [record["number"] for record in records] == [1, 2, 3]
    with pytest.raises(Misconfigured, match="holds no epoch log"):
        export(type(shop)(root=shop.root / "none", monkeypatch=shop.monkeypatch).log)
