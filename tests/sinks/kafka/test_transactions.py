"""How transactions end: repeated, lost, timed out, by zombies, and how that is proven."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka_place import Life, Place, some

from epochal.contract import Task
from epochal.coordinator import Environment
from epochal.errors import (
    EpochalError,
    Misconfigured,
    OutcomeUnknown,
    PreparedLost,
    TryAgain,
)
from epochal.kafka.cluster import Controller
from epochal.kafka.codes import Code
from epochal.kafka.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from epochal.kafka.messages.init_producer_id import InitProducerIdResponse
from epochal.logs import MemoryLog
from epochal.session import Session
from epochal.sinks.kafka import Kafka, resend, transaction_status, transactions
from epochal.sinks.kafka.receipts import transaction_of
from epochal.terms import Fingerprint, Limits, Proof, Receipt, sink_tag
from epochal.testing.driver import Checkpoint, Crash, Driver

COMMIT, ABORT = "commit", "abort"


def try_verb(life: Life, verb: str, receipts: list[Receipt]) -> None:
    with suppress(PreparedLost):
        getattr(life, verb)(0, receipts)


@pytest.mark.parametrize("first", [False, True], ids=["own id", "pool"])
@pytest.mark.parametrize("then", [COMMIT, ABORT])
@pytest.mark.parametrize("before", [COMMIT, ABORT])
def test_the_first_end_stands_whatever_is_asked_after_it(
    place: Place, before: str, then: str, first: bool
) -> None:
    topic = place.topic(partitions=2)
    life = place.life(topic, key="id")
    if first:
        life.write(0, some(-1), first=True)
    epoch = 1 if first else 0
    receipts = life.prepare(epoch, some(1, 2), first=first)
    assert ("-slot0" in str(receipts[0].token["transactional_id"])) is first
    try_verb(life, before, receipts)
    for _ in range(2):
        try_verb(place.keep(life.fresh()), then, receipts)
    seen = [number for number in place.ids(topic) if number > 0]
    assert seen == ([1, 2] if before == COMMIT else [])
    proof = place.keep(life.fresh()).outcome(receipts[0])
    assert proof is (Proof.COMMITTED if before == COMMIT else Proof.ABORTED)
    assert not place.keep(life.fresh()).committer.in_doubt()


def test_slots_are_used_again_and_a_commit_gives_the_next_producer_epoch(place: Place) -> None:
    topic = place.topic()
    life = place.life(topic)
    named = []
    for epoch in range(4):
        receipts = life.write(epoch, some(epoch), some(10 + epoch), first=True)
        named.append([str(one.token["transactional_id"]) for one in receipts])
    assert all("-slot" not in name for name in named[0]), "a first epoch has no pool yet"
    assert named[1] == named[2] == named[3]
    assert [name[-6:] for name in named[3]] == ["-slot0", "-slot1"]
    assert place.ids(topic) == [0, 1, 2, 3, 10, 11, 12, 13]
    first = life.write(4, some(4), first=True)
    for epoch in range(5, 7):
        life.write(epoch, some(epoch), first=True)
    assert life.outcome(first[0]) is Proof.COMMITTED, "the topic still has the markers"
    life.commit(4, first)


def test_a_retry_never_uses_the_slot_of_the_attempt_before_it(place: Place) -> None:
    topic = place.topic()
    life = place.life(topic)
    life.write(0, some(0), first=True)
    handout = life.begin(1)
    zombie = life.writer(some(1), 1, handout=handout, first=True)
    zombie.write(some(1).to_batches()[0])
    won = life.attempt(some(1), 1, handout=handout, first=False)
    life.rehearse(1, [won])
    life.commit(1, [won])
    # The zombie goes on after the decision: no decision names what it prepares.
    late = zombie.prepare()
    assert life.outcome(late) is Proof.UNKNOWN
    found = life.committer.in_doubt()
    assert [one.name for one in found] == [late.token["transactional_id"]]
    life.write(2, some(2), first=True)
    assert place.ids(topic) == [0, 1, 2]
    assert life.outcome(late) is Proof.ABORTED, "the next epoch started the slot again"
    assert not life.committer.in_doubt()


def test_a_task_that_wakes_up_after_its_abort_can_write_no_more(place: Place) -> None:
    topic = place.topic()
    life = place.life(topic)
    writer = life.writer(some(1), 0, handout=life.begin(0))
    writer.write(some(1).to_batches()[0])
    writer._flush(writer._sender)
    writer._sender.finish()
    (found,) = life.committer.in_doubt()
    life.abort(0, [found.receipt])
    writer.write(some(2).to_batches()[0])
    with pytest.raises(TryAgain, match="ended by another process"):
        writer.prepare()
    assert place.messages(topic) == []
    assert not place.open_transactions(life.identity.tag)
    writer.abort()


def test_a_driver_that_wakes_up_late_touches_nothing_of_the_newer_one(place: Place) -> None:
    topic = place.topic()
    old = place.life(topic)
    old.write(0, some(0), first=True)
    new = place.keep(old.fresh(generation=2))
    new.write(1, some(1), first=True)
    receipts = new.prepare(2, some(2), first=True)
    old.begin(2)  # raises the producer epochs of its own pool, and of no other
    old.commit(0, [])
    new.rehearse(2, receipts)
    new.commit(2, receipts)
    old.commit(2, receipts)
    assert place.ids(topic) == [0, 1, 2]
    (mark,) = new.committer.newest()
    assert mark.epoch == 2, "a late driver moved the ledger back"


def test_a_late_driver_does_not_move_the_ledger_of_empty_epochs_back(place: Place) -> None:
    topic = place.topic()
    old = place.life(topic)
    old.commit(0, [])
    new = place.keep(old.fresh(generation=2))
    for epoch in (1, 2, 3):
        new.commit(epoch, [])
    old.commit(1, [])
    (mark,) = new.committer.newest()
    assert mark.epoch == 3


KEPT_S = 3.0
"""Of transactions that are to time out: long enough to prepare them on a machine that is busy."""


def timed_out(place: Place, topic: str, **options: object) -> tuple[Life, list[Receipt]]:
    """A decided epoch whose transactions the broker then aborted."""
    life = place.life(topic, key="id", transaction_timeout_s=KEPT_S, **options)
    return life, _aborted(place, life, 0, some(1, 2), some(3))


def _aborted(place: Place, life: Life, epoch: int, *parts: pa.Table) -> list[Receipt]:
    receipts = [_summed(one, 3) for one in life.prepare(epoch, *parts)]
    life.rehearse(epoch, receipts)
    _await_nothing_open(place, life.identity.tag)
    return receipts


def _await_nothing_open(place: Place, tag: str) -> None:
    deadline = time.monotonic() + 60
    while place.open_transactions(tag):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _summed(receipt: Receipt, hash_sum: int) -> Receipt:
    return Receipt(
        handle=receipt.handle,
        fingerprint=Fingerprint(receipt.rows, hash_sum),
        bytes=receipt.bytes,
        token=receipt.token,
    )


def test_a_transaction_that_a_broker_aborted_after_the_decision_is_reported_as_lost(
    place: Place,
) -> None:
    topic = place.topic(partitions=2)
    life, receipts = timed_out(place, topic)
    with pytest.raises(PreparedLost) as caught:
        life.commit(0, receipts)
    assert set(caught.value.handles) == {str(one.handle) for one in receipts}
    again = life.prepare(0, some(1, 2), some(3))
    life.rehearse(0, again)
    life.commit(0, again)
    assert place.ids(topic) == [1, 2, 3]


def test_a_transaction_that_a_broker_aborted_is_sent_again_from_the_spool_once(
    place: Place, tmp_path
) -> None:
    topic = place.topic(partitions=2)
    life, receipts = timed_out(place, topic, spool=str(tmp_path))
    life.commit(0, receipts)
    assert place.ids(topic) == [1, 2, 3]
    place.keep(life.fresh(generation=2)).commit(0, receipts)
    assert place.ids(topic) == [1, 2, 3]
    assert {life.outcome(one) for one in receipts} == {Proof.COMMITTED}
    assert not files_below(tmp_path)
    assert not life.committer.in_doubt()


def test_a_late_driver_takes_rows_that_were_sent_again_for_sent_after_later_ones_were_too(
    place: Place, tmp_path
) -> None:
    topic = place.topic()
    life, first = timed_out(place, topic, spool=str(tmp_path))
    life.commit(0, first)
    second = _aborted(place, life, 1, some(4), some(5))
    life.commit(1, second)
    late = place.keep(life.fresh())
    assert {late.outcome(one) for one in (*first, *second)} == {Proof.COMMITTED}
    late.commit(0, first)
    assert place.ids(topic) == [1, 2, 3, 4, 5]
    assert not late.committer.in_doubt()


@pytest.mark.parametrize("code", [Code.PRODUCER_FENCED, Code.INVALID_PRODUCER_EPOCH])
def test_an_id_that_another_process_starts_at_the_same_time_is_tried_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, code: Code
) -> None:
    """Two drivers race for the ledger's id: neither may take that for being fenced as a driver."""
    answer = InitProducerIdResponse(error_code=code)
    monkeypatch.setattr(transactions, "start_producers", lambda *_: [answer])
    with pytest.raises(TryAgain, match="another process"):
        transactions.start_one(place.client, "ledger", 1000)


