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


def test_a_pipeline_of_more_partitions_than_slots_puts_them_together(spark, orders, dba, tmp_path):
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
    stream = spark.readStream.schema(rows.schema).parquet(str(tmp_path / "source"))
    # A file is a partition of its own.
    spark.conf.set("spark.sql.files.openCostInBytes", str(1 << 30))
    pipeline = Pipeline("orders", sinks=[sink])
    try:
        query = pipeline.start(stream, checkpoint=str(tmp_path / "checkpoint"), availableNow=True)
        query.awaitTermination()
    finally:
        spark.conf.unset("spark.sql.files.openCostInBytes")
    assert pipeline.error is None
    assert orders.rows(columns="id") == [(number,) for number in range(6000)]
    parts = f"SELECT count(DISTINCT part) FROM {orders.meta}.ledger WHERE part >= 0"
    assert orders.sql(parts) == [(3,)]
    assert dba.ddl() == []
    assert orders.leftovers() == []
