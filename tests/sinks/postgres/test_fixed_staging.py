"""Slots that a DBA made, on PostgreSQL: an event trigger sees all DDL of the role."""

from __future__ import annotations

from types import SimpleNamespace

import psycopg
import pytest
from kit.sql.fixed_staging import *  # noqa: F403  every test there is one of this module, too
from kit.sql.fixed_staging import Dba

from epochal.config.resolve_target import OpenedTarget, Streaming
from epochal.reports.doctor import staging
from epochal.spark.pipeline import Pipeline

FILE_COST = "spark.sql.files.openCostInBytes"
"""As high as this makes it, every file is a partition of its own."""


@pytest.fixture
def dba(place, server):
    role, seen = f"fixed_{place.schema}", f"seen_{place.schema}"
    place.sql(f"CREATE ROLE {role} LOGIN")
    place.sql(f"CREATE TABLE public.{seen} (tag text)")
    place.sql(f"GRANT INSERT ON public.{seen} TO {role}")
    place.sql(
        f"CREATE FUNCTION public.{seen}() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF session_user = '{role}' THEN INSERT INTO public.{seen} VALUES (tg_tag); END IF;"
        " END $$"
    )
    for event in ("ddl_command_start", "sql_drop"):
        place.sql(
            f"CREATE EVENT TRIGGER {seen}_{event} ON {event} EXECUTE FUNCTION public.{seen}()"
        )
    try:
        yield Dba(
            url=server.url(user=role),
            ddl=lambda: [tag for (tag,) in place.sql(f"SELECT tag FROM public.{seen}")],
        )
    finally:
        for life in place.lives:
            life.close()
        for event in ("ddl_command_start", "sql_drop"):
            place.sql(f"DROP EVENT TRIGGER {seen}_{event}")
        place.sql(f"DROP FUNCTION public.{seen}()")
        place.sql(f"DROP TABLE public.{seen}")
        place.sql(f"DROP OWNED BY {role} CASCADE")
        place.sql(f"DROP ROLE {role}")


def test_the_event_trigger_sees_ddl(dba):
    with psycopg.connect(dba.url, autocommit=True) as connection:
        connection.execute("CREATE TEMP TABLE t (id int)")
    assert dba.ddl() == ["CREATE TABLE"]


@pytest.fixture
def six_files(spark, orders, dba, tmp_path):
    """A stream of six partitions, a file each, and a sink of four slots that a DBA made."""
    sink = orders.sink(url=dba.url, staging="fixed", slots=4)
    for statement in sink.grants():
        orders.sql(statement)
    opened = OpenedTarget(
        target="orders",
        log=None,
        sinks=[sink],
        streaming=Streaming(
            session=lambda: SimpleNamespace(stop=lambda: None),
            stream=lambda _: spark.range(1).selectExpr("id", "'n' AS name"),
        ),
    )
    for statement in staging(opened).sinks[sink.name]:
        orders.sql(statement)
    assert staging(opened).sinks == {sink.name: []}
    rows = spark.range(0, 6000, numPartitions=6).selectExpr("id", "'n' AS name")
    rows.write.parquet(str(tmp_path / "source"))
    spark.conf.set(FILE_COST, str(1 << 30))
    yield sink, spark.readStream.schema(rows.schema).parquet(str(tmp_path / "source"))
    spark.conf.unset(FILE_COST)


def parts(place) -> int:
    """How many tasks wrote the newest epoch."""
    ((number,),) = place.sql(
        f"SELECT count(DISTINCT part) FROM {place.meta}.ledger WHERE part >= 0"
    )
    return number


def test_a_pipeline_of_more_partitions_than_slots_puts_them_together(
    six_files, orders, dba, tmp_path, caplog
):
    sink, stream = six_files
    pipeline = Pipeline("orders", sinks=[sink])
    pipeline.start(
        stream, checkpoint=str(tmp_path / "checkpoint"), availableNow=True
    ).awaitTermination()
    assert pipeline.error is None
    assert orders.rows(columns="id") == [(number,) for number in range(6000)]
    assert parts(orders) == 3
    assert "epoch 0 was written by 3 tasks, as many as its slots allow" in caplog.text
    assert dba.ddl() == []
    assert orders.leftovers() == []


def test_an_epoch_of_which_a_slot_was_lost_is_written_again_in_other_partitions(
    six_files, spark, orders, dba, tmp_path
):
    sink, stream = six_files
    checkpoint = str(tmp_path / "checkpoint")

    def lose(step: str, epoch: int | None) -> None:
        """The rehearsal's transaction, and the rows of one task."""
        if step == "decided":
            ((slot,), *others) = orders.sql(
                f"SELECT slot FROM {orders.meta}_staging.slots WHERE handle IS NOT NULL"
            )
            assert len(others) == 2
            orders.sql(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
                f" WHERE usename = 'fixed_{orders.schema}'"
            )
            orders.sql(f"DELETE FROM {orders.meta}_staging.slot_{slot}")

    with pytest.raises(Exception, match="threw its prepared rows away"):
        Pipeline("orders", sinks=[sink], watch=lose).start(
            stream, checkpoint=checkpoint, availableNow=True
        ).awaitTermination()
    assert orders.rows() == []
    # The replay has one partition.
    spark.conf.unset(FILE_COST)
    pipeline = Pipeline("orders", sinks=[sink])
    pipeline.start(stream, checkpoint=checkpoint, availableNow=True).awaitTermination()
    assert pipeline.error is None
    assert orders.rows(columns="id") == [(number,) for number in range(6000)]
    assert parts(orders) == 1
    assert dba.ddl() == []
    assert orders.leftovers() == []
