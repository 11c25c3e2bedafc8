"""A PostgreSQL sink whose tasks get rows as bytes, as from an engine that lays them out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from row_layout_reference import laid_out

from epochal.contract import Task
from epochal.kit.row_layout import RowLayout
from epochal.sinks.postgres import Postgres
from epochal.terms import Receipt


@dataclass(frozen=True, kw_only=True)
class PackedPostgres(Postgres):
    """Rows that can't be laid out go the other way, as they do on Spark."""

    def writer(self, task: Task) -> Any:
        packing = self.row_layout(task.schema, task.handout)
        if packing is None:
            return super().writer(task)
        return _Packing(super().writer(replace(task, is_packed=True)), packing)


class _Packing:
    def __init__(self, writer: Any, packing: RowLayout) -> None:
        self._writer = writer
        self._packing = packing

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write(laid_out(batch, self._packing))

    def prepare(self) -> Receipt:
        receipt: Receipt = self._writer.prepare()
        return receipt

    def abort(self) -> None:
        self._writer.abort()
