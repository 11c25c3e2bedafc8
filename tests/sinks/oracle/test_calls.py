"""What is asked of oracledb, in which order; and what is made of its errors."""

from __future__ import annotations

import pickle

import oracledb
import pytest
from sinks.oracle.conftest import SECRET
from sinks.oracle.standin import database_error

from epochal.contract import Begin
from epochal.errors import Misconfigured, OutcomeUnknown, PreparedLost, RowRejected, TryAgain
from epochal.sinks.oracle.errors import ERRORS
from epochal.terms import EpochNumber


def test_a_staged_task_inserts_by_arrays_and_commits(orders, some):
    life = orders.life()
    life.start(some(1))
    orders.module.calls.clear()
    life.prepare(some(1, 2), 0)
    verbs = [call[0] for call in orders.called("connect", "executemany", "commit")]
    assert verbs[-2:] == ["executemany", "commit"]
    ((_, statement, schema),) = orders.called("executemany")
    assert statement.endswith('("ID", "NAME") VALUES (:1, :2)')
    assert schema.names == ["ID", "NAME"]


def test_a_prepared_task_ends_prepares_and_closes_before_its_receipt(orders, some):
    life = orders.life(strategy="prepared")
    life.start(some(1))
    life.committer.begin(Begin(epoch=EpochNumber(0)))
    orders.module.calls.clear()
    receipt = life.prepare(some(1), 0)
    verbs = [
        call[0] for call in orders.called("tpc_begin", "executemany", "tpc_end", "tpc_prepare")
    ]
    assert verbs == ["tpc_begin", "executemany", "tpc_end", "tpc_prepare"]
    assert orders.module.calls[-1] == ("close",)
    orders.module.calls.clear()
    life.commit(0, [receipt])
    assert [call[0] for call in orders.called("tpc_commit", "tpc_rollback")] == ["tpc_commit"]
    assert len(orders.rows()) == 1


def test_prepared_tries_two_phases_out_before_the_first_epoch(orders, some):
    life = orders.life(strategy="prepared")
    life.start(some(1))
    life.committer.begin(Begin(epoch=EpochNumber(0)))
    tried = [call[0] for call in orders.called("tpc_begin", "tpc_prepare", "tpc_rollback")]
    assert tried == ["tpc_begin", "tpc_prepare", "tpc_rollback"]
    assert orders.leftovers() == []
    orders.module.refuses.add("tpc_rollback")
    other = orders.life(strategy="prepared", name="other")
    other.start(some(1))
    with pytest.raises(Misconfigured, match="could not be ended from another connection") as raised:
        other.committer.begin(Begin(epoch=EpochNumber(0)))
    assert "FORCE ANY TRANSACTION" in raised.value.hint


def test_trying_two_phases_out_leaves_nothing_where_nothing_can_be_listed(orders, some):
    orders.module.refuses.add("list")
    life = orders.life(strategy="prepared")
    life.start(some(1))
    with pytest.raises(Misconfigured, match="ORA-00942") as raised:
        life.committer.begin(Begin(epoch=EpochNumber(0)))
    assert "dba_pending_transactions" in raised.value.hint
    assert orders.leftovers() == []


def test_a_prepared_transaction_that_vanished_is_reported(orders, some):
    life = orders.life(strategy="prepared")
    life.start(some(1))
    kept, gone = life.prepare(some(1), 0, 0), life.prepare(some(2), 0, 1)
    orders.life(strategy="prepared").committer.abort(EpochNumber(0), [gone])
    with pytest.raises(TryAgain, match="not on the server any more"):
        life.rehearse(0, [kept, gone])
    with pytest.raises(PreparedLost):
        life.commit(0, [kept, gone])
    assert len(orders.rows()) == 1


def test_prepared_is_refused_on_a_table_with_a_unique_index(keyed, some):
    with pytest.raises(Misconfigured, match="which has the unique index"):
        keyed.life(strategy="prepared").start(some(1))


def test_the_pool_is_the_librarys_own_with_every_limit(orders, some):
    orders.life(pool_min=2, pool_max=10).start(some(1))
    ((_, given),) = orders.called("create_pool")
    wanted = {"min": 2, "max": 10, "timeout": 600, "max_lifetime_session": 1800}
    assert wanted.items() <= given.items()
    assert (given["wait_timeout"], given["ping_interval"]) == (30_000, 0)
    assert given["getmode"] == oracledb.POOL_GETMODE_TIMEDWAIT


def test_secrets_are_passed_on_and_never_shown(place):
    sink = place.sink()
    assert SECRET not in repr(sink) + str(sink.describe()) + sink.url
    assert pickle.loads(pickle.dumps(sink)).server.secret() == SECRET


@pytest.mark.parametrize(
    ("code", "is_commit", "kind"),
    [
        (60, False, TryAgain),
        (54, False, TryAgain),
        (1653, False, TryAgain),
        (3113, False, TryAgain),
        (3113, True, OutcomeUnknown),
        (0, True, OutcomeUnknown),
        (1400, False, RowRejected),
        (20001, False, RowRejected),
        (1031, False, Misconfigured),
    ],
)
def test_errors_are_sorted_by_what_may_be_done_next(code, is_commit, kind):
    assert type(ERRORS.classify(database_error(code, "no"), "x", is_commit=is_commit)) is kind


def test_the_least_rights_are_printed(place):
    own = place.sink(strategy="prepared").grants()
    assert own[0] == 'GRANT CREATE SESSION, CREATE TABLE, CREATE SEQUENCE TO "ETL"'
    assert 'GRANT FORCE ANY TRANSACTION TO "ETL"' in own
    other = place.sink("shop.orders", mode="upsert", keys="id", delete_when="op = 'd'").grants()
    assert 'GRANT SELECT, INSERT, UPDATE, DELETE ON "SHOP"."ORDERS" TO "ETL"' in other
    assert "DELETE ANY TABLE" in place.sink(meta_schema="OURS").grants()[2]
