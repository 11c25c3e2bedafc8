"""A backup of the server is restored: nothing that it lists as prepared again is thrown away."""

import shutil
import subprocess

import pyarrow as pa
import pytest
from servers.mysql import running_server

from epochal import Session
from epochal.config.resolve_target import OpenedTarget
from epochal.errors import WentBack
from epochal.logs import open_log
from epochal.reports.doctor import diagnose
from epochal.sinks.mysql import MySQL
from epochal.terms import Limits

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
LIMITS = Limits(sweep_every_s=3600, retry_backoff_ms=(50, 200, 500))


@pytest.fixture(scope="module")
def mortal(product, servers):
    with running_server(kind=type(servers(product))) as server:
        yield server


class Backup:
    """The server's folder, as it is while rows of an epoch are prepared."""

    def __init__(self, server, epoch):
        self.server, self.epoch = server, epoch
        self.kept = server.folder / "backup"

    def __call__(self, prepared):
        """A gate: the server is down for a moment, and the folder is copied."""
        if prepared.number == self.epoch:
            self.server.kill()
            shutil.rmtree(self.kept, ignore_errors=True)
            copy(self.server.data, self.kept)
            self.server.start()
        return True

    def restore(self):
        self.server.kill()
        shutil.rmtree(self.server.data)
        copy(self.kept, self.server.data)
        self.server.start()


def copy(source, target):
    """With owners and modes."""
    subprocess.run(["cp", "-a", source, target], check=True)


def epoch(session, number):
    session.begin(number, offsets=f"row {number}")
    session.write([{"id": number, "name": "x"}])
    session.commit()


def sql(server, statement):
    with server.connect(database="shop") as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return sorted(cursor.fetchall())


@pytest.mark.parametrize("strategy", ["staged", "prepared"])
def test_a_restored_server_is_noticed_by_a_running_driver_and_by_a_start(
    mortal, tmp_path, strategy
):
    with mortal.connect() as connection, connection.cursor() as cursor:
        cursor.execute("DROP DATABASE IF EXISTS epochal")
        cursor.execute("DROP DATABASE IF EXISTS epochal_staging")
        cursor.execute("CREATE DATABASE IF NOT EXISTS shop")
        cursor.execute("DROP TABLE IF EXISTS shop.orders")
        cursor.execute("CREATE TABLE shop.orders (id bigint, name text)")
    backup = Backup(mortal, epoch=1)
    sink = MySQL(
        mortal.url(database="shop"), table="shop.orders", name="o", strategy=strategy, pool_min=1
    )

    def opened():
        return Session(
            "shop", sinks=[sink], log=tmp_path, schema=SCHEMA, gates=[backup], limits=LIMITS
        )

    with opened() as session:
        for number in range(3):
            epoch(session, number)
        assert sql(mortal, "SELECT id FROM orders") == [(0,), (1,), (2,)]
        backup.restore()
        staged = "SELECT handle FROM epochal_staging.slots WHERE handle IS NOT NULL"
        before = sql(mortal, staged), sql(mortal, "XA RECOVER")
        with pytest.raises(WentBack, match="proves epochs up to 0, and epoch 2 was committed"):
            epoch(session, 3)
        target = OpenedTarget(target="shop", log=open_log(tmp_path), pipeline="shop", sinks=[sink])
        (problem,) = [one for one in diagnose(target).problems if "went back" in one]
        assert "missing there: epoch 1, in the source from row 0" in problem
    with pytest.raises(WentBack, match="epochs 1 to 2, in the source from row 0 up to row 2"):
        opened()
    assert sql(mortal, "SELECT id FROM orders") == [(0,)]
    assert (sql(mortal, staged), sql(mortal, "XA RECOVER")) == before
    assert len(before[0]) + len(before[1]) == 1
