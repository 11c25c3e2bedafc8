"""The same promises on catalogs that are servers: REST, and SQL in PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import requests
from pyiceberg.exceptions import CommitFailedException
from servers.iceberg import RestCatalog, running_rest_catalog
from servers.postgres import running_server

from epochal.contract import Begin
from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.kit.secrets import env
from epochal.session import Session
from epochal.sinks.iceberg import Iceberg, committer
from epochal.sinks.iceberg import pyiceberg_private as private
from epochal.sinks.iceberg.client import TableAddress
from epochal.terms import EpochNumber, Proof

E2, E3 = EpochNumber(2), EpochNumber(3)


@pytest.fixture(scope="module")
def rest() -> Iterator[RestCatalog]:
    with running_rest_catalog() as server:
        yield server


@pytest.fixture
def on_rest(rest: RestCatalog, open_warehouse):
    return open_warehouse({"type": "rest", "uri": rest.url})


def story(warehouse, live, some) -> None:
    """Tasks, an empty epoch, a conflict, a repeat, an upsert beside it, losers."""
    name = warehouse.create()
    life = live(warehouse.sink(name))
    life.write(0, some(1, 2), some(3))
    life.write(1)
    receipt = life.prepare(some(4), 2)
    life.committer.rehearse(E2, [receipt])
    warehouse.load(name).append(some(50))
    life.committer.commit(E2, [receipt])
    later = live(life.sink, generation=2)
    later.committer.commit(E2, [receipt])
    assert later.committer.outcome(E2, receipt) is Proof.COMMITTED
    upsert = live(
        warehouse.sink(
            name, mode="upsert", keys="id", name="upsert", audit_branch="audit", snapshots_kept=2
        )
    )
    for epoch in range(3):
        upsert.write(epoch, some(1, 60 + epoch, name="new"))
    loser = later.prepare(some(99), 3)
    later.committer.abort(E3, [loser])
    rows = {row["id"]: row["name"] for row in warehouse.rows(name)}
    assert rows == {
        **{number: f"row {number}" for number in (2, 3, 4, 50)},
        **{number: f"new {number}" for number in (1, 60, 61, 62)},
    }
    assert [mark.epoch for mark in later.committer.newest()] == [2]
    assert [mark.epoch for mark in upsert.committer.newest()] == [2]
    assert set(warehouse.load(name).refs()) == {"main"}


def test_a_rest_catalog_keeps_every_promise(on_rest, live, some):
    story(on_rest, live, some)


def test_a_sql_catalog_in_postgresql_keeps_every_promise(open_warehouse, tmp_path, live, some):
    with running_server() as server:
        uri = server.url().replace("postgresql://", "postgresql+psycopg://")
        warehouse = open_warehouse(
            {"type": "sql", "uri": uri, "warehouse": f"file://{tmp_path}/warehouse"}
        )
        story(warehouse, live, some)
        warehouse.catalog.close()


def test_a_catalog_that_is_killed_is_asked_again_when_it_is_back(rest, on_rest, live, some):
    name = on_rest.create()
    life = live(on_rest.sink(name))
    receipt = life.prepare(some(1), 0)
    life.committer.rehearse(EpochNumber(0), [receipt])
    rest.kill()
    with pytest.raises(OutcomeUnknown):
        life.committer.commit(EpochNumber(0), [receipt])
    with pytest.raises(TryAgain):
        life.committer.outcome(EpochNumber(0), receipt)
    rest.start()
    assert life.committer.outcome(EpochNumber(0), receipt) is Proof.UNKNOWN
    life.committer.commit(EpochNumber(0), [receipt])
    assert on_rest.ids(name) == [1]


@pytest.fixture
def pair(on_rest, live, monkeypatch):
    """Two tables, the committers of both as one transaction, and the requests that it sends."""
    names = [on_rest.create(), on_rest.create()]
    lives = [live(on_rest.sink(name)) for name in names]
    sent: list[int] = []
    plain = private.send_together

    def counted(catalog, changes):
        sent.append(len(changes))
        plain(catalog, changes)

    monkeypatch.setattr(private, "send_together", counted)
    return names, lives, sent


def rehearsed(lives, rows, epoch):
    """One epoch's receipts by sink, and the transaction that was rehearsed with them."""
    for life in lives:
        life.start(rows)
    receipts = {life.sink.name: [life.prepare(rows, epoch)] for life in lives}
    shared = lives[0].committer.share([life.committer for life in lives])
    shared.rehearse(epoch, receipts)
    return shared, receipts


