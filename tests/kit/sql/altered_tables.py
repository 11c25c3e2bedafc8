"""Tables that are altered under a running driver: values arrive as they were sent, or not at all.

A module of tests for each database imports these, beside its own fixture `place`.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from epochal.errors import EpochalError, Misconfigured, TryAgain

BOTH = pytest.mark.parametrize("strategy", ["staged", "prepared"])
HALVES = pa.table({"v": [1.5, 2.5]})
REFUSED = r"altered|can't become (bigint|int)"


def make_table(place, column: str) -> None:
    place.sql(f"CREATE TABLE {place.schema}.orders (v {column})")


def alter(place, column: str) -> None:
    place.sql(f"ALTER TABLE {place.schema}.orders {place.altered.format('v', column)}")


@BOTH
def test_an_epoch_after_a_column_was_altered_is_written_as_its_new_type(place, strategy):
    make_table(place, "bigint")
    life = place.life(strategy=strategy)
    life.write(0, pa.table({"v": [1, 2]}))
    alter(place, "double precision")
    life.write(1, pa.table({"v": [3, 4]}))
    assert place.rows() == [(1.0,), (2.0,), (3.0,), (4.0,)]


@BOTH
def test_an_epoch_that_an_altered_column_can_not_hold_is_refused(place, strategy):
    make_table(place, "double precision")
    life = place.life(strategy=strategy)
    life.write(0, pa.table({"v": [8.0]}))
    alter(place, "bigint")
    with pytest.raises(Misconfigured, match="can't become bigint"):
        life.write(1, HALVES)
    assert place.rows() == [(8,)]


@BOTH
@pytest.mark.parametrize("column", ["bigint", "integer"])
def test_a_column_that_is_altered_under_a_task_gets_nothing_of_it(place, strategy, column):
    """Of the same width as before, or of another."""
    make_table(place, "double precision")
    life = place.life(strategy=strategy)
    life.start(HALVES)
    writer = life.writer(HALVES.schema, 0)
    alter(place, column)
    writer.write(HALVES.to_batches()[0])

    def prepare_and_rehearse():
        life.rehearse(0, [writer.prepare()])

    with pytest.raises((TryAgain, Misconfigured), match=REFUSED):
        prepare_and_rehearse()
    assert place.rows() == []


def test_a_column_that_is_altered_after_rows_were_staged_gets_nothing_of_them(place):
    make_table(place, "double precision")
    life = place.life()
    life.start(HALVES)
    receipts = [life.prepare(HALVES, 0)]
    alter(place, "bigint")
    for step in (life.rehearse, life.commit):
        with pytest.raises(EpochalError, match=REFUSED):
            step(0, receipts)
    assert place.rows() == []
    alter(place, "double precision")
    life.commit(0, receipts)
    assert place.rows() == [(1.5,), (2.5,)]


def test_a_column_that_is_altered_just_before_rows_are_applied_gets_nothing_of_them(
    place, monkeypatch
):
    make_table(place, "double precision")
    life = place.life()
    life.start(HALVES)
    receipts = [life.prepare(HALVES, 0)]
    checker = life.committer._checker
    read = checker.staged_layout

    def read_and_alter(*asked):
        found = read(*asked)
        alter(place, "bigint")
        return found

    monkeypatch.setattr(checker, "staged_layout", read_and_alter)
    with pytest.raises(EpochalError, match=REFUSED):
        life.rehearse(0, receipts)
    assert place.rows() == []
