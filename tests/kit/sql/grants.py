"""What `grants()` prints is enough, for every mode, on every database.

A module of tests for each database imports these, beside its own fixture `least`: the name of an
account without rights.
"""

from __future__ import annotations

import pytest

from epochal.terms import EpochNumber

_BOTH = {"columns": ["id", "name"]}
_KEYED = {"keys": "id", **_BOTH}
_VERSIONED = {"mode": "upsert", "newer": "name", "delete_when": "name = 'x'"}
EVERY_KIND = (
    {"strategy": "staged"},
    {"strategy": "prepared"},
    {"mode": "upsert", "keys": "id"},
    {"mode": "upsert", **_KEYED},
    {"mode": "replace", **_KEYED},
    {"mode": "upsert", "delete_when": "name = 'x'", **_KEYED},
    {"mode": "insert_new", **_KEYED},
    {"mode": "update", "skip_unchanged": True, **_KEYED},
    {"mode": "complete", **_BOTH},
    {**_VERSIONED, "delete_as": {"gone": "1"}, **_KEYED},
    {**_VERSIONED, "keys": "id", "tombstones": "{schema}.buried"},
    {"create_table": "if_missing"},
)


def writes_epochs_as(account: str, place, some, options) -> None:
    """By nothing but what is granted to it."""
    if "create_table" not in options:
        key = "PRIMARY KEY" if "mode" in options else ""
        place.sql(
            f"CREATE TABLE {place.schema}.orders"
            f" ({place.numbered} id bigint {key}, name {place.ordered}, gone bigint)"
        )
    if "mode" in options:
        place.sql(f"INSERT INTO {place.schema}.orders (id) VALUES (1), (2)")
    if "tombstones" in options:
        options = {**options, "tombstones": f"{place.schema}.buried"}
    life = place.life(url=place.url(user=account), **options)
    place.grant(life.sink)
    for epoch in range(2):
        life.write(epoch, some(1, 2))
    life.committer.prune(EpochNumber(1))
    assert list(life.committer.in_doubt()) == []
    assert len(place.rows()) == (2 if "mode" in options else 4)


@pytest.mark.parametrize("options", EVERY_KIND, ids=str)
def test_what_grants_prints_is_all_that_an_account_needs(place, some, least, options):
    writes_epochs_as(least, place, some, options)