def test_several_tables_of_a_rest_catalog_are_committed_by_one_request(
    on_rest, live, some, pair, tmp_path
):
    names, lives, sent = pair
    sinks = [on_rest.sink(name, name=f"sink {name}") for name in names]
    log = str(tmp_path / "log")
    with Session("both", sinks=sinks, schema=some(1).schema, log=log) as session:
        for epoch in range(3):
            session.begin(epoch)
            session.write(some(2 * epoch, 2 * epoch + 1).to_pylist())
            session.commit()
    assert sent == [2, 2, 2]
    assert [on_rest.ids(name) for name in names] == [list(range(6))] * 2
    assert [on_rest.leftovers(name) for name in names] == [[], []]
    (reported,) = [one for one in lives[0].committer.check(None) if "several tables" in one.name]
    assert reported.granted


def test_tables_that_others_wrote_meanwhile_get_the_epoch_once(on_rest, some, pair):
    names, lives, sent = pair
    shared, receipts = rehearsed(lives, some(1, 2), 0)
    on_rest.load(names[1]).append(some(50))
    shared.commit(0, receipts)
    assert sent == [2, 2]
    assert [on_rest.ids(name) for name in names] == [[1, 2], [1, 2, 50]]
    shared.commit(0, receipts)
    assert len(sent) == 2
    assert [on_rest.leftovers(name) for name in names] == [[], []]


def test_only_tables_that_do_not_have_the_epoch_are_sent_again(on_rest, some, pair, monkeypatch):
    """A catalog that commits table after table may refuse the second when it has the first."""
    names, lives, sent = pair
    shared, receipts = rehearsed(lives, some(1, 2), 0)
    plain = private.send_together

    def half(catalog, changes):
        plain(catalog, changes[:1])
        monkeypatch.setattr(private, "send_together", plain)
        raise CommitFailedException("the second one was written by others")

    monkeypatch.setattr(private, "send_together", half)
    shared.commit(0, receipts)
    assert sent == [1, 1]
    assert [on_rest.ids(name) for name in names] == [[1, 2], [1, 2]]
    assert [len(on_rest.history(name)) for name in names] == [1, 1]
    assert [on_rest.leftovers(name) for name in names] == [[], []]


@pytest.mark.parametrize("is_done", [True, False], ids=["after", "before"])
def test_a_lost_answer_for_several_tables_is_settled_by_their_ledgers(
    on_rest, some, pair, monkeypatch, is_done
):
    names, lives, sent = pair
    shared, receipts = rehearsed(lives, some(1, 2), 0)
    plain = private.send_together

    def lost(catalog, changes):
        if is_done:
            plain(catalog, changes)
        raise requests.ConnectionError("the answer is lost")

    with monkeypatch.context() as patch:
        patch.setattr(private, "send_together", lost)
        with pytest.raises(OutcomeUnknown, match="the answer is lost"):
            shared.commit(0, receipts)
    shared.commit(0, receipts)
    assert sent == [2]
    assert [on_rest.ids(name) for name in names] == [[1, 2], [1, 2]]


def test_a_catalog_that_takes_one_table_at_a_time_is_reported_and_used(
    on_rest, some, pair, monkeypatch
):
    names, lives, sent = pair
    monkeypatch.setattr(private, "can_send_together", lambda _: False)
    (reported,) = [one for one in lives[0].committer.check(None) if "several tables" in one.name]
    assert (reported.granted, "one after the other" in reported.because) == (False, True)
    shared, receipts = rehearsed(lives, some(1, 2), 0)
    shared.commit(0, receipts)
    assert sent == []
    assert [on_rest.ids(name) for name in names] == [[1, 2], [1, 2]]


