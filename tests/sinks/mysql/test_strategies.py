"""What is special about each strategy: zombies, litter, refusals, many at a time."""

from __future__ import annotations

import pytest
from kit.sql.promises import *  # noqa: F403  every test there is one of this module, too
from kit.sql.strategies import *  # noqa: F403  every test there is one of this module, too

from epochal.errors import Misconfigured, PreparedLost, TryAgain
from epochal.kit.sql.names import staging_name
from epochal.sinks.mysql import check, client, writer
from epochal.sinks.mysql.dialect import DIALECT
from epochal.terms import EpochNumber, Proof

pytestmark = pytest.mark.products("mariadb", "mysql")

# Staged


def test_a_decided_epoch_is_applied_again_where_its_rehearsal_was_lost(orders, some):
    life = orders.life()
    life.start(some(1))
    receipts = [life.prepare(some(1, 2), 0)]
    life.rehearse(0, receipts)
    ((holder,),) = orders.sql(
        f"SELECT IS_USED_LOCK({DIALECT.literal(DIALECT.driver_lock(life.identity, 1))})"
    )
    orders.sql(f"KILL CONNECTION {holder}")
    orders.keep(life.fresh(generation=2)).commit(0, receipts)
    assert len(orders.rows()) == 2


def test_litter_of_a_committed_epoch_is_proven_committed_and_goes_with_its_next_commit(
    orders, some
):
    life = orders.life()
    receipts = life.write(0, some(1))
    name = staging_name(receipts[0].handle)
    orders.sql(f"CREATE TABLE {orders.staging}.{name} (epochal_at bigint, id bigint, name text)")
    orders.sql(f"INSERT INTO {orders.staging}.{name} VALUES (1, 1, 'again')")
    assert life.committer.outcome(EpochNumber(0), receipts[0]) is Proof.COMMITTED
    life.commit(0, receipts)
    assert orders.rows() == [(1, "n1")]
    assert orders.leftovers() == []


# Prepared


@pytest.mark.products("mariadb")
def test_a_connection_that_holds_its_prepared_rows_is_waited_for(orders, some):
    life = orders.life(strategy="prepared")
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    orders.keep(life.fresh()).committer.abort(EpochNumber(0), receipts)
    held = orders.server.connect(database=orders.schema)
    with held.cursor() as cursor:
        xid = f"'{staging_name(receipts[0].handle)}'"
        for words in ("XA START {}", "INSERT INTO orders VALUES (1, 'n1')", "XA END {}"):
            cursor.execute(words.format(xid))
        cursor.execute(f"XA PREPARE {xid}")
    with pytest.raises(TryAgain, match="another session holds it"):
        life.commit(0, receipts)
    assert orders.rows() == []
    held.close()
    life.commit(0, receipts)
    assert orders.rows() == [(1, "n1")]


def slow_to_close(life) -> None:
    """The next task finds a connection that takes the server long to clear up after."""
    link = client.connect(life.sink.server)
    with link.cursor() as cursor:
        for number in range(2000):
            cursor.execute(f"PREPARE s{number} FROM 'SELECT 1'")
    writer._connections.keep(life.sink.server, link)


@pytest.mark.parametrize("verb", ["commit", "abort"])
def test_a_connection_that_is_slow_to_close_keeps_no_prepared_rows(orders, some, verb):
    life = orders.life(strategy="prepared")
    life.start(some(1))
    for epoch in range(5):
        slow_to_close(life)
        receipts = [life.prepare(some(epoch), epoch)]
        getattr(life.committer, verb)(EpochNumber(epoch), receipts)
    assert len(orders.rows()) == (5 if verb == "commit" else 0)
    assert orders.leftovers() == []
    assert orders.sql("SELECT trx_id FROM information_schema.innodb_trx") == []


def test_rows_can_be_committed_as_soon_as_they_are_prepared(orders, some, monkeypatch):
    life = orders.life(strategy="prepared")
    life.start(some(1))
    held = []
    monkeypatch.setattr(writer._connections, "close", held.append)
    receipts = [life.prepare(some(1), 0)]
    life.commit(0, receipts)
    assert orders.rows() == [(1, "n1")]
    (link,) = held
    link.close()


@pytest.mark.products("mariadb")
def test_prepared_is_refused_where_an_account_may_not_detach(orders, some, monkeypatch):
    monkeypatch.setattr(check, "DETACH_AT_PREPARE", "SET GLOBAL max_connections = 120")
    orders.make_account("lowly")
    orders.sql(f"GRANT ALL ON {orders.schema}.* TO lowly")
    with pytest.raises(Misconfigured, match=r"needs SET GLOBAL .* denied"):
        orders.life(strategy="prepared", url=orders.url(user="lowly")).start(some(1))


@pytest.mark.products("mysql")
def test_prepared_is_refused_where_an_account_may_not_list_transactions(orders, some):
    orders.make_account("lowly")
    life = orders.life(strategy="prepared", url=orders.url(user="lowly"))
    for statement in life.sink.grants():
        if "XA_RECOVER_ADMIN" not in statement:
            orders.sql(statement)
    with pytest.raises(Misconfigured, match="XA RECOVER") as raised:
        life.start(some(1))
    assert "GRANT XA_RECOVER_ADMIN ON *.*" in raised.value.hint


@pytest.mark.products("mysql")
def test_prepared_is_refused_where_the_server_keeps_transactions_with_their_sessions(orders, some):
    orders.sql("SET GLOBAL xa_detach_on_prepare = OFF")
    try:
        with pytest.raises(Misconfigured, match="xa_detach_on_prepare is OFF"):
            orders.life(strategy="prepared").start(some(1))
    finally:
        orders.sql("SET GLOBAL xa_detach_on_prepare = ON")


def test_prepared_transactions_that_vanished_are_reported(orders, some):
    life = orders.life(strategy="prepared")
    life.start(some(1))
    kept, gone = life.prepare(some(1), 0, 0), life.prepare(some(2), 0, 1)
    orders.keep(life.fresh()).committer.abort(EpochNumber(0), [gone])
    with pytest.raises(TryAgain, match="not on the server any more"):
        life.rehearse(0, [kept, gone])
    with pytest.raises(PreparedLost) as raised:
        life.commit(0, [kept, gone])
    assert raised.value.handles == (str(gone.handle),)
    assert orders.rows() == [(1, "n1")]


def test_prepared_is_refused_on_a_table_with_keys_where_the_server_has_no_slots(
    keyed, some, monkeypatch
):
    monkeypatch.setattr(check._About, "skips_locked", False)
    with pytest.raises(Misconfigured, match="unique index PRIMARY"):
        keyed.life(strategy="prepared").start(some(1))


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [
        ("8.0.28", True),
        ("8.0.29", False),
        ("8.4.3", False),
        ("5.7.44-log", True),
        ("10.4.34-MariaDB", True),
        ("5.5.5-10.11.8-MariaDB-1", False),
        ("11.4.2-MariaDB", False),
    ],
)
def test_prepared_is_refused_where_xa_ends_with_its_connection(orders, version, is_refused):
    class Told:
        def query(self, statement: str) -> list:
            return [(version, 1, 1, 0, "ROW")]

    about, sink = check._About(Told()), orders.sink(strategy="prepared")
    if is_refused:
        with pytest.raises(Misconfigured, match="ends with its connection"):
            about.require_detachable(sink)
    else:
        about.require_detachable(sink)
