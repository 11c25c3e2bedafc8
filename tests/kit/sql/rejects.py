"""Rows that an upsert can't apply are set apart, the same on every database.

A module of tests for each database imports these, beside its own fixture `place`.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from epochal.sinks.memory import Memory


def rejected_by(life) -> list[dict[str, Any]]:
    return life.committer.rejected(0).to_pylist()


def test_rows_without_a_key_go_elsewhere(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint UNIQUE, name {place.text})")
    life = place.life(mode="upsert", keys="id", on_reject=Memory(name="bad orders"))
    rows = pa.table({"id": pa.array([1, None, 3, None], pa.int64()), "name": ["a", "b", "c", "d"]})
    life.write(0, rows)
    rejected = sorted(
        (json.loads(row["row"])["name"], row["sqlstate"]) for row in rejected_by(life)
    )
    assert rejected == [("b", "23502"), ("d", "23502")]
    assert place.rows() == [(1, "a"), (3, "c")]


def test_a_row_that_another_one_supersedes_is_not_refused(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, n int CHECK (n < 9))")
    options = {"mode": "upsert", "keys": "id", "order_by": "at", "columns": ["id", "n"]}
    life = place.life(on_reject=Memory(name="bad orders"), **options)
    first = pa.table({"id": pa.array([1, 2, 3, 4], pa.int64()), "n": [10, 20, 3, 4], "at": [1] * 4})
    later = pa.table({"id": pa.array([1, 3], pa.int64()), "n": [1, 30], "at": [2, 2]})
    life.write(0, first, later)
    assert sorted(json.loads(row["row"])["n"] for row in rejected_by(life)) == [20, 30]
    assert place.rows() == [(1, 1), (3, 3), (4, 4)]
