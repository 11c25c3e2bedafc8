"""The session: the same promise in one process, without Spark."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

import epochal as ep
from epochal.contract import Task, Writer
from epochal.coordinator import Environment, read_state
from epochal.coordinator.journal import Journal
from epochal.logs import MemoryLog
from epochal.protocol.admission import Admission
from epochal.protocol.machine import Phase

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


def rows(*ids: int) -> list[dict[str, object]]:
    return [{"id": number, "name": f"row {number}"} for number in ids]


def ids(sink: ep.Memory) -> list[int]:
    table = sink.rows()
    return sorted(table["id"].to_pylist()) if table.num_columns else []


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def sink() -> ep.Memory:
    return ep.Memory()


def open_session(log: MemoryLog, *sinks: object, **more: object) -> ep.Session:
    return ep.Session("orders", sinks=list(sinks), log=log, **{"schema": SCHEMA, **more})


def test_rows_are_visible_after_commit_and_not_before(log, sink):
    with open_session(log, sink) as session:
        assert session.state is Phase.IDLE
        assert session.begin(0) is Admission.FRESH
        session.write(rows(1, 2))
        assert ids(sink) == []
        session.commit()
        assert session.state is Phase.COMMITTED
    assert ids(sink) == [1, 2]


def test_an_aborted_epoch_leaves_nothing_and_may_be_tried_again(log, sink):
    with open_session(log, sink) as session:
        session.begin(0)
        session.write(rows(1))
        session.abort()
        assert session.state is Phase.ABORTED
        session.begin(0)
        session.write(rows(2))
        session.commit()
    assert ids(sink) == [2]


def test_arrow_and_mappings_mix_and_keep_their_order(log, sink):
    with open_session(log, sink) as session:
        session.begin(0)
        session.write(rows(1))
        session.write(pa.RecordBatch.from_pylist(rows(2), schema=SCHEMA))
        session.write(pa.Table.from_pylist(rows(3, 4), schema=SCHEMA))
        session.commit()
    assert sink.rows()["id"].to_pylist() == [1, 2, 3, 4]


def test_rows_are_flushed_inside_the_transaction_when_the_buffer_is_full(log, sink):
    with open_session(log, sink, limits=ep.Limits(buffer_rows=2)) as session:
        session.begin(0)
        session.write(rows(*range(5)))
        assert ids(sink) == []
        session.commit()
    assert ids(sink) == [0, 1, 2, 3, 4]


def test_a_decided_epoch_that_comes_again_writes_nothing(log, sink):
    with open_session(log, sink) as session:
        session.begin(0, offsets="0-1")
        session.write(rows(1))
        session.commit()
    with open_session(log, sink) as session:
        assert session.next_epoch == 1
        assert session.begin(0, offsets="0-1") is Admission.REPLAY
        session.write(rows(1))
        session.commit()
        session.begin(1)
        session.write(rows(2))
        session.commit()
    assert ids(sink) == [1, 2]


def test_the_same_epoch_with_other_offsets_is_refused(log, sink):
    with open_session(log, sink) as session:
        session.begin(0, offsets="0-1")
        session.commit()
    with (
        open_session(log, sink) as session,
        pytest.raises(ep.Refused, match="decided for other offsets"),
    ):
        session.begin(0, offsets="0-2")


def test_an_epoch_out_of_line_is_refused_with_both_numbers(log, sink):
    with open_session(log, sink) as session, pytest.raises(ep.Refused, match=r"epoch 5.*-1"):
        session.begin(5)


@pytest.mark.parametrize("is_replay", [False, True])
def test_beginning_twice_is_refused_and_names_both_states(log, sink, is_replay):
    with open_session(log, sink) as session:
        session.begin(0)
        if is_replay:
            session.commit()
            session.begin(0)
        with pytest.raises(ep.InvariantBroken, match=r"active.*but the epoch is"):
            session.begin(0)
        session.abort()


@pytest.mark.parametrize("verb", ["write", "commit", "abort"])
def test_nothing_can_be_done_before_an_epoch_begins(log, sink, verb):
    with open_session(log, sink) as session, pytest.raises(ep.InvariantBroken, match="idle"):
        getattr(session, verb)(*([rows(1)] if verb == "write" else []))


def test_leaving_the_block_in_the_middle_aborts(log, sink):
    def leave_early() -> None:
        with open_session(log, sink) as session:
            session.begin(0)
            session.write(rows(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave_early()
    assert ids(sink) == []
    with open_session(log, sink) as session:
        assert session.next_epoch == 0


def test_a_second_session_fences_the_first(log, sink):
    first = open_session(log, sink)
    first.begin(0)
    first.write(rows(1))
    with open_session(log, sink) as second:
        with pytest.raises(ep.Fenced):
            first.commit()
        second.begin(0)
        second.write(rows(2))
        second.commit()
    assert ids(sink) == [2]


def test_a_gate_that_refuses_leaves_nothing_visible(log, sink):
    def no_odd_counts(epoch: ep.PreparedEpoch) -> str | None:
        return "an odd number of rows" if epoch.rows("memory") % 2 else None

    with open_session(log, sink, gates=[no_odd_counts]) as session:
        session.begin(0)
        session.write(rows(1))
        with pytest.raises(ep.GateRefused, match=r"no_odd_counts.*an odd number of rows"):
            session.commit()
        session.begin(0)
        session.write(rows(1, 2))
        session.commit()
    assert ids(sink) == [1, 2]


@dataclass(frozen=True, kw_only=True)
class Breaking(ep.Memory):
    """The second sink of an epoch that fails; giving it up then fails, too."""

    fails: str = "prepare"
    error: BaseException = field(default_factory=lambda: OSError("disk full"))

    def writer(self, task: Task) -> Writer:
        if self.fails == "open":
            raise self.error
        writer = super().writer(task)
        setattr(writer, self.fails, self._break)
        writer.abort = self._cannot_abort
        return writer

    def _break(self, *_: object) -> None:
        raise self.error

    def _cannot_abort(self) -> None:
        raise ValueError("the connection is closed")


def test_one_sink_that_cannot_prepare_leaves_nothing_in_the_other(log):
    good, bad = ep.Memory(name="good"), Breaking(name="bad")
    with open_session(log, good, bad) as session:
        session.begin(0)
        session.write(rows(1))
        with pytest.raises(OSError, match="disk full"):
            session.commit()
        assert session.state is Phase.ABORTED
    assert ids(good) == []
    assert not good._reference.store()._prepared


def test_rows_that_the_target_lost_after_the_decision_are_not_taken_for_written(log, sink):
    def lose_the_rows(step: str, _epoch: object) -> None:
        if step == "decided":
            sink._reference.store()._prepared.clear()

    with open_session(log, sink, environment=Environment(on_step=lose_the_rows)) as session:
        session.begin(0)
        session.write(rows(1))
        with pytest.raises(ep.Unsettled, match="written again"):
            session.commit()
    with open_session(log, sink) as session:
        with pytest.raises(ep.Unsettled, match="epoch 1 can't begin"):
            session.begin(1)
        assert session.begin(0) is Admission.REPLAY
        session.write(rows(1))
        session.commit()
        session.begin(1)
        session.write(rows(2))
        session.commit()
    assert ids(sink) == [1, 2]


def lose_decided_rows(log, sink, decided, **options):
    """An epoch 0 that is decided, and whose rows the target then threw away."""
    safe = ep.Memory(name="safe")

    def lose_the_rows(step: str, _epoch: object) -> None:
        if step == "decided":
            sink._reference.store()._prepared.clear()

    environment = Environment(on_step=lose_the_rows)
    with open_session(log, sink, safe, environment=environment, **options) as session:
        session.begin(0)
        session.write(decided)
        with pytest.raises(ep.Unsettled, match="written again"):
            session.commit()
    return safe


def test_lost_rows_are_written_again_only_where_nulls_are_at_the_same_places(log, sink):
    columns = [("a", pa.int64()), ("b", pa.int64()), ("many", pa.list_(pa.int64()))]
    schema = pa.schema(columns)
    decided = [{"a": 5, "b": None, "many": [1, None]}, {"a": 6, "b": 7, "many": None}]
    safe = lose_decided_rows(log, sink, decided, schema=schema)
    with open_session(log, sink, safe, schema=schema) as session:
        for other in ({"a": None, "b": 5}, {"many": [None, 1]}, {"many": [1]}):
            session.begin(0)
            session.write([{**decided[0], **other}, decided[1]])
            with pytest.raises(ep.Unsettled, match="can't be written again"):
                session.commit()
        session.begin(0)
        session.write([decided[0], {**decided[1], "many": []}])
        with pytest.raises(ep.Unsettled, match="can't be written again"):
            session.commit()
        assert sink.rows().num_rows == 0
        session.begin(0)
        session.write(decided[::-1])
        session.commit()
    assert safe.rows().num_rows == sink.rows().num_rows == 2
    assert not sink._reference.store()._prepared


def test_lost_rows_of_a_session_without_hashes_are_left_to_a_person(log, sink):
    safe = lose_decided_rows(log, sink, rows(1), fingerprint=False)
    with (
        open_session(log, sink, safe, fingerprint=False) as session,
        pytest.raises(ep.Unsettled, match="threw its prepared rows away") as caught,
    ):
        session.begin(0)
    assert "fingerprint=False" in caught.value.hint
    with open_session(log, sink, safe) as session:
        session.begin(0)
        session.write(rows(1))
        with pytest.raises(ep.Unsettled, match="not hashed"):
            session.commit()


def test_an_error_while_lost_rows_are_written_again_leaves_the_decision(log, sink):
    safe = lose_decided_rows(log, sink, rows(1))
    with open_session(log, sink, safe) as session:
        session.begin(0)
        with pytest.raises(ep.Misconfigured, match="schema"):
            session.write(pa.table({"other": [1]}))
        session.begin(0)
        session.abort()
        session.begin(0)
    with open_session(log, sink, safe) as session:
        session.begin(0)
        session.write(rows(1))
        session.commit()
    assert ids(sink) == [1]


def test_ctrl_c_in_the_moment_of_the_decision_does_not_take_it_back(log, sink, monkeypatch):
    def interrupt(journal, is_halted):
        was_halted = journal.__dict__["is_halted"]
        journal.__dict__["is_halted"] = is_halted
        if was_halted and not is_halted:
            raise KeyboardInterrupt

    session = open_session(log, sink)
    session.begin(0)
    session.write(rows(1))
    watched = property(lambda journal: journal.__dict__["is_halted"], interrupt)
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "is_halted", watched, raising=False)
        with pytest.raises(KeyboardInterrupt):
            session.commit()
    session.close()
    open_session(log, sink).close()
    assert ids(sink) == [1]


def test_sql_on_a_sink_is_refused_as_there_is_no_spark(log):
    with pytest.raises(ep.Misconfigured, match="where= or select="):
        open_session(log, ep.Memory(where="id > 1"))


def test_texts_that_polars_gives_as_views_are_texts(log, tmp_path: Path):
    given = pa.table(pl.DataFrame({"id": [1, 2], "name": ["a", "b"]}))
    assert given.schema.field("name").type == pa.string_view()
    sink = ep.Files(tmp_path / "out", format="jsonl", partition_by=["name"])
    with open_session(log, sink, schema=given.schema) as session:
        session.begin(0)
        session.write(given)
        session.write(rows(3))
        session.commit()
    written = {file.parent.name: file.read_text() for file in tmp_path.glob("out/*/*.jsonl")}
    assert written == {
        "name=a": '{"id":1}\n',
        "name=b": '{"id":2}\n',
        "name=row 3": '{"id":3}\n',
    }


def test_rows_of_another_schema_are_refused(log, sink):
    with open_session(log, sink) as session:
        session.begin(0)
        with pytest.raises(ep.Misconfigured, match="schema"):
            session.write(pa.table({"other": [1]}))


def test_a_field_that_no_column_takes_is_refused_and_not_left_out(log, sink):
    with open_session(log, sink) as session:
        session.begin(0)
        session.write([*rows(1), {"id": 2, "nmae": "row 2"}])
        with pytest.raises(ep.Misconfigured, match=r"fields \['nmae'\]"):
            session.commit()
        assert session.state is Phase.ABORTED
        session.begin(0)
        session.write([*rows(1), {"id": 2}])
        session.commit()
    assert sink.rows()["name"].to_pylist() == ["row 1", None]


def test_a_write_that_failed_takes_the_whole_epoch_with_it(log):
    a, b = ep.Memory(name="a"), Breaking(name="b", fails="write")
    with open_session(log, a, b) as session:
        session.begin(0)
        with pytest.raises(OSError, match="disk full"):
            session.write(pa.Table.from_pylist(rows(1), schema=SCHEMA))
        assert session.state is Phase.ABORTED
        with pytest.raises(ep.InvariantBroken, match="aborted"):
            session.commit()
    assert (ids(a), ids(b)) == ([], [])


@pytest.mark.parametrize("fails", ["write", "prepare"])
def test_ctrl_c_before_the_decision_takes_the_whole_epoch_with_it(log, fails):
    a, b = ep.Memory(name="a"), Breaking(name="b", fails=fails, error=KeyboardInterrupt())
    with open_session(log, a, b) as session:
        session.begin(0)
        with pytest.raises(KeyboardInterrupt):
            _write_and_commit(session)
        assert session.state is Phase.ABORTED
        assert not a._reference.store()._prepared
        with pytest.raises(ep.InvariantBroken, match="aborted"):
            session.commit()
    assert (ids(a), ids(b)) == ([], [])


def _write_and_commit(session):
    session.write(pa.Table.from_pylist(rows(1), schema=SCHEMA))
    session.commit()


def test_an_epoch_whose_writers_can_not_be_opened_is_thrown_away(log):
    a, b = ep.Memory(name="a"), Breaking(name="b", fails="open")
    with open_session(log, a, b) as session:
        for _ in range(2):
            with pytest.raises(OSError, match="disk full"):
                session.begin(0)
            assert session.state is Phase.ABORTED
    assert read_state(log).is_stopped


def test_a_row_that_does_not_fit_loses_no_other_row_in_silence(log, sink):
    with open_session(log, sink) as session:
        session.begin(0)
        session.write([*rows(1, 2), {"id": "not a number", "name": ""}])
        with pytest.raises(pa.ArrowInvalid):
            session.commit()
        assert session.state is Phase.ABORTED
    assert ids(sink) == []


def test_a_begin_that_is_refused_leaves_the_offsets_of_the_open_epoch(log, sink):
    with open_session(log, sink) as session:
        session.begin(0, offsets="0..9")
        with pytest.raises(ep.Refused):
            session.begin(5, offsets="50..59")
        session.commit()
    assert read_state(log).last.offsets.text == "0..9"


def test_figures_count_epochs_rows_and_time(log, sink):
    with open_session(log, sink) as session:
        session.begin(0)
        session.write(rows(1, 2))
        session.commit()
        session.begin(1)
        session.abort()
        figures = session.metrics
    assert (figures.commits, figures.aborts, figures.rows) == (1, 1, 2)
    assert figures.success_rate == 0.5
    assert figures.latency[Phase.COMMITTING].count == 1


def test_session_after_session_in_one_process_leaves_no_thread_and_no_file_open(tmp_path: Path):
    def run(numbers: range) -> None:
        for number in numbers:
            with open_session(tmp_path / "log", ep.Files(str(tmp_path / "out"))) as session:
                session.begin(number)
                session.write(rows(number))
                session.commit()

    def left_open() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/dev/fd").iterdir()))

    run(range(5))
    threads, files = left_open()
    run(range(5, 20))
    deadline_s = time.monotonic() + 60
    # A thread that was asked to end takes a moment.
    while (left := left_open())[0] > threads or left[1] > files:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_folder_is_enough_for_a_log(tmp_path: Path):
    sink = ep.Files(str(tmp_path / "out"))
    for _ in range(4):
        with ep.Session("orders", sinks=[sink], log=tmp_path / "log", schema=SCHEMA) as session:
            session.begin(session.next_epoch)
            session.write(rows(session.next_epoch))
            session.commit()
    found = ep.read_epochs(tmp_path / "out").to_table()
    assert sorted(found["id"].to_pylist()) == [0, 1, 2, 3]
