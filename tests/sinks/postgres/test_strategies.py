"""Both strategies keep the same promises: append, repeat, abort, prove, forget."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kit.sql.promises import *  # noqa: F403  every test there is one of this module, too
from kit.sql.strategies import *  # noqa: F403  every test there is one of this module, too
from kit.sql.strategies import BOTH, grown_mb

from epochal.contract import Begin
from epochal.errors import Misconfigured, PreparedLost, TryAgain
from epochal.kit.sql.names import parse_staging_name, staging_name
from epochal.terms import Claim, EpochNumber, Generation, Handle, Limits, SinkTag, Uid


@BOTH
def test_an_attempt_that_was_killed_does_not_stand_in_the_way(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.start(some(1))
    writer = life.writer(some(1).schema, 0)
    writer.write(some(*range(10)).to_batches()[0])
    writer._buffer.drain()
    life.write(0, some(*range(10)))
    assert len(orders.rows()) == 10
    writer.abort()
    assert orders.leftovers() == []


@BOTH
def test_the_age_of_what_is_in_doubt_is_reported(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.start(some(1))
    life.prepare(some(1), 0)
    (listed,) = life.committer.in_doubt()
    assert 0 <= listed.age_s < 60


@BOTH
def test_a_server_that_nobody_wrote_to_holds_nothing(orders, strategy):
    life = orders.life(strategy=strategy)
    assert list(life.committer.in_doubt()) == []
    assert list(life.committer.newest()) == []
    life.committer.prune(EpochNumber(5))
    assert orders.sql(f"SELECT FROM pg_namespace WHERE nspname = '{orders.meta}'") == []


def test_the_measure_of_a_tasks_memory_objects_to_one_that_keeps_all_rows(orders, tmp_path):
    life = orders.life(buffer_bytes=1 << 40, flush_interval_s=3600)
    assert grown_mb(life, tmp_path, Limits(buffer_rows=1 << 40)) > 150


# Staged only


def test_a_process_that_wrote_ends_silently(orders, tmp_path):
    code = f"""
import pyarrow as pa
import epochal as ep
schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
url, table, meta = {orders.server.url()!r}, "{orders.schema}.orders", "{orders.meta}"
sink = ep.Postgres(url, table=table, meta_schema=meta)
session = ep.Session("quiet", sinks=[sink], schema=schema, log={str(tmp_path / "log")!r})
session.begin(0)
session.write([{{"id": 1, "name": "n"}}])
session.commit()
session.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert orders.rows() == [(1, "n")]


def test_a_rehearsal_is_given_up_when_the_epoch_begins_again(orders, some):
    life = orders.life()
    life.start(some(1))
    life.rehearse(0, [life.prepare(some(1), 0)])
    life.committer.begin(Begin(epoch=EpochNumber(0)))
    held = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
    assert orders.sql(held) == [(0,)]
    life.write(0, some(2))
    assert orders.rows(columns="id") == [(2,)]


def test_a_session_that_the_server_still_believes_in_does_not_block_its_own_driver(orders, some):
    life = orders.life()
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    life.rehearse(0, receipts)
    transaction = life.committer.transaction
    half_open, transaction._open = transaction._open, None
    life.commit(0, receipts)
    assert len(orders.rows()) == 1
    half_open.session.connection.close()


def test_a_decided_epoch_is_applied_again_where_its_rehearsal_was_lost(orders, some):
    life = orders.life()
    life.start(some(1))
    receipts = [life.prepare(some(1, 2), 0)]
    life.rehearse(0, receipts)
    orders.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state LIKE 'idle in trans%'"
    )
    orders.keep(life.fresh(generation=2)).commit(0, receipts)
    assert len(orders.rows()) == 2


def test_staging_tables_are_logged(orders, some):
    life = orders.life()
    life.start(some(1))
    receipt = life.prepare(some(1), 0)
    slot = orders.slot(receipt.handle)
    kind = f"SELECT relpersistence FROM pg_class WHERE oid = '{slot}'::regclass"
    assert orders.sql(kind) == [("p",)]


