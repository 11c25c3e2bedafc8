"""What upsert, replace and delete mean on every database: which row wins, what is refused.

A module of tests for each database imports these, beside its own fixtures `keyed` (a table of id,
name and note with a key on id), `orders` (id and name without a key), `place` and `some`.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from epochal.errors import Misconfigured, RowRejected


def changes(*rows: tuple) -> pa.Table:
    """Rows of (id, name, version, op)."""
    ids, names, versions, ops = zip(*rows, strict=True)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": pa.array(names, pa.string()),
            "version": pa.array(versions, pa.int64()),
            "op": pa.array(ops, pa.string()),
        }
    )


CHANGES = {"keys": ["id"], "order_by": "version", "delete_when": "op = 'd'"}
KEYED = pytest.mark.parametrize("mode", ["upsert", "replace"])


def test_an_upsert_touches_only_mapped_columns(keyed, some):
    keyed.sql(f"INSERT INTO {keyed.schema}.orders VALUES (1, 'old', 'kept'), (9, 'other', 'kept')")
    life = keyed.life(mode="upsert", keys=["id"])
    life.write(0, some(1, 2), some(3))
    assert keyed.rows() == [
        (1, "n1", "kept"),
        (2, "n2", "untouched"),
        (3, "n3", "untouched"),
        (9, "other", "kept"),
    ]


def test_a_replace_writes_rows_anew(keyed, some):
    keyed.sql(f"INSERT INTO {keyed.schema}.orders VALUES (1, 'old', 'gone'), (9, 'other', 'kept')")
    keyed.life(mode="replace", keys=["id"]).write(0, some(1, 2))
    assert keyed.rows() == [(1, "n1", "untouched"), (2, "n2", "untouched"), (9, "other", "kept")]


def test_a_replace_needs_no_constraint_and_removes_every_row_of_the_key(orders, some):
    orders.sql(f"INSERT INTO {orders.schema}.orders VALUES (1, 'a'), (1, 'b'), (2, 'c')")
    orders.life(mode="replace", keys=["id"]).write(0, some(1))
    assert orders.rows() == [(1, "n1"), (2, "c")]


def test_an_upsert_of_keys_alone_keeps_what_is_there(keyed, some):
    keyed.sql(f"INSERT INTO {keyed.schema}.orders (id, name) VALUES (1, 'old')")
    keyed.life(mode="upsert", keys=["id"], columns=["id"]).write(0, some(1, 2))
    assert keyed.rows(columns="id, name") == [(1, "old"), (2, None)]


def test_fields_go_to_the_columns_they_are_mapped_to(keyed, some):
    keyed.life(mode="upsert", keys=["id"], columns={"id": "id", "name": "note"}).write(0, some(1))
    assert keyed.rows() == [(1, None, "n1")]


@KEYED
def test_the_last_row_of_a_key_wins_whichever_task_it_is_in(keyed, mode):
    life = keyed.life(mode=mode, keys="id", order_by="version", columns=["id", "name"])
    life.write(
        0,
        changes((1, "second", 2, "u"), (2, "only", 1, "u"), (3, "null loses", None, "u")),
        changes((1, "first", 1, "u"), (1, "third", 3, "u"), (3, "wins", 0, "u")),
    )
    assert keyed.rows(columns="id, name") == [(1, "third"), (2, "only"), (3, "wins")]


@KEYED
def test_among_equals_of_one_task_the_one_that_came_last_wins(keyed, mode):
    life = keyed.life(mode=mode, keys="id", order_by="version", columns=["id", "name"])
    life.write(0, changes((1, "a", 1, "u"), (1, "b", 1, "u")), changes((2, "c", 1, "u")))
    assert keyed.rows(columns="id, name") == [(1, "b"), (2, "c")]


@KEYED
def test_equals_of_two_tasks_are_refused_with_their_keys(keyed, mode):
    life = keyed.life(mode=mode, keys="id", order_by="version", columns=["id", "name"])
    with pytest.raises(RowRejected, match=r"(?i)from several tasks .*id=1 \(2 rows\)"):
        life.write(0, changes((1, "a", 1, "u"), (2, "x", 1, "u")), changes((1, "b", 1, "u")))
    assert keyed.rows() == []


@KEYED
def test_several_rows_of_a_key_without_an_order_are_refused_with_their_keys(keyed, some, mode):
    life = keyed.life(mode=mode, keys="id")
    with pytest.raises(RowRejected, match=r"(?i)id=1 \(2 rows\)") as raised:
        life.write(0, some(1, 2), some(1, 3))
    assert "order_by" in raised.value.hint
    assert keyed.rows() == []


@KEYED
def test_marked_rows_delete_their_key(keyed, mode):
    keyed.sql(
        f"INSERT INTO {keyed.schema}.orders (id, name)"
        " VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, 'd')"
    )
    life = keyed.life(mode=mode, **CHANGES, columns=["id", "name"])
    life.write(
        0,
        changes((1, None, 1, "d"), (2, "new", 2, "u"), (3, "late", 1, "u"), (5, None, 1, "d")),
        changes(
            (2, None, 1, "d"), (3, None, 2, "d"), (6, "born and gone", 1, "c"), (6, None, 2, "d")
        ),
    )
    assert keyed.rows(columns="id, name") == [(2, "new"), (4, "d")]


def test_a_field_named_like_a_word_in_the_delete_condition_is_written(keyed):
    """Words within literals and comments are no fields; without a column a field is missed."""
    life = keyed.life(mode="upsert", keys="id", delete_when="op = 'name' /* version */")
    rows = changes((1, "a", 1, "u"), (2, "b", 1, "name")).drop_columns("version")
    life.write(0, rows)
    assert keyed.rows(columns="id, name") == [(1, "a")]
    life = keyed.life(mode="upsert", keys="id", delete_when="op = 'version'")
    with pytest.raises(Misconfigured, match=r'(?i)there is no column "version"'):
        life.start(changes((1, "a", 1, "u")))


def test_a_delete_and_an_upsert_of_a_key_without_an_order_are_refused(keyed):
    life = keyed.life(mode="upsert", keys="id", delete_when="op = 'd'", columns=["id", "name"])
    with pytest.raises(RowRejected, match=r"(?i)id=1"):
        life.write(0, changes((1, "a", 1, "u")), changes((1, None, 2, "d")))


def test_fields_that_only_steer_need_no_column(keyed):
    life = keyed.life(mode="upsert", **CHANGES)
    life.write(0, changes((1, "a", 1, "u"), (2, "b", 1, "u"), (1, None, 2, "d")))
    assert keyed.rows(columns="id, name") == [(2, "b")]


def test_the_same_change_stream_again_gives_the_same_table(keyed):
    life = keyed.life(mode="upsert", **CHANGES)
    stream = changes((1, "a", 1, "c"), (1, "b", 2, "u"), (2, "x", 1, "c"), (2, None, 2, "d"))
    for epoch in range(3):
        life.write(epoch, stream)
        assert keyed.rows(columns="id, name") == [(1, "b")]


def test_a_null_key_is_refused(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint UNIQUE, name varchar(9))")
    rows = pa.table({"id": pa.array([1, None], pa.int64()), "name": ["a", "b"]})
    with pytest.raises(RowRejected, match=r"(?i)1 row whose key \(id\) is null"):
        place.life(mode="upsert", keys="id").write(0, rows)


@pytest.mark.parametrize("op", ["u", "d"])
def test_a_null_key_of_a_change_stream_is_refused_though_its_column_takes_none(keyed, op):
    """A delete stores no key that the column could refuse."""
    rows = changes((1, "a", 1, "u"), (None, "b", 1, op))
    with pytest.raises(RowRejected, match=r"(?i)1 row whose key \(id\) is null"):
        keyed.life(mode="upsert", **CHANGES).write(0, rows)
    assert keyed.rows() == []


def test_an_upsert_without_a_constraint_is_refused_before_the_first_row(orders, some):
    with pytest.raises(Misconfigured, match="there is no primary key or unique") as raised:
        orders.life(mode="upsert", keys="id").start(some(1))
    assert "ADD PRIMARY KEY" in raised.value.hint


def test_a_key_of_several_columns_in_any_order(place):
    place.sql(
        f"CREATE TABLE {place.schema}.orders (a int, b int, v varchar(9), PRIMARY KEY (b, a))"
    )
    life = place.life(mode="upsert", keys=["a", "b"])
    life.write(0, pa.table({"a": [1, 1], "b": [1, 2], "v": ["x", "y"]}))
    life.write(1, pa.table({"a": [1], "b": [2], "v": ["z"]}))
    assert place.rows() == [(1, 1, "x"), (1, 2, "z")]


def test_options_that_do_not_go_together_are_reported(place):
    for options, message in [
        ({"mode": "upsert"}, "without keys"),
        ({"mode": "merge"}, "mode='merge'"),
        ({"keys": ["id"]}, "keys with mode='append'"),
        ({"mode": "upsert", "keys": ["id"], "strategy": "prepared"}, "strategy='prepared'"),
        ({"strategy": "xa"}, "strategy='xa'"),
        ({"create_table": "always"}, "create_table='always'"),
        ({"columns": "id"}, "columns='id'"),
        ({"columns": {"a": "x", "b": "x"}}, "from two fields"),
    ]:
        with pytest.raises(Misconfigured, match=message):
            place.sink(**options)


@pytest.mark.parametrize("condition", ["nothing = 1", "name ="])
def test_a_delete_condition_that_can_not_be_evaluated_is_refused_at_the_start(
    place, some, condition
):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name text)")
    life = place.life(mode="upsert", keys="id", delete_when=condition)
    with pytest.raises(Misconfigured, match=f"delete_when='{condition}'") as caught:
        life.start(some(1))
    assert "the fields are id, name" in caught.value.hint.lower()


def test_a_key_that_is_deleted_and_comes_again_in_one_epoch_is_a_new_row(keyed):
    life = keyed.life(
        mode="upsert", keys="id", order_by="at", delete_when="name = 'gone'", columns=["id", "name"]
    )

    def rows(*some):
        ids, names, moments = zip(*some, strict=True)
        return pa.table({"id": pa.array(ids, pa.int64()), "name": names, "at": moments})

    life.write(0, rows((1, "a", 1), (2, "b", 1), (3, "c", 1)))
    keyed.sql(f"UPDATE {keyed.schema}.orders SET note = 'old'")
    life.write(
        1,
        rows((1, "gone", 2), (1, "back", 3), (2, "still", 2), (3, "again", 2)),
        rows((3, "gone", 3)),
    )
    assert keyed.rows(columns="id, name, note") == [(1, "back", "untouched"), (2, "still", "old")]
