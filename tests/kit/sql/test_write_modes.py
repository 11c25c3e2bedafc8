"""Options of write modes that don't go together are refused where they are declared."""

from __future__ import annotations

import pytest

from epochal.errors import Misconfigured
from epochal.sinks.mysql import MySQL
from epochal.sinks.oracle import Oracle
from epochal.sinks.postgres import Postgres

UPSERT = {"mode": "upsert", "keys": "id"}
IMPOSSIBLE = {
    "newer with replace": ({"mode": "replace", "keys": "id", "newer": "v"}, "in place"),
    "newer with append": ({"newer": "v"}, "in place"),
    "newer is a key": ({**UPSERT, "newer": "id"}, "would never differ"),
    "another order": ({**UPSERT, "newer": "v", "order_by": "at"}, "would disagree"),
    "marks without deletes": ({**UPSERT, "delete_as": {"gone": "1"}}, "which rows are deletes"),
    "deletes with insert_new": (
        {"mode": "insert_new", "keys": "id", "delete_when": "op = 'd'"},
        "deletes no single row",
    ),
    "tombstones without newer": (
        {**UPSERT, "delete_when": "op = 'd'", "tombstones": "x"},
        "no older row to keep out",
    ),
    "unchanged and marks": (
        {**UPSERT, "delete_when": "x", "delete_as": {"gone": "1"}, "skip_unchanged": True},
        "would stay deleted",
    ),
    "misses of an upsert": ({**UPSERT, "on_miss": "reject"}, "which misses no row"),
    "keys of complete": ({"mode": "complete", "keys": "id"}, "looks at no key"),
    "complete, prepared": ({"mode": "complete", "strategy": "prepared"}, "would lock"),
    "no keys": ({"mode": "update"}, "without keys"),
    "an unknown mode": ({"mode": "merge"}, "one of append, upsert"),
    "types of nothing": ({"types": {"a": "text"}}, "no column is made"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
@pytest.mark.parametrize(
    ("kind", "url"), [(Postgres, "postgresql://etl@db/shop"), (MySQL, "mysql://etl@db/shop")]
)
def test_options_that_do_not_go_together_are_refused_with_the_way_out(kind, url, case):
    options, fact = IMPOSSIBLE[case]
    with pytest.raises(Misconfigured) as raised:
        kind(url, table="orders", **options)
    assert fact in str(raised.value)
    assert raised.value.hint


def test_newer_orders_the_rows_of_one_epoch_too():
    sink = Postgres("postgresql://etl@db/shop", table="orders", **UPSERT, newer="v")
    assert sink.write_mode.order_by == ("v",)
    both = Postgres(
        "postgresql://etl@db/shop", table="orders", **UPSERT, newer="v", order_by=["v", "at"]
    )
    assert both.write_mode.order_by == ("v", "at")


def test_oracle_refuses_what_was_never_tried_there():
    with pytest.raises(Misconfigured, match="not offered"):
        Oracle("oracle://etl@db/shop", table="orders", **UPSERT, skip_unchanged=True)
