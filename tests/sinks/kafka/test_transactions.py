"""How transactions end: repeated, lost, timed out, by zombies, and how that is proven."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka_broker import Broker, Life, await_nothing_open, some, summed

from epochal.errors import (
    EpochalError,
    Misconfigured,
    OutcomeUnknown,
    PreparedLost,
    TryAgain,
)
from epochal.kafka.client import Patience
from epochal.kafka.cluster import Controller
from epochal.kafka.codes import Code
from epochal.kafka.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from epochal.kafka.messages.init_producer_id import InitProducerIdResponse
from epochal.session import Session
from epochal.sinks.kafka import committer, transaction_status, transactions
from epochal.sinks.kafka.receipts import transaction_of
from epochal.terms import Proof, Receipt

COMMIT, ABORT = "commit", "abort"


def try_verb(life: Life, verb: str, receipts: list[Receipt]) -> None:
    with suppress(PreparedLost):
        getattr(life, verb)(0, receipts)


@pytest.mark.parametrize("first", [False, True], ids=["own id", "pool"])
@pytest.mark.parametrize("then", [COMMIT, ABORT])
@pytest.mark.parametrize("before", [COMMIT, ABORT])
def test_the_first_end_stands_whatever_is_asked_after_it(
    kafka: Broker, before: str, then: str, first: bool
) -> None:
    topic = kafka.topic(partitions=2)
    life = kafka.life(topic, key="id")
    if first:
        life.write(0, some(-1), first=True)
    epoch = 1 if first else 0
    receipts = life.prepare(epoch, some(1, 2), first=first)
    assert ("-slot0" in str(receipts[0].token["transactional_id"])) is first
    try_verb(life, before, receipts)
    for _ in range(2):
        try_verb(kafka.keep(life.fresh()), then, receipts)
    seen = [number for number in kafka.ids(topic) if number > 0]
    assert seen == ([1, 2] if before == COMMIT else [])
    proof = kafka.keep(life.fresh()).outcome(receipts[0])
    assert proof is (Proof.COMMITTED if before == COMMIT else Proof.ABORTED)
    assert not kafka.keep(life.fresh()).committer.in_doubt()


def test_slots_are_used_again_and_a_commit_gives_the_next_producer_epoch(kafka: Broker) -> None:
    topic = kafka.topic()
    life = kafka.life(topic)
    named = []
    for epoch in range(4):
        receipts = life.write(epoch, some(epoch), some(10 + epoch), first=True)
        named.append([str(one.token["transactional_id"]) for one in receipts])
    assert all("-slot" not in name for name in named[0]), "a first epoch has no pool yet"
    assert named[1] == named[2] == named[3]
    assert [name[-6:] for name in named[3]] == ["-slot0", "-slot1"]
    assert kafka.ids(topic) == [0, 1, 2, 3, 10, 11, 12, 13]
    first = life.write(4, some(4), first=True)
    for epoch in range(5, 7):
        life.write(epoch, some(epoch), first=True)
    assert life.outcome(first[0]) is Proof.COMMITTED, "the topic still has the markers"
    life.commit(4, first)


def test_a_retry_never_uses_the_slot_of_the_attempt_before_it(kafka: Broker) -> None:
    topic = kafka.topic()
    life = kafka.life(topic)
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
    assert kafka.ids(topic) == [0, 1, 2]
    assert life.outcome(late) is Proof.ABORTED, "the next epoch started the slot again"
    assert not life.committer.in_doubt()


def test_a_task_that_wakes_up_after_its_abort_can_write_no_more(kafka: Broker) -> None:
    topic = kafka.topic()
    life = kafka.life(topic)
    writer = life.writer(some(1), 0, handout=life.begin(0))
    writer.write(some(1).to_batches()[0])
    writer._flush(writer._sender)
    writer._sender.finish()
    (found,) = life.committer.in_doubt()
    life.abort(0, [found.receipt])
    writer.write(some(2).to_batches()[0])
    with pytest.raises(TryAgain, match="ended by another process"):
        writer.prepare()
    assert kafka.messages(topic) == []
    assert not kafka.open_transactions(life.identity.tag)
    writer.abort()


def test_a_driver_that_wakes_up_late_touches_nothing_of_the_newer_one(kafka: Broker) -> None:
    topic = kafka.topic()
    old = kafka.life(topic)
    old.write(0, some(0), first=True)
    new = kafka.keep(old.fresh(generation=2))
    new.write(1, some(1), first=True)
    receipts = new.prepare(2, some(2), first=True)
    old.begin(2)  # raises the producer epochs of its own pool, and of no other
    old.commit(0, [])
    new.rehearse(2, receipts)
    new.commit(2, receipts)
    old.commit(2, receipts)
    assert kafka.ids(topic) == [0, 1, 2]
    (mark,) = new.committer.newest()
    assert mark.epoch == 2, "a late driver moved the ledger back"


def test_a_late_driver_does_not_move_the_ledger_of_empty_epochs_back(kafka: Broker) -> None:
    topic = kafka.topic()
    old = kafka.life(topic)
    old.commit(0, [])
    new = kafka.keep(old.fresh(generation=2))
    for epoch in (1, 2, 3):
        new.commit(epoch, [])
    old.commit(1, [])
    (mark,) = new.committer.newest()
    assert mark.epoch == 3


KEPT_S = 10.0
"""Of a transaction that is to time out: long enough to prepare it on a machine that is busy."""


def ended_by_broker(kafka: Broker, topic: str, **options: object) -> tuple[Life, list[Receipt]]:
    """A decided epoch whose transactions the broker then aborted."""
    life = kafka.life(topic, key="id", **options)
    return life, _aborted(kafka, life, 0, some(1, 2), some(3))


def _aborted(kafka: Broker, life: Life, epoch: int, *parts: pa.Table) -> list[Receipt]:
    receipts = [summed(one, 3) for one in life.prepare(epoch, *parts)]
    life.rehearse(epoch, receipts)
    for receipt in receipts:
        kafka.abort_open(str(receipt.token["transactional_id"]))
    return receipts


def test_a_transaction_that_a_broker_aborted_after_the_decision_is_reported_as_lost(
    kafka: Broker,
) -> None:
    topic = kafka.topic(partitions=2)
    life = kafka.life(topic, key="id", transaction_timeout_s=KEPT_S)
    receipts = life.prepare(0, some(1, 2), some(3))
    life.rehearse(0, receipts)
    await_nothing_open(kafka, life.identity.tag)
    with pytest.raises(PreparedLost) as caught:
        life.commit(0, receipts)
    assert set(caught.value.handles) == {str(one.handle) for one in receipts}
    again = life.prepare(0, some(1, 2), some(3))
    life.rehearse(0, again)
    life.commit(0, again)
    assert kafka.ids(topic) == [1, 2, 3]


def test_a_transaction_that_a_broker_aborted_is_sent_again_from_the_spool_once(
    kafka: Broker, tmp_path
) -> None:
    topic = kafka.topic(partitions=2)
    life, receipts = ended_by_broker(kafka, topic, spool=str(tmp_path))
    life.commit(0, receipts)
    assert kafka.ids(topic) == [1, 2, 3]
    kafka.keep(life.fresh(generation=2)).commit(0, receipts)
    assert kafka.ids(topic) == [1, 2, 3]
    assert {life.outcome(one) for one in receipts} == {Proof.COMMITTED}
    assert not files_below(tmp_path)
    assert not life.committer.in_doubt()


def test_a_late_driver_takes_rows_that_were_sent_again_for_sent_after_later_ones_were_too(
    kafka: Broker, tmp_path
) -> None:
    topic = kafka.topic()
    life, first = ended_by_broker(kafka, topic, spool=str(tmp_path))
    life.commit(0, first)
    second = _aborted(kafka, life, 1, some(4), some(5))
    life.commit(1, second)
    late = kafka.keep(life.fresh())
    assert {late.outcome(one) for one in (*first, *second)} == {Proof.COMMITTED}
    late.commit(0, first)
    assert kafka.ids(topic) == [1, 2, 3, 4, 5]
    assert not late.committer.in_doubt()


@pytest.mark.parametrize("code", [Code.PRODUCER_FENCED, Code.INVALID_PRODUCER_EPOCH])
def test_an_id_that_another_process_starts_at_the_same_time_is_tried_again(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch, code: Code
) -> None:
    """Two drivers race for the ledger's id: neither may take that for being fenced as a driver."""
    answer = InitProducerIdResponse(error_code=code)
    monkeypatch.setattr(transactions, "start_producers", lambda *_: [answer])
    with pytest.raises(TryAgain, match="another process"):
        transactions.start_one(kafka.client, "ledger", 1000)


