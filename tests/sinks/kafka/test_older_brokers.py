"""Brokers before 3.0 neither list nor describe transactions: what can still be promised."""

from __future__ import annotations

import pytest
from kafka_broker import Broker, Life, some

from epochal.errors import PreparedLost
from epochal.kafka.handshake import Link
from epochal.kafka.messages.describe_transactions import DescribeTransactionsRequest
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.terms import Proof

_YOUNGER = (DescribeTransactionsRequest.API_KEY, ListTransactionsRequest.API_KEY)


@pytest.fixture
def older(kafka: Broker, monkeypatch: pytest.MonkeyPatch) -> Broker:
    """The test's own client still sees transactions: it has connected before."""
    kafka.client.nodes()
    honest = Link.__init__

    def limited(self: Link, *args: object) -> None:
        honest(self, *args)
        self.versions = {key: value for key, value in self.versions.items() if key not in _YOUNGER}

    monkeypatch.setattr(Link, "__init__", limited)
    return kafka


def ability(life: Life, name: str) -> bool:
    (found,) = [one for one in life.committer.check(some(1).schema) if one.name == name]
    return found.granted


def test_rows_are_visible_once_and_ends_are_proven_by_markers(older: Broker) -> None:
    topic = older.topic(partitions=2)
    life = older.life(topic, key="id")
    assert not ability(life, "clearing up")
    committed = life.write(0, some(1, 2), some(3), first=True)
    dropped = life.prepare(1, some(4), first=True)
    life.abort(1, dropped)
    assert older.open_transactions(life.identity.tag) == []
    again = life.write(1, some(5), first=True)
    late = older.keep(life.fresh(generation=2))
    late.commit(1, again)
    assert older.ids(topic) == [1, 2, 3, 5]
    assert {late.outcome(one) for one in (*committed, *again)} == {Proof.COMMITTED}
    assert late.outcome(dropped[0]) is Proof.ABORTED


def test_what_is_open_is_neither_listed_nor_taken_for_ended(older: Broker) -> None:
    topic = older.topic()
    life = older.life(topic)
    receipts = life.prepare(0, some(1))
    life.rehearse(0, receipts)
    late = older.keep(life.fresh(generation=2))
    assert not late.committer.in_doubt()
    assert late.outcome(receipts[0]) is Proof.UNKNOWN
    assert older.ids(topic) == []
    late.commit(0, receipts)
    assert older.ids(topic) == [1]


def test_a_commit_after_somebody_aborted_is_not_taken_for_done(older: Broker) -> None:
    topic = older.topic()
    life = older.life(topic)
    receipts = life.prepare(0, some(1))
    life.abort(0, receipts)
    with pytest.raises(PreparedLost):
        older.keep(life.fresh()).commit(0, receipts)
    assert older.ids(topic) == []
