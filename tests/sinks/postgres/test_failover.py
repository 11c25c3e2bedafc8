"""A replica that lagged behind takes over under a running driver: nothing is lost in silence."""

import time
from contextlib import ExitStack

import psycopg
import pytest
from kit.sql.failover import *  # noqa: F403  every test there is one of this module, too
from kit.sql.failover import KINDS, tables
from servers.postgres import running_server
from sinks.life import Life
from sinks.postgres.conftest import binaries

from epochal.errors import OutcomeUnknown, TryAgain
from epochal.sinks.postgres import Postgres
from epochal.sinks.postgres.client import BEGIN
from epochal.sinks.postgres.errors import ERRORS


class Pair:
    change = (
        "timeline 00000002, and at the last start 00000001",
        "A replica was promoted",
    )

    def __init__(self, primary, replica):
        self.primary, self.replica = primary, replica
        for statement in tables():
            self.sql(statement)

    def sink(self, kind):
        hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.replica.port}"
        url = f"postgresql://postgres@{hosts}/postgres"
        return Postgres(url, table=kind, name=kind, pool_min=1, **KINDS[kind])

    def sql(self, statement, server=None):
        with psycopg.connect((server or self.primary).url(), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def await_true(self, statement, server):
        while self.sql(statement, server) != [(True,)]:
            time.sleep(0.02)

    def cut_off(self):
        """The replica has all that the primary has now, and gets no more."""
        ((now,),) = self.sql("SELECT pg_current_wal_flush_lsn()")
        self.await_true(f"SELECT pg_last_wal_replay_lsn() >= '{now}'", self.replica)
        self.sql("ALTER SYSTEM SET primary_conninfo = ''", self.replica)
        self.sql("SELECT pg_reload_conf()", self.replica)
        self.await_true("SELECT count(*) = 0 FROM pg_stat_wal_receiver", self.replica)

    def fail_over(self):
        self.primary.kill()
        assert self.sql("SELECT pg_promote()", self.replica) == [(True,)]

    def ids(self, kind):
        return [number for (number,) in self.sql(f"SELECT id FROM {kind} ORDER BY 1", self.replica)]

    def leftovers(self):
        """Staged attempts and prepared transactions on the replica."""
        staged = self.sql(
            "SELECT handle FROM epochal_staging.slots WHERE handle IS NOT NULL"
            " UNION ALL SELECT gid FROM pg_prepared_xacts ORDER BY 1",
            self.replica,
        )
        return [name for (name,) in staged]


@pytest.fixture
def pair():
    with ExitStack() as stack:
        primary = stack.enter_context(running_server(binaries=binaries()))
        replica = running_server(binaries=binaries(), replica_of=primary)
        yield Pair(primary, stack.enter_context(replica))


def test_a_decided_epoch_waits_for_a_replica_to_be_promoted(pair, some):
    life = Life(sink=pair.sink("staged"))
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    life.rehearse(0, receipts)
    pair.cut_off()
    pair.primary.kill()
    with pytest.raises(OutcomeUnknown):
        life.commit(0, receipts)
    with pytest.raises(TryAgain, match="session is read-only"):
        life.commit(0, receipts)
    # A session of a pooler that had been led to the primary.
    with psycopg.connect(pair.replica.url(), autocommit=True) as pooled:
        with pytest.raises(psycopg.Error) as refused:
            pooled.execute(BEGIN)
        assert isinstance(ERRORS.classify(refused.value, "begin"), TryAgain)
    assert pair.sql("SELECT pg_promote()", pair.replica) == [(True,)]
    life.commit(0, receipts)
    life.close()
    assert pair.ids("staged") == [1]
