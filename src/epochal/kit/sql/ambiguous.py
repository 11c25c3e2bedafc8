"""What is told of an epoch whose rows don't say which of them is to stand."""

from __future__ import annotations

from collections.abc import Sequence

from epochal.errors import RowRejected
from epochal.terms import quantity


def several_rows(epoch: int, named: str) -> RowRejected:
    return RowRejected(
        f"epoch {epoch} has several rows of one key, and nothing says which is last: {named}",
        'order_by="updated_at" (or another column that grows), or one row a key in the query',
    )


def equal_rows(epoch: int, order_by: Sequence[str], named: str) -> RowRejected:
    return RowRejected(
        f"epoch {epoch} has rows of one key from several tasks that are equal by "
        f"{', '.join(order_by)}: {named}",
        "add a column that tells them apart to order_by=, or repartition by the key: among rows of "
        "one task the one that comes last wins",
    )


def null_keys(epoch: int, count: int, fields: Sequence[str]) -> RowRejected:
    return RowRejected(
        f"epoch {epoch} has {quantity(count, 'row')} whose key ({', '.join(fields)}) is null: null "
        "matches no row, not even itself",
        f'where="{fields[0]} is not null", or NOT NULL on the column',
    )
