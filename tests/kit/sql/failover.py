"""A replica that lagged behind takes over under a running driver: nothing is lost in silence.

A module of a database has the fixture `pair`: a primary, and a replica of it that is asynchronous,
as replicas are, with a table for each of `KINDS`.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from epochal import Session
from epochal.config.resolve_target import OpenedTarget
from epochal.errors import WentBack
from epochal.logs import open_log
from epochal.reports.doctor import diagnose
from epochal.terms import Limits

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
KINDS = {
    "staged": {},
    "prepared": {"strategy": "prepared"},
    "upserted": {"mode": "upsert", "keys": ["id"]},
}
LIMITS = Limits(sweep_every_s=3600, retry_backoff_ms=(50, 200, 500))


def tables(qualified="{}"):
    """Statements that create the table of each kind."""
    for kind in KINDS:
        key = "PRIMARY KEY" if kind == "upserted" else ""
        yield f"CREATE TABLE {qualified.format(kind)} (id bigint {key}, name text)"


def opened(pair, tmp_path, kind, gates=()):
    sinks, log = [pair.sink(kind)], tmp_path / kind
    return Session(kind, sinks=sinks, log=log, schema=SCHEMA, gates=gates, limits=LIMITS)


def server_change(pair, tmp_path, kind):
    log = open_log(tmp_path / kind)
    target = OpenedTarget(target=kind, log=log, pipeline=kind, sinks=[pair.sink(kind)])
    return diagnose(target).sinks[0].server_change


def epoch(session, number):
    session.begin(number, offsets=f"row {number}")
    session.write([{"id": number, "name": "x"}])
    session.commit()


def test_settled_epochs_that_a_promoted_replica_lacks_are_noticed_before_anything_is_thrown_away(
    pair, tmp_path
):
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
        changes = [server_change(pair, tmp_path, kind)]
        with pytest.raises(WentBack, match="proves epochs up to 1, and epoch 3 was"):
            opened(pair, tmp_path, kind)
        changes.append(server_change(pair, tmp_path, kind))
        for change in changes:
            for fact in pair.change:
                assert fact in change
        assert pair.ids(kind) == [0, 1]
    assert pair.leftovers() == left