@pytest.mark.parametrize("is_done", [True, False])
def test_an_abort_is_judged_by_the_state_of_the_transaction_afterwards(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """Apache Kafka aborts at the last producer epoch, and answers UNKNOWN_SERVER_ERROR."""
    topic = kafka.topic()
    life = kafka.life(topic)
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
    assert bool(kafka.open_transactions(life.identity.tag)) is not is_done
    life.abort(0, receipts)
    assert kafka.ids(topic) == []


def test_a_topic_that_is_deleted_after_the_decision_does_not_hold_the_pipeline_up(
    kafka: Broker,
) -> None:
    topic = kafka.topic(partitions=2)
    life = kafka.life(topic, key="id")
    receipts = life.prepare(0, some(1, 2), some(3))
    life.rehearse(0, receipts)
    request = DeleteTopicsRequest(
        topics=[DeleteTopicState(name=topic)], topic_names=[topic], timeout_ms=20_000
    )
    (gone,) = kafka.client.ask(request, Controller()).responses
    assert gone.error_code == Code.NONE
    life.commit(0, receipts)
    assert not kafka.open_transactions(life.identity.tag)
    late = kafka.keep(life.fresh())
    late.committer._client.patience = Patience(unknown_topic_s=0.2)
    with pytest.raises(Misconfigured, match="no topic"):
        late.begin(1)


def test_a_resend_that_was_interrupted_is_finished_once(
    kafka: Broker, tmp_path, monkeypatch
) -> None:
    """The driver dies after it sent rows again and before, or after, it committed them."""
    topic = kafka.topic(partitions=2)
    life, receipts = ended_by_broker(kafka, topic, spool=str(tmp_path))

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(committer, "commit_one", die)
        with pytest.raises(KeyboardInterrupt):
            life.commit(0, receipts)
    done = committer.commit_one
    with monkeypatch.context() as patched:
        patched.setattr(committer, "commit_one", lambda *args: (done(*args), die()))
        with pytest.raises(KeyboardInterrupt):
            kafka.keep(life.fresh()).commit(0, receipts)
    kafka.keep(life.fresh(generation=2)).commit(0, receipts)
    assert kafka.ids(topic) == [1, 2, 3]


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_spool_needs_no_name_where_the_pipeline_has_a_folder_of_its_own(
    kafka: Broker, tmp_path
) -> None:
    topic = kafka.topic(partitions=2)
    life, receipts = ended_by_broker(kafka, topic, spool=True, location=str(tmp_path))
    assert len(files_below(tmp_path / "epochal" / "spool")) == len(receipts)
    kafka.keep(life.fresh(generation=2)).commit(0, receipts)
    assert kafka.ids(topic) == [1, 2, 3]
    assert not files_below(tmp_path)
    assert not life.committer.in_doubt()


def test_a_session_keeps_its_spool_in_the_folder_of_its_log(kafka: Broker, tmp_path) -> None:
    topic = kafka.topic()
    sink = kafka.sink(topic, spool=True)
    rows = some(1, 2)
    with Session("spooled", sinks=[sink], log=tmp_path / "log", schema=rows.schema) as session:
        session.begin(0)
        session.write(rows)
        assert len(files_below(tmp_path / "log" / "epochal" / "spool")) == 1
        session.commit()
    assert kafka.ids(topic) == [1, 2]
    assert not files_below(tmp_path / "log" / "epochal")


@pytest.mark.parametrize("where", ["postgresql://etl@db/shop#log", "sqlite:///log.db", "memory"])
def test_a_spool_without_a_name_is_refused_where_files_have_no_room(
    kafka: Broker, where: str
) -> None:
    life = kafka.life(kafka.topic(), spool=True, location=where)
    with pytest.raises(Misconfigured, match="neither a folder nor in an object store") as caught:
        life.begin(0)
    assert "spool=" in caught.value.hint


def test_no_row_is_sent_where_the_spool_has_no_folder(kafka: Broker) -> None:
    life = kafka.life(kafka.topic(), spool=True)
    with pytest.raises(Misconfigured, match="no folder of its own"):
        life.begin(0)


def test_a_spool_that_only_the_tasks_see_is_found_out_before_the_decision(
    kafka: Broker, tmp_path
) -> None:
    topic = kafka.topic()
    life = kafka.life(topic, spool=str(tmp_path))
    receipts = life.prepare(0, some(1))
    for file in files_below(tmp_path):
        file.unlink()
    with pytest.raises(Misconfigured, match="the driver does not see the rows"):
        life.rehearse(0, receipts)
    life.abort(0, receipts)
    assert kafka.ids(topic) == []


def test_a_transaction_that_is_gone_before_the_decision_refuses_it(kafka: Broker) -> None:
    topic = kafka.topic()
    life = kafka.life(topic)
    receipts = life.prepare(0, some(1))
    kafka.keep(life.fresh()).abort(0, receipts)
    with pytest.raises(TryAgain, match="no longer open"):
        life.rehearse(0, receipts)


def test_the_markers_of_the_topic_prove_an_end_where_the_coordinator_can_not(kafka: Broker) -> None:
    """Both ends, each followed by another use of the id, with the readers held back meanwhile."""
    topic = kafka.topic()
    life = kafka.life(topic)
    pin = life.prepare(9, some(99))
    for is_commit, wanted in ((True, Proof.COMMITTED), (False, Proof.ABORTED)):
        (receipt,) = life.prepare(0, some(1))
        txn = transaction_of(receipt)
        (answer,) = transactions.end_transactions(kafka.client, [txn], is_commit=is_commit)
        assert answer.error_code == Code.NONE
        transactions.start_one(kafka.client, txn.transactional_id, 60_000)
        assert life.outcome(receipt) is wanted
    life.abort(9, pin)


def test_rows_prepared_in_one_cluster_are_not_looked_for_in_another(kafka: Broker) -> None:
    topic = kafka.topic()
    life = kafka.life(topic)
    (receipt,) = life.prepare(0, some(1))
    moved = Receipt(
        handle=receipt.handle,
        fingerprint=receipt.fingerprint,
        token={**receipt.token, "cluster": "another"},
    )
    with pytest.raises(EpochalError, match="prepared in the cluster another"):
        life.commit(0, [moved])
    life.abort(0, [receipt])


def test_a_commit_of_many_tasks_is_pipelined(kafka: Broker) -> None:
    topic = kafka.topic(partitions=4)
    life = kafka.life(topic)
    parts = [some(number) for number in range(24)]
    for epoch in range(3):
        life.write(epoch, *parts, first=True)
    assert len(kafka.messages(topic)) == 72
    assert life.committer.pinned_s > 0


def test_the_last_stable_offset_is_free_after_every_end(kafka: Broker) -> None:
    topic = kafka.topic()
    life = kafka.life(topic)
    life.write(0, some(1))
    life.abort(1, life.prepare(1, some(2)))
    life.write(2, some(3))
    committed = [message.offset() for message in kafka.messages(topic)]
    everything = [message.offset() for message in kafka.messages(topic, committed=False)]
    assert len(committed) == 2
    assert max(committed) == max(everything)


def test_empty_tasks_open_nothing(kafka: Broker) -> None:
    topic = kafka.topic()
    life = kafka.life(topic)
    receipts = life.prepare(0, some(1), pa.table(some(1)).slice(0, 0))
    assert receipts[1].token == {}
    life.rehearse(0, receipts)
    life.commit(0, receipts)
    assert [life.outcome(one) for one in receipts] == [Proof.COMMITTED] * 2
    assert kafka.ids(topic) == [1]
