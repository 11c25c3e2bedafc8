"""The table of types: each Arrow type has a column in every database, or a reason why not."""

from __future__ import annotations

import pyarrow as pa
import pytest

from epochal.kit.sql import types
from epochal.kit.sql.types import TAKERS, TYPES, TypeRow, sent_to
from epochal.sinks.mysql import types as mysql
from epochal.sinks.oracle import types as oracle
from epochal.sinks.postgres import types as postgres

DATABASES = ("postgres", "mysql", "oracle")
SEVERAL = [
    *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16()),
    *(pa.uint32(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.decimal128(38, 18)),
    *(pa.decimal256(20, 2), pa.string(), pa.large_string(), pa.string_view(), pa.null()),
    *(pa.binary(), pa.large_binary(), pa.binary(16), pa.date32(), pa.date64(), pa.timestamp("s")),
    *(pa.timestamp("us", "UTC"), pa.duration("ms"), pa.list_(pa.int8())),
    *(pa.struct([("a", pa.int8())]), pa.dictionary(pa.int8(), pa.string())),
]


@pytest.mark.parametrize("kind", SEVERAL, ids=str)
@pytest.mark.parametrize("database", [postgres, mysql, oracle], ids=DATABASES)
def test_every_type_has_a_natural_column_and_nulls_of_it_can_be_sent(kind, database):
    sent = database.sent_as(kind)
    assert not isinstance(sent, str)
    if sent.convert is not None:
        assert sent.convert(pa.nulls(2, kind)).null_count == 2


def test_every_family_names_the_columns_that_take_it():
    assert {row.family for row in TYPES} | {"json"} == TAKERS.keys()


@pytest.mark.parametrize("database", DATABASES)
def test_types_without_a_counterpart_are_refused_with_the_reason(database):
    assert "has more digits than" in sent_to(database, pa.decimal256(70, 40))
    assert "has no counterpart in" in sent_to(database, pa.dense_union([pa.field("a", pa.int8())]))
    assert "no counterpart in Oracle" in sent_to("oracle", pa.time64("us"))


def test_one_row_of_the_table_adds_a_type_to_all_databases(monkeypatch):
    row = TypeRow(
        lambda kind: kind == pa.binary(16), "text", pa.string(), "uuid", "uuid", "VARCHAR2(36)"
    )
    monkeypatch.setattr(types, "TYPES", (row, *TYPES))
    found = [module.sent_as(pa.binary(16)).ddl for module in (postgres, mysql, oracle)]
    assert found == ["uuid", "uuid", "VARCHAR2(36)"]
