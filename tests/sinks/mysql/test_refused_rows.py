"""Refused rows on their way to another sink, from MariaDB: some are found when they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from kit.sql.refused_rows import *  # noqa: F403  every test there is one of this module, too
from kit.sql.refused_rows import Family, settings_of

from epochal.kit.sql.staged import StagedSqlCommitter
from epochal.testing.crash import Breach, crash_at_every_call


class TwoTables(Family):
    good = "ok"
    bad = "too long"
    whole = {  # noqa: RUF012  nobody changes it
        "orders": [1, 2],
        "names": [1],
        "bad orders": ['{"id": 13}'],
        "bad names": ['{"id": 13, "name": "ok"}', '{"id": 2, "name": "too long"}'],
    }
    committer = StagedSqlCommitter

    def make_tables(self) -> None:
        self._make_table("orders")
        self._make_table("names", more=", name varchar(3)")

    def _make_table(self, name: str, more: str = "") -> None:
        """MySQL wants the name of a check to be the only one in its schema."""
        table = f"{name}{self.number}"
        check = f"CONSTRAINT lucky_{table} CHECK (id <> 13)"
        columns = f"id bigint PRIMARY KEY, {check}{more}"
        self.place.sql(f"CREATE TABLE {self.place.schema}.{table} ({columns})")

    def sinks(self) -> Sequence[Any]:
        sink, number = self.place.sink, self.number
        bad_orders = sink(
            f"bad{number}", name=f"bad orders{self.run}", create_table="if_missing", pool_min=0
        )
        return [
            sink(
                f"orders{number}",
                name=f"orders{self.run}",
                columns=["id"],
                on_reject=bad_orders,
                pool_min=0,
            ),
            sink(
                f"names{number}",
                name=f"names{self.run}",
                on_reject=self.taker("bad names"),
                pool_min=0,
            ),
        ]

    def shows(self) -> Sequence[Callable[[], list[Any]]]:
        place, number = self.place, self.number
        return (
            lambda: [key for (key,) in place.rows(f"orders{number}", "id")],
            lambda: [key for (key,) in place.rows(f"names{number}", "id")],
            self.bad_orders,
            self.in_folder,
        )

    def bad_orders(self) -> list[str]:
        place, table = self.place, f"bad{self.number}"
        there = place.sql(f"SHOW TABLES FROM {place.schema} LIKE '{table}'")
        return [row for (row,) in place.rows(table, "`row`")] if there else []

    def cut_open_transactions(self) -> None:
        open_ = self.place.sql(
            "SELECT trx_mysql_thread_id FROM information_schema.innodb_trx"
            " WHERE trx_mysql_thread_id <> 0"
        )
        assert open_
        for (number,) in open_:
            self.place.sql(f"KILL CONNECTION {number}")

    def drop_staging_of_the_first(self) -> None:
        (staged,) = self.place.sql(
            "SELECT table_name FROM information_schema.columns"
            f" WHERE table_schema = '{self.place.staging}' AND column_name = 'id'"
        )
        self.place.sql(f"DROP TABLE {self.place.staging}.{staged[0]}")

    def let_the_first_take_all(self) -> None:
        table = f"orders{self.number}"
        self.place.sql(f"ALTER TABLE {self.place.schema}.{table} DROP CONSTRAINT lucky_{table}")


@pytest.fixture
def families(place, tmp_path) -> Callable[[int], Family]:
    return lambda number: TwoTables(place, tmp_path, number)


def test_the_judge_objects_where_rows_that_were_not_loaded_are_forgotten(families, monkeypatch):
    monkeypatch.setattr(StagedSqlCommitter, "note_unfit", lambda *_: None)
    with pytest.raises(Breach, match=r"bad names.* lost 1 rows"):
        crash_at_every_call(settings_of(families), second=False, effects_only=True)
