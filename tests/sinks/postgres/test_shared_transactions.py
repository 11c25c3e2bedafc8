"""Sinks on one PostgreSQL server in one transaction; refused rows go to another sink."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from kit.sql.refused_rows import *  # noqa: F403  every test there is one of this module, too
from kit.sql.refused_rows import Family, rows, session, write
from kit.sql.shared_transactions import *  # noqa: F403  the same
from kit.sql.shared_transactions import ParentAndChild

from epochal.errors import Misconfigured
from epochal.logs import MemoryLog

GOOD = "00000000-0000-0000-0000-000000000000"


class OnPostgres(ParentAndChild):
    good = GOOD
    bad = "bad"
    refused_child = r'child\d? refuses partition 0, row \{"id":2,'
    whole = {  # noqa: RUF012  nobody changes it
        "parent": [1, 2],
        "child": [1],
        "bad parents": ['{"id":13}'],
        "bad children": [f'{{"id":13,"name":"{GOOD}"}}', '{"id":2,"name":"bad"}'],
    }

    def make_tables(self) -> None:
        place = self.place
        place.sql(
            f"CREATE TABLE {place.schema}.{self.parent} (id bigint PRIMARY KEY CHECK (id <> 13))"
        )
        place.sql(
            f"CREATE TABLE {place.schema}.{self.child} (parent bigint REFERENCES"
            f" {place.schema}.{self.parent}, name uuid)"
        )

    def bad_parents(self) -> list[str]:
        place = self.place
        if place.sql(f"SELECT to_regclass('{place.schema}.{self.refused}')") == [(None,)]:
            return []
        return [row for (row,) in place.rows(self.refused, '"row"')]

    def cut_open_transactions(self) -> None:
        self.place.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE state = 'idle in transaction'"
        )

    def drop_staging_of_the_first(self) -> None:
        ((staged,),) = self.place.sql(
            f"SELECT handle FROM {self.place.meta}_staging.slots WHERE handle IS NOT NULL"
            f" AND target = '{self.place.schema}.{self.parent}'"
        )
        self.place.drop_staged(staged)

    def let_the_first_take_all(self) -> None:
        table = f"{self.place.schema}.{self.parent}"
        self.place.sql(f"ALTER TABLE {table} DROP CONSTRAINT {self.parent}_id_check")


@pytest.fixture
def families(place, tmp_path) -> Callable[[int], Family]:
    return lambda number: OnPostgres(place, tmp_path, number)


def test_both_tables_are_written_by_one_transaction(family):
    with session(family, MemoryLog()) as opened:
        write(opened, rows((1, GOOD), (2, GOOD)))
    stamps = {
        stamp
        for table in (family.parent, family.child)
        for (stamp,) in family.place.sql(f"SELECT xmin::text FROM {family.place.schema}.{table}")
    }
    assert len(stamps) == 1


# Refused rows


def test_refused_rows_are_reported_with_their_reasons(family):
    with session(family, MemoryLog()) as opened:
        write(opened, *family.mixed)
    ((sink, epoch, sqlstate, reason),) = family.place.sql(
        f"SELECT sink, epoch, sqlstate, reason FROM {family.place.schema}.{family.refused}"
    )
    assert (sink, epoch, sqlstate) == ("parent", 0, "23514")
    assert "violates check constraint" in reason


def test_a_sink_for_refused_rows_takes_all_of_them_or_is_refused_itself(family):
    parent, child = family.sinks()
    for taker, why in [
        (replace(child, on_reject="fail", where="id > 1"), "where="),
        (child, "may itself send rows elsewhere"),
        (replace(parent, on_reject="fail", table=family.child), "two sinks share"),
    ]:
        with pytest.raises(Misconfigured, match=why):
            session(family, MemoryLog(), sinks=[replace(parent, on_reject=taker)])
    taker = replace(child, name="wrong table", on_reject="fail", columns=None)
    with pytest.raises(Misconfigured, match="no column"):
        session(family, MemoryLog(), sinks=[replace(parent, on_reject=taker)])