def test_sinks_of_one_table_or_of_other_accounts_do_not_share_a_request(on_rest, some, pair):
    names, lives, sent = pair
    again = lives[0].fresh(sink=on_rest.sink(names[0], name="again"))
    shared, receipts = rehearsed([*lives, again], some(1), 0)
    shared.commit(0, receipts)
    assert sent == [2]
    assert [on_rest.ids(name) for name in names] == [[1, 1], [1]]
    again.close()
    key = lives[0].sink.transaction_key
    assert key == lives[1].sink.transaction_key
    other = Iceberg("lake.shop.x", properties={**on_rest.properties, "token": "s3cret"})
    assert other.transaction_key not in (None, key)
    assert "s3cret" not in str(other.transaction_key)
    assert Iceberg("lake.shop.x", properties={"type": "sql", "uri": "x"}).transaction_key is None


def test_keys_that_a_catalog_gives_for_files_are_asked_for_again_before_they_expire(
    warehouse, live, some, monkeypatch
):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    life.write(0, some(1))
    now, given = time.monotonic(), []

    def load(self, catalog):
        table = catalog.load_table(self.table)
        table.config = {"s3.session-token": str(len(given))}
        given.append(table)
        return table

    monkeypatch.setattr(TableAddress, "load", load)
    life.committer.newest()
    for age_s, is_asked in ((0, False), (100, False), (1000, True)):
        clock = SimpleNamespace(monotonic=lambda age_s=age_s: now + age_s)
        monkeypatch.setattr(committer, "time", clock)
        before = len(given)
        life.committer.begin(Begin(epoch=EpochNumber(1)))
        assert (len(given) > before) == is_asked, age_s


def test_a_password_is_shown_nowhere(live, monkeypatch):
    secret = "hunter2-s3cret"
    uri = f"postgresql+psycopg://somebody:{secret}@127.0.0.1:1/nothing"
    monkeypatch.setenv("CATALOG_URI", uri)
    for given in (uri, env("CATALOG_URI")):
        sink = Iceberg("lake.shop.orders", properties={"type": "sql", "uri": given})
        with pytest.raises(EpochalError) as refused:
            live(sink).committer.check(None)
        cause: BaseException | None = refused.value
        while cause is not None:
            assert secret not in str(cause)
            cause = cause.__cause__
        assert secret not in repr(sink)


@pytest.mark.parametrize(
    ("properties", "fact", "hint"),
    [
        ({"type": "hive", "uri": "thrift://127.0.0.1:1"}, "pyiceberg[hive]", "install it"),
        ({"type": "sql", "uri": "mssql://h/x"}, "pyiceberg[sql-postgres]", "its database's client"),
        ({"type": "glue"}, "You must specify a region", "glue.region"),
    ],
    ids=["hive", "sql", "glue"],
)
def test_a_catalog_that_lacks_a_package_or_a_setting_is_reported(
    live, monkeypatch, properties, fact, hint
):
    for variable in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(variable, raising=False)
    sink = Iceberg("lake.shop.orders", properties=properties)
    with pytest.raises(Misconfigured) as refused:
        live(sink).committer.check(None)
    assert fact in refused.value.message
    assert hint in refused.value.hint


def test_check_says_why_two_commits_can_not_both_hold(warehouse, live, monkeypatch):
    sink = warehouse.sink(warehouse.create())

    def one_at_a_time():
        found = {one.name: one for one in live(sink).committer.check(None)}
        return found["one commit at a time"]

    assert one_at_a_time().granted
    assert "database" in one_at_a_time().because
    monkeypatch.setattr("epochal.sinks.iceberg.check._CATALOGS", {})
    assert not one_at_a_time().granted
    assert "SqlCatalog is not one of" in one_at_a_time().because


@pytest.mark.parametrize(
    "properties",
    [
        {"type": "rest", "uri": "http://127.0.0.1:1"},
        {"type": "sql", "uri": "sqlite:////nowhere/catalog.db", "warehouse": "/nowhere"},
    ],
    ids=lambda given: given["type"],
)
def test_a_catalog_that_does_not_answer_is_reported_in_one_line_with_where_to_look(
    live, some, properties
):
    with pytest.raises(TryAgain) as raised:
        live(Iceberg("lake.shop.orders", properties=properties)).start(some(1))
    assert "'uri'" in raised.value.hint
    assert "\n" not in raised.value.message


def test_a_catalog_that_is_not_configured_is_reported(live):
    with pytest.raises(Misconfigured, match="catalog 'lake' can't be opened"):
        live(Iceberg("lake.shop.orders", properties={"type": "nonsense"})).committer.check(None)
