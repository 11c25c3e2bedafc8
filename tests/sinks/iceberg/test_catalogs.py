"""The same promises on catalogs that are servers: REST, and SQL in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers.iceberg import RestCatalog, running_rest_catalog
from servers.postgres import running_server

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.kit.secrets import env
from epochal.sinks.iceberg import Iceberg
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


def test_a_catalog_that_is_not_configured_is_reported(live):
    with pytest.raises(Misconfigured, match="catalog 'lake' can't be opened"):
        live(Iceberg("lake.shop.orders", properties={"type": "nonsense"})).committer.check(None)