def test_every_handle_fits_a_name_and_comes_back():
    for numbers in ((0, 0, 0, 0), (1, 2, 3, 4), (10**10 - 1, 10**14 - 1, 10**7 - 1, 10**14 - 1)):
        for tag in ("00000000", "ffffffff", "0000000a"):
            handle = Handle(
                uid=Uid("abcdefgh2345"),
                generation=Generation(numbers[0]),
                claim=Claim("k7q2m4xz"),
                epoch=EpochNumber(numbers[1]),
                sink=SinkTag(tag),
                partition=numbers[2],
                attempt=numbers[3],
            )
            name = staging_name(handle)
            assert len(name) <= 63
            assert parse_staging_name(name) == handle
    for stranger in (
        "orders",
        "epabc",
        "ep" + "a" * 19,
        name.upper(),
        name + "_0",
        "ep" + name[2:].replace("_", "_0", 1),
    ):
        assert parse_staging_name(stranger) is None


# Prepared only


def test_prepared_is_refused_where_the_server_has_too_few(orders, some):
    with pytest.raises(Misconfigured, match=r"max_prepared_transactions on .* is 64, 0 in use"):
        orders.life(strategy="prepared", tasks_max=65).start(some(1))


def test_prepared_transactions_that_run_out_are_tried_again_and_reported(orders, some):
    life = orders.life(strategy="prepared", tasks_max=64)
    life.start(some(1))
    prepared = [life.prepare(some(partition), 0, partition) for partition in range(64)]
    with pytest.raises(TryAgain, match="maximum number of prepared transactions") as raised:
        life.prepare(some(63), 0, 63)
    assert "strategy='staged'" in raised.value.hint
    life.committer.abort(EpochNumber(0), prepared[:1])
    life.prepare(some(63), 0, 63)


def test_prepared_is_refused_through_a_pooler(orders, some, proxy):
    def other_pid(piece: bytes, to_server: bool) -> bytes:
        at = -1 if to_server else piece.find(b"K\x00\x00\x00")
        return piece if at < 0 else piece[: at + 5] + b"\x7f\xff\xff\x01" + piece[at + 9 :]

    proxy.rewrite = other_pid
    url = orders.server.url(port=proxy.port)
    with pytest.raises(Misconfigured, match="pooler"):
        orders.life(strategy="prepared", url=url).start(some(1))
    staged = orders.life(url=url)
    staged.write(0, some(1))
    assert len(orders.rows()) == 1


def test_prepared_casts_what_a_copy_can_not(place, some):
    place.sql(f"CREATE TABLE {place.schema}.orders (id int, name uuid)")
    rows = some(1, 2).set_column(1, "name", [["0" * 31 + "1", "0" * 31 + "2"]])
    life = place.life(strategy="prepared")
    life.write(0, rows)
    assert [str(name)[-1] for _, name in place.rows()] == ["1", "2"]
    assert place.leftovers() == []


def test_a_prepared_transaction_that_vanished_fails_the_rehearsal(orders, some):
    life = orders.life(strategy="prepared")
    life.start(some(1))
    receipt = life.prepare(some(1), 0)
    orders.sql(f"ROLLBACK PREPARED '{receipt.handle}'")
    with pytest.raises(TryAgain, match="not on the server any more"):
        life.rehearse(0, [receipt])


def test_part_of_the_prepared_transactions_lost_commits_the_others_and_names_them(orders, some):
    life = orders.life(strategy="prepared")
    life.start(some(1))
    receipts = [life.prepare(some(n), 0, n) for n in range(3)]
    orders.sql(f"ROLLBACK PREPARED '{receipts[1].handle}'")
    with pytest.raises(PreparedLost) as lost:
        life.commit(0, receipts)
    assert lost.value.handles == (str(receipts[1].handle),)
    assert orders.rows(columns="id") == [(0,), (2,)]