@pytest.mark.parametrize("is_done", [True, False])
def test_an_abort_is_judged_by_the_state_of_the_transaction_afterwards(
    place: Place, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """Apache Kafka aborts at the last producer epoch, and answers UNKNOWN_SERVER_ERROR."""
    topic = place.topic()
    life = place.life(topic)
    receipts = life.prepare(0, some(1))
    honest = transactions.start_producers

    def start(client: Any, starts: Any) -> list[InitProducerIdResponse]:
        if is_done:
            honest(client, starts)
        return [InitProducerIdResponse(error_code=Code.UNKNOWN_SERVER_ERROR) for _ in starts]

    with monkeypatch.context() as patched:
        patched.setattr(transaction_status, "start_producers", start)
        if is_done:
            life.abort(0, receipts)
        else:
            with pytest.raises(OutcomeUnknown):
                life.abort(0, receipts)
    assert bool(place.open_transactions(life.identity.tag)) is not is_done
    life.abort(0, receipts)
    assert place.ids(topic) == []


def test_a_topic_that_is_deleted_after_the_decision_does_not_hold_the_pipeline_up(
    place: Place,
) -> None:
    topic = place.topic(partitions=2)
    life = place.life(topic, key="id")
    receipts = life.prepare(0, some(1, 2), some(3))
    life.rehearse(0, receipts)
    request = DeleteTopicsRequest(
        topics=[DeleteTopicState(name=topic)], topic_names=[topic], timeout_ms=20_000
    )
    (gone,) = place.client.ask(request, Controller()).responses
    assert gone.error_code == Code.NONE
    life.commit(0, receipts)
    assert not place.open_transactions(life.identity.tag)
    with pytest.raises(Misconfigured, match="no topic"):
        place.keep(life.fresh()).begin(1)


def test_a_resend_that_was_interrupted_is_finished_once(
    place: Place, tmp_path, monkeypatch
) -> None:
    """The driver dies after it sent rows again and before, or after, it committed them."""
    topic = place.topic(partitions=2)
    life, receipts = timed_out(place, topic, spool=str(tmp_path))

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(resend, "commit_one", die)
        with pytest.raises(KeyboardInterrupt):
            life.commit(0, receipts)
    done = resend.commit_one
    with monkeypatch.context() as patched:
        patched.setattr(resend, "commit_one", lambda *args: (done(*args), die()))
        with pytest.raises(KeyboardInterrupt):
            place.keep(life.fresh()).commit(0, receipts)
    place.keep(life.fresh(generation=2)).commit(0, receipts)
    assert place.ids(topic) == [1, 2, 3]


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_spool_needs_no_name_where_the_pipeline_has_a_folder_of_its_own(
    place: Place, tmp_path
) -> None:
    topic = place.topic(partitions=2)
    life, receipts = timed_out(place, topic, spool=True, location=str(tmp_path))
    assert len(files_below(tmp_path / "epochal" / "spool")) == len(receipts)
    place.keep(life.fresh(generation=2)).commit(0, receipts)
    assert place.ids(topic) == [1, 2, 3]
    assert not files_below(tmp_path)
    assert not life.committer.in_doubt()


def test_a_session_keeps_its_spool_in_the_folder_of_its_log(place: Place, tmp_path) -> None:
    topic = place.topic()
    sink = place.sink(topic, spool=True)
    rows = some(1, 2)
    with Session("spooled", sinks=[sink], log=tmp_path / "log", schema=rows.schema) as session:
        session.begin(0)
        session.write(rows)
        assert len(files_below(tmp_path / "log" / "epochal" / "spool")) == 1
        session.commit()
    assert place.ids(topic) == [1, 2]
    assert not files_below(tmp_path / "log" / "epochal")


@pytest.mark.parametrize("where", ["postgresql://etl@db/shop#log", "sqlite:///log.db", "memory"])
def test_a_spool_without_a_name_is_refused_where_files_have_no_room(
    place: Place, where: str
) -> None:
    life = place.life(place.topic(), spool=True, location=where)
    with pytest.raises(Misconfigured, match="neither a folder nor in an object store") as caught:
        life.begin(0)
    assert "spool=" in caught.value.hint


def test_no_row_is_sent_where_the_spool_has_no_folder(place: Place) -> None:
    life = place.life(place.topic(), spool=True)
    with pytest.raises(Misconfigured, match="no folder of its own"):
        life.begin(0)


def test_a_spool_that_only_the_tasks_see_is_found_out_before_the_decision(
    place: Place, tmp_path
) -> None:
    topic = place.topic()
    life = place.life(topic, spool=str(tmp_path))
    receipts = life.prepare(0, some(1))
    for file in files_below(tmp_path):
        file.unlink()
    with pytest.raises(Misconfigured, match="the driver does not see the rows"):
        life.rehearse(0, receipts)
    life.abort(0, receipts)
    assert place.ids(topic) == []


def test_a_rehearsal_returns_when_the_transactions_may_time_out(place: Place) -> None:
    life = place.life(place.topic(), transaction_timeout_s=60.0)
    began_s = time.monotonic()
    receipts = life.prepare(0, some(1))
    deadline = life.committer.rehearse(receipts[0].handle.epoch, receipts)
    assert deadline is not None
    assert deadline.kept_s == 60.0
    assert began_s <= deadline.at_s - 60.0 <= time.monotonic()
    life.abort(0, receipts)


def test_a_transaction_that_is_gone_before_the_decision_refuses_it(place: Place) -> None:
    topic = place.topic()
    life = place.life(topic)
    receipts = life.prepare(0, some(1))
    place.keep(life.fresh()).abort(0, receipts)
    with pytest.raises(TryAgain, match="no longer open"):
        life.rehearse(0, receipts)


def test_the_markers_of_the_topic_prove_an_end_where_the_coordinator_can_not(place: Place) -> None:
    """Both ends, each followed by another use of the id, with the readers held back meanwhile."""
    topic = place.topic()
    life = place.life(topic)
    pin = life.prepare(9, some(99))
    for is_commit, wanted in ((True, Proof.COMMITTED), (False, Proof.ABORTED)):
        (receipt,) = life.prepare(0, some(1))
        txn = transaction_of(receipt)
        (answer,) = transactions.end_transactions(place.client, [txn], is_commit=is_commit)
        assert answer.error_code == Code.NONE
        transactions.start_one(place.client, txn.transactional_id, 60_000)
        assert life.outcome(receipt) is wanted
    life.abort(9, pin)


def test_rows_prepared_in_one_cluster_are_not_looked_for_in_another(place: Place) -> None:
    topic = place.topic()
    life = place.life(topic)
    (receipt,) = life.prepare(0, some(1))
    moved = Receipt(
        handle=receipt.handle,
        fingerprint=receipt.fingerprint,
        token={**receipt.token, "cluster": "another"},
    )
    with pytest.raises(EpochalError, match="prepared in the cluster another"):
        life.commit(0, [moved])
    life.abort(0, [receipt])


def test_a_commit_of_many_tasks_is_pipelined(place: Place) -> None:
    topic = place.topic(partitions=4)
    life = place.life(topic)
    parts = [some(number) for number in range(24)]
    for epoch in range(3):
        life.write(epoch, *parts, first=True)
    assert len(place.messages(topic)) == 72
    assert life.committer.pinned_s > 0


def test_the_last_stable_offset_is_free_after_every_end(place: Place) -> None:
    topic = place.topic()
    life = place.life(topic)
    life.write(0, some(1))
    life.abort(1, life.prepare(1, some(2)))
    life.write(2, some(3))
    committed = [message.offset() for message in place.messages(topic)]
    everything = [message.offset() for message in place.messages(topic, committed=False)]
    assert len(committed) == 2
    assert max(committed) == max(everything)


def test_empty_tasks_open_nothing(place: Place) -> None:
    topic = place.topic()
    life = place.life(topic)
    receipts = life.prepare(0, some(1), pa.table(some(1)).slice(0, 0))
    assert receipts[1].token == {}
    life.rehearse(0, receipts)
    life.commit(0, receipts)
    assert [life.outcome(one) for one in receipts] == [Proof.COMMITTED] * 2
    assert place.ids(topic) == [1]


class _Summing:
    """A writer whose receipts carry a sum over the rows, as Spark's door adds it."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._sum = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._sum += sum(hash(value) for value in batch.column("id").to_pylist())
        self._real.write(batch)

    def prepare(self) -> Receipt:
        return _summed(self._real.prepare(), self._sum)


class _SummingKafka(Kafka):
    def writer(self, task: Task) -> Any:
        return _Summing(super().writer(task))


def test_an_epoch_that_timed_out_after_its_decision_is_written_again_when_it_is_replayed(
    place: Place,
) -> None:
    """The driver dies right after the decision and comes back when the broker has given up."""
    topic = place.topic(partitions=2)
    sink = _SummingKafka(
        place.bootstrap, topic=topic, key="id", name=topic, transaction_timeout_s=2 * KEPT_S
    )
    log, engine = MemoryLog(), Checkpoint(["first", "second"])
    epochs = [
        [[some(1, 2).to_batches()[0]], [some(3).to_batches()[0]]],
        [[some(4).to_batches()[0]]],
    ]

    def driver(watch: Any) -> Driver:
        return Driver(
            log=log,
            sinks=[sink],
            engine=engine,
            read=lambda epoch: epochs[epoch],
            epochs=2,
            schema=some(1).schema,
            limits=Limits(retry_backoff_ms=(1,), sweep_every_s=0.0),
            environment=Environment(on_step=watch),
        )

    def die_once_decided(step: str, epoch: int | None) -> None:
        if step == "decided":
            raise Crash

    with pytest.raises(Crash):
        driver(die_once_decided).run()
    assert place.quick_ids(topic) == []
    _await_nothing_open(place, sink_tag(topic))
    driver(lambda step, epoch: None).run()
    assert place.ids(topic) == [1, 2, 3, 4]
    assert not place.open_transactions(sink_tag(topic))
