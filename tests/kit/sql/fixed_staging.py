"""`staging="fixed"`: slots that a DBA made, for an account that may make nothing, on any database.

A module that uses these has a fixture `dba`: an account without rights, and what is known of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from sinks.life import Life

from epochal.contract import Task
from epochal.errors import Misconfigured, TryAgain
from epochal.session import Session
from epochal.sinks.memory import Memory
from epochal.terms import EpochNumber, Limits, SinkName

SLOTS = 4


@dataclass(frozen=True)
class Dba:
    url: str
    """Of the account."""
    ddl: Callable[[], list[str]]
    """The statements of DDL that it has tried."""


def fixed(place: Any, dba: Dba, **options: Any) -> Life:
    given = {"staging": "fixed", "slots": SLOTS, "lock_timeout_s": 1, **options}
    return place.life(url=dba.url, **given)


def made(place: Any, life: Life, rows: pa.Table) -> Life:
    """The same, once a DBA has run what is printed."""
    for statement in life.sink.grants():
        place.sql(statement)
    for statement in life.committer.missing_ddl(rows.schema):
        place.sql(statement)
    return life


def slots(place: Any) -> list[tuple[Any, ...]]:
    return place.sql(f"SELECT * FROM {place.meta}_staging.slots ORDER BY slot")


def test_an_account_that_may_make_nothing_writes_epochs_and_runs_no_ddl(orders, some, dba):
    life = fixed(orders, dba)
    for statement in life.sink.grants():
        orders.sql(statement)
    with pytest.raises(Misconfigured, match="staging='fixed', and there is no table") as refused:
        life.start(some(1))
    statements = life.committer.missing_ddl(some(1).schema)
    assert all(one in refused.value.hint for one in statements)
    made(orders, life, some(1))
    assert life.committer.missing_ddl(some(1).schema) == []
    abilities = {one.name: one for one in life.committer.check(some(1).schema)}
    assert "at most 3 tasks" in abilities["staging without DDL"].because
    many = some(*range(20_000))
    life.write(0, some(1), many)
    life.committer.abort(1, [life.prepare(some(5), 1)])
    newer = orders.keep(life.fresh(generation=2))
    newer.write(1, many, some(2), some(3))
    newer.committer.prune(EpochNumber(1))
    assert "unused" not in str(newer.committer.drop(is_dry_run=False))
    assert len(orders.rows()) == 40_003
    assert orders.leftovers() == []
    assert len(slots(orders)) == SLOTS
    assert dba.ddl() == []


def test_rows_are_set_apart_and_deleted_keys_remembered_without_ddl(keyed, some, dba):
    keyed.sql(f"ALTER TABLE {keyed.schema}.orders ADD COLUMN v bigint NOT NULL CHECK (v < 9)")
    life = fixed(
        keyed,
        dba,
        mode="upsert",
        keys="id",
        newer="v",
        delete_when="name = 'gone'",
        tombstones=f"{keyed.schema}.buried",
        order_by="v",
        on_reject=Memory(name=SinkName("refused")),
    )

    def rows(*given: tuple[int, str, int]) -> pa.Table:
        ids, names, versions = zip(*given, strict=True)
        return pa.table({"id": pa.array(ids), "name": list(names), "v": pa.array(versions)})

    made(keyed, life, rows((1, "a", 1)))
    life.write(0, rows((1, "a", 1), (2, "b", 9)))
    life.write(1, rows((1, "gone", 3)), rows((3, "c", 1)))
    life.write(2, rows((1, "late", 2)))
    assert keyed.rows(columns="id, name") == [(3, "c")]
    assert dba.ddl() == []


def test_an_attempt_that_finds_no_slot_waits_and_says_who_has_them(orders, some, dba):
    life = made(orders, fixed(orders, dba), some(1))
    life.start(some(1))
    held = [life.prepare(some(number), 0, number) for number in range(SLOTS)]
    with pytest.raises(TryAgain, match=f"none of {SLOTS} slots .*: {SLOTS} hold attempts") as full:
        life.prepare(some(9), 0, SLOTS)
    assert "slots=" in full.value.hint
    life.rehearse(0, held)
    life.commit(0, held)
    life.write(1, some(9))
    assert len(orders.rows()) == SLOTS + 1
    assert dba.ddl() == []


def test_slots_of_other_columns_are_refused_with_what_a_dba_is_to_run(orders, some, dba):
    life = made(orders, fixed(orders, dba), some(1))
    life.write(0, some(1))
    orders.sql(f"ALTER TABLE {orders.schema}.orders ADD COLUMN extra bigint")
    wider = some(2).append_column("extra", pa.array([7], pa.int64()))
    newer = orders.keep(life.fresh(generation=2))
    with pytest.raises(Misconfigured, match="there are some for other columns") as refused:
        newer.start(wider)
    assert f"{SLOTS} of {SLOTS}" in refused.value.message
    made(orders, newer, wider).write(1, wider)
    assert orders.rows() == [(1, "n1", None), (2, "n2", 7)]


def test_a_slot_that_somebody_dropped_or_altered_is_asked_for_again(orders, some, dba):
    life = made(orders, fixed(orders, dba), some(1))
    life.start(some(1))
    lost, altered = (life.prepare(some(number), 0, number) for number in range(2))
    orders.drop_staged(lost.handle)
    (table,) = orders.slots_used([str(altered.handle)])
    orders.sql(f"ALTER TABLE {orders.meta}_staging.{table} DROP COLUMN name")
    newer = orders.keep(life.fresh(generation=2))
    with pytest.raises(Misconfigured, match=f"2 of {SLOTS}"):
        newer.start(some(1))
    newer.committer.abort(0, [lost, altered])
    made(orders, newer, some(1)).write(0, *(some(number) for number in range(SLOTS - 1)))
    assert newer.committer.in_doubt() == []
    assert len(orders.rows()) == SLOTS - 1


def test_what_late_tasks_left_is_swept_before_the_next_epoch(orders, some, dba, tmp_path):
    sink, schema = made(orders, fixed(orders, dba), some(1)).sink, some(1).schema
    limits = Limits(sweep_every_s=3600)
    with Session("orders", sinks=[sink], log=tmp_path, schema=schema, limits=limits) as session:
        coordinator = session._coordinator
        for number in range(SLOTS + 1):
            session.begin(session.next_epoch)
            assert orders.leftovers() == []
            session.write(some(number))
            session.commit()
            handle = coordinator.identity(sink.name).handle(
                EpochNumber(number), partition=7, attempt=number
            )
            handout = coordinator.handout(sink.name)
            late = sink.writer(Task(handle=handle, schema=schema, handout=handout))
            late.write(some(99).to_batches()[0])
            late.prepare()
    assert orders.rows(columns="id") == [(number,) for number in range(SLOTS + 1)]
    assert orders.leftovers() == []


@pytest.mark.parametrize(
    "options",
    [{"slots": 1}, {"slots": 1000}, {"create_table": "if_missing"}, {"evolve": "add_columns"}],
)
def test_what_needs_ddl_or_has_no_slot_to_spare_is_refused(place, options):
    with pytest.raises(Misconfigured):
        place.sink(staging="fixed", **options)
