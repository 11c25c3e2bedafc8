"""Checks before the first row, what is created, rights, and secrets."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest
from kit.sql.grants import *  # noqa: F403  every test there is one of this module, too

import epochal as ep
from epochal.errors import Misconfigured, TryAgain
from epochal.sinks.mysql import MySQL, client

SECRET = "hunter2-s3cret"


def test_a_missing_table_is_reported_with_what_is_like_it(place, some):
    place.sql(f"CREATE TABLE {place.schema}.Orders (id bigint)")
    with pytest.raises(Misconfigured, match="there is no table") as raised:
        place.life("orders").start(some(1))
    assert f"{place.schema}.Orders" in raised.value.hint


def test_everything_that_is_wrong_is_reported_at_once(place):
    place.sql(
        f"CREATE TABLE {place.schema}.orders (ID bigint, day date, twice int AS (1 + 1),"
        " must int NOT NULL)"
    )
    schema = pa.schema([("id", pa.int64()), ("day", pa.int64()), ("twice", pa.int32())])
    with pytest.raises(Misconfigured) as raised:
        place.life().committer.check(schema)
    for fact in (
        'there is no column "id"',
        "bigint can't become date",
        '"twice" is generated',
        '"must" is NOT NULL without a default',
    ):
        assert fact in raised.value.message
    assert 'columns={"id": "ID"}' in raised.value.hint


def test_a_table_may_have_any_name(place, some):
    place.sql(f"CREATE TABLE {place.schema}.`BRAND NAMES` (id bigint, name text)")
    place.life("BRAND NAMES").write(0, some(1))
    assert place.rows("BRAND NAMES") == [(1, "n1")]


def test_an_engine_without_transactions_is_refused(place, some):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint, name text) ENGINE=MyISAM")
    with pytest.raises(Misconfigured, match="MyISAM, whose rows do not commit"):
        place.life().start(some(1))


@pytest.mark.products("mariadb")
def test_a_table_on_another_server_is_refused(place, some):
    place.sql("INSTALL SONAME 'ha_federatedx'")
    try:
        place.sql(f"CREATE TABLE {place.schema}.base (id bigint, name text)")
        place.sql(
            f"CREATE TABLE {place.schema}.orders (id bigint, name text) ENGINE=FEDERATED"
            f" CONNECTION='mysql://root@127.0.0.1:{place.server.port}/{place.schema}/base'"
        )
        with pytest.raises(Misconfigured, match="FEDERATED, whose rows do not commit"):
            place.life().start(some(1))
        place.sql(f"DROP TABLE {place.schema}.orders")
    finally:
        place.sql("UNINSTALL SONAME 'ha_federatedx'")


def test_a_server_that_takes_no_rows_from_clients_is_reported(orders, some):
    orders.sql("SET GLOBAL local_infile = 0")
    try:
        with pytest.raises(Misconfigured, match="local_infile is off"):
            orders.life().start(some(1))
    finally:
        orders.sql("SET GLOBAL local_infile = 1")


def test_a_replica_is_refused(orders, some):
    orders.sql("SET GLOBAL read_only = 1")
    try:
        with pytest.raises(TryAgain, match="read-only"):
            orders.life().start(some(1))
    finally:
        orders.sql("SET GLOBAL read_only = 0")


def test_a_table_is_made_and_grows_where_that_is_asked(place, some):
    life = place.life(mode="upsert", keys="name", create_table="if_missing", evolve="add_columns")
    life.write(0, some(1, 2))
    wider = some(2, 3).append_column("paid", pa.array([True, None]))
    life.start(wider)
    receipts = [life.prepare(wider, 1)]
    life.commit(1, receipts)
    assert place.rows(columns="id, name, paid") == [(1, "n1", None), (2, "n2", 1), (3, "n3", None)]


def test_what_the_server_fills_is_left_to_it(place, some):
    place.sql(
        f"CREATE TABLE {place.schema}.orders (n int AUTO_INCREMENT PRIMARY KEY, id bigint,"
        " name text, twice bigint AS (id * 2), note varchar(9) NOT NULL DEFAULT 'new')"
    )
    place.life(strategy="prepared").write(0, some(1, 2))
    assert place.rows(columns="id, twice, note") == [(1, 2, "new"), (2, 4, "new")]


@pytest.mark.parametrize("right", ["INSERT", "UPDATE", "CREATE"])
def test_a_right_that_is_lacking_is_reported_with_the_way_out(keyed, some, least, right):
    life = keyed.life(url=keyed.url(user=least), mode="upsert", keys="id")
    keyed.grant(life.sink)
    on = f"{keyed.meta}.*" if right == "CREATE" else f"{keyed.schema}.orders"
    keyed.sql(f"REVOKE {right} ON {on} FROM least")
    with pytest.raises(Misconfigured, match="denied") as raised:
        life.write(0, some(1))
    assert "GRANT" in raised.value.hint
    assert keyed.rows() == []


@pytest.mark.products("mariadb", "mysql")
def test_an_upsert_needs_to_see_every_unique_index(place, least):
    """One that the catalog hides would make it change the row of another key."""
    place.sql(
        f"CREATE TABLE {place.schema}.orders (n bigint AUTO_INCREMENT PRIMARY KEY,"
        " id bigint UNIQUE, name varchar(9), kind int NOT NULL DEFAULT 1 UNIQUE)"
    )
    life = place.life(url=place.url(user=least), mode="upsert", keys="id", columns=["id", "name"])
    place.grant(life.sink)
    place.sql(f"REVOKE SELECT ON {place.schema}.orders FROM least")
    place.sql(f"GRANT SELECT (id, name) ON {place.schema}.orders TO least")
    rows = pa.table({"id": pa.array([1], pa.int64()), "name": ["a"]})
    with pytest.raises(Misconfigured, match="SELECT command denied") as raised:
        life.start(rows)
    assert "GRANT SELECT, INSERT (`id`, `name`)" in raised.value.hint
    place.grant(life.sink)
    with pytest.raises(Misconfigured, match="equal by the unique index kind"):
        life.start(rows)
    place.sql(f"ALTER TABLE {place.schema}.orders DROP INDEX kind")
    life.write(0, rows)
    assert place.rows(columns="id, name") == [(1, "a")]


# Secrets, and servers that can't be reached


def test_a_password_in_a_url_is_used_and_never_shown():
    sink = MySQL(f"mysql://someone:{SECRET}@127.0.0.1:1/shop", table="x")
    assert SECRET not in repr(sink) + str(sink.describe()) + sink.url + sink.name
    assert pickle.loads(pickle.dumps(sink)).server.secret() == SECRET
    with pytest.raises(Misconfigured, match="both the url and password="):
        MySQL(f"mysql://someone:{SECRET}@127.0.0.1:1/shop", table="x", password="other")


def test_a_url_that_can_not_be_read_is_not_repeated():
    for url in (
        f"mysql://a:{SECRET}@h:port/db",
        f"postgresql://a:{SECRET}@h/db",
        f"mysql://a:{SECRET}@h",
        f"mysql://a:{SECRET}@h/db?tls={SECRET}",
    ):
        with pytest.raises(Misconfigured) as raised:
            MySQL(url, table="x")
        assert SECRET not in str(raised.value)


def test_passwords_come_from_wherever_they_are_kept(orders, some, tmp_path, monkeypatch):
    orders.make_account("etl", SECRET)
    orders.sql("GRANT ALL ON *.* TO etl")
    kept = tmp_path / "secret"
    kept.write_text(f"{SECRET}\n")
    monkeypatch.setenv("EPOCHAL_TEST_SECRET", SECRET)
    for number, password in enumerate([SECRET, ep.file(kept), ep.env("EPOCHAL_TEST_SECRET")]):
        life = orders.life(url=orders.url(user="etl"), password=password, name=f"{number}")
        life.write(0, some(number))
    with pytest.raises(Misconfigured, match="1045") as raised:
        orders.life(url=orders.url(user="etl"), password=f"not {SECRET}").start(some(1))
    assert SECRET not in str(raised.value)
    assert len(orders.rows()) == 3


def test_a_server_that_asks_for_a_file_gets_none(orders, tmp_path):
    private = tmp_path / "private"
    private.write_text("1\tsecret\n")
    link = client.connect(orders.sink().server)
    with link.cursor() as cursor, pytest.raises(RuntimeError, match="local_infile option is false"):
        cursor.execute(f"LOAD DATA LOCAL INFILE '{private}' INTO TABLE {orders.schema}.orders")
    client.close(link)
    assert orders.rows() == []


def test_what_can_not_be_reached_is_reported_at_once(orders, some):
    with pytest.raises(TryAgain, match=r"can't connect to 127\.0\.0\.1:1/"):
        orders.life(url=orders.url(port=1)).start(some(1))
    with pytest.raises(Misconfigured, match="Unknown database"):
        orders.life(url=orders.server.url(database="nowhere")).start(some(1))


def test_an_account_without_rights_on_the_database_is_sent_to_its_grants(orders, some, least):
    with pytest.raises(Misconfigured, match="1044") as raised:
        orders.life(url=orders.url(user=least)).start(some(1))
    assert "`epochal grants PIPELINE`" in raised.value.hint


def test_an_account_that_may_have_no_more_connections_is_not_sent_to_look_at_the_address(
    orders, some, least
):
    life = orders.life(url=orders.url(user=least))
    orders.grant(life.sink)
    orders.sql(
        f"GRANT USAGE ON *.* TO {least} WITH MAX_USER_CONNECTIONS 1"
        if orders.is_mariadb
        else f"ALTER USER {least} WITH MAX_USER_CONNECTIONS 1"
    )
    with orders.server.connect(user=least), pytest.raises(TryAgain) as raised:
        life.start(some(1))
    assert "max_connections" in raised.value.hint


def test_a_view_over_a_table_without_transactions_is_refused(place, some):
    place.sql(f"CREATE TABLE {place.schema}.base (id bigint, name text) ENGINE=MyISAM")
    place.sql(f"CREATE VIEW {place.schema}.near AS SELECT * FROM {place.schema}.base")
    place.sql(f"CREATE VIEW {place.schema}.orders AS SELECT * FROM {place.schema}.near")
    with pytest.raises(Misconfigured, match="base, a table of the engine MyISAM"):
        place.life().start(some(1))
    place.sql(f"ALTER TABLE {place.schema}.base ENGINE=InnoDB")
    place.life().write(0, some(1))
    assert place.rows("base", "id") == [(1,)]
