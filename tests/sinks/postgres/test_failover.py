"""A replica that lagged behind takes over under a running driver: nothing is lost in silence."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pyarrow as pa
import pytest
from servers.postgres import running_server

from epochal import Session
from epochal.config.resolve_target import OpenedTarget
from epochal.errors import WentBack
from epochal.logs import open_log
from epochal.reports.doctor import diagnose
from epochal.sinks.postgres import Postgres
from epochal.terms import Limits

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
KINDS = {
    "staged": {},
    "prepared": {"strategy": "prepared"},
    "upsert": {"mode": "upsert", "keys": ["id"]},
}
SELDOM = Limits(sweep_every_s=3600)


class Pair:
    """A primary, and a replica of it that is asynchronous, as replicas are."""

    def __init__(self, primary, replica):
        self.primary, self.replica = primary, replica

    @property
    def url(self):
        hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.replica.port}"
        return f"postgresql://postgres@{hosts}/postgres"

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
        primary = stack.enter_context(running_server())
        yield Pair(primary, stack.enter_context(running_server(replica_of=primary)))


def opened(pair, tmp_path, kind, gates=()):
    sink = Postgres(pair.url, table=kind, name=kind, pool_min=1, **KINDS[kind])
    log = tmp_path / kind
    return Session(kind, sinks=[sink], log=log, schema=SCHEMA, gates=gates, limits=SELDOM)


def server_change(pair, tmp_path, kind):
    sink = Postgres(pair.url, table=kind, name=kind, pool_min=1, **KINDS[kind])
    target = OpenedTarget(target=kind, log=open_log(tmp_path / kind), pipeline=kind, sinks=[sink])
    return diagnose(target).sinks[0].server_change


def epoch(session, number):
    session.begin(number, offsets=f"row {number}")
    session.write([{"id": number, "name": "x"}])
    session.commit()


def test_settled_epochs_that_a_promoted_replica_lacks_are_noticed_before_anything_is_thrown_away(
    pair, tmp_path
):
    for kind in KINDS:
        key = "PRIMARY KEY" if kind == "upsert" else ""
        pair.sql(f"CREATE TABLE {kind} (id bigint {key}, name text)")
    meeting = threading.Barrier(len(KINDS), action=pair.cut_off)

    def cut_off(prepared):
        """Rows of epoch 2 are prepared in all three, also on the replica, and not yet decided."""
        if prepared.number == 2:
            meeting.wait(60)
        return True

    def live(kind):
        session = opened(pair, tmp_path, kind, gates=[cut_off])
        for number in range(4):
            epoch(session, number)
        return session

    with ThreadPoolExecutor(len(KINDS)) as threads:
        sessions = dict(zip(KINDS, threads.map(live, KINDS), strict=True))
    pair.fail_over()
    left = pair.leftovers()
    assert len(left) == len(KINDS)
    for kind, session in sessions.items():
        with pytest.raises(WentBack, match="proves epochs up to 1, and epoch 3 was") as caught:
            epoch(session, 4)
        assert "epochs 2 to 3, in the source from row 1 up to row 3" in caught.value.message
        session.close()
        # Before the next start has seen the server, and after it.
        told = [server_change(pair, tmp_path, kind)]
        with pytest.raises(WentBack, match="proves epochs up to 1, and epoch 3 was"):
            opened(pair, tmp_path, kind)
        told.append(server_change(pair, tmp_path, kind))
        for change in told:
            assert "timeline 00000002, and at the last start 00000001" in change
            assert "A replica was promoted" in change
        assert pair.sql(f"SELECT id FROM {kind} ORDER BY id", pair.replica) == [(0,), (1,)]
    assert pair.leftovers() == left
