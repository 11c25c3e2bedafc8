"""What a task does with a partition's rows, without Spark: writer, rows, receipt, errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JNetworkError

from epochal.contract import Task
from epochal.errors import InvariantBroken, Misconfigured, RowRejected, TaskFailed, from_text
from epochal.kit.sink_base import SinkBase
from epochal.spark.error_text import as_epochal, stop_or_error
from epochal.spark.task import CarriedError, PrepareTask, _text_batch, prepare
from epochal.terms import (
    DEFAULT_LIMITS,
    EpochNumber,
    Fingerprint,
    Generation,
    Identity,
    Receipt,
    SinkName,
    Uid,
)

SCHEMA = pa.schema([("id", pa.int64())])
ARRIVING = SCHEMA.append(pa.field("hash", pa.int64()))


@dataclass
class Writer:
    """Counts what it is given; `fails` is raised by the first write."""

    task: Task
    fails: Exception | None = None
    miscounts_by: int = 0
    batches: list[pa.RecordBatch] = field(default_factory=list)
    is_aborted: bool = False

    def write(self, batch: pa.RecordBatch) -> None:
        if self.fails is not None:
            raise self.fails
        self.batches.append(batch)

    def prepare(self) -> Receipt:
        rows = sum(batch.num_rows for batch in self.batches) + self.miscounts_by
        return Receipt(handle=self.task.handle, fingerprint=Fingerprint(rows))

    def abort(self) -> None:
        self.is_aborted = True


@dataclass(frozen=True, kw_only=True)
class Counting(SinkBase):
    kind = "counting"
    target = "nowhere"
    options: dict[str, Any] = field(default_factory=dict)
    writers: list[Writer] = field(default_factory=list)

    def writer(self, task: Task) -> Writer:
        self.writers.append(Writer(task, **self.options))
        return self.writers[-1]

    def committer(self, identity: Any, limits: Any) -> Any:
        raise NotImplementedError


def job(sink: Counting) -> PrepareTask:
    return PrepareTask(
        sink=sink,
        identity=Identity(
            pipeline="p", uid=Uid("abcdefgh2345"), sink=SinkName("s"), generation=Generation(1)
        ),
        epoch=EpochNumber(3),
        schema=SCHEMA,
        handout=None,
        limits=DEFAULT_LIMITS,
        is_hashed=True,
    )


def rows(*hashes: int) -> pa.RecordBatch:
    columns = {"id": list(range(len(hashes))), "hash": list(hashes)}
    return pa.RecordBatch.from_pydict(columns, schema=ARRIVING)


def test_hashes_are_summed_modulo_2_64_over_all_batches_and_kept_from_the_sink() -> None:
    sink = Counting()
    arriving = [rows(-1, 2**62), rows(), rows(5, 6, 7, 8).slice(1, 2), rows(2**62, 2**62, 2**62)]
    receipt = prepare(job(sink), iter(arriving), partition=0, attempt=1)
    assert receipt.fingerprint == Fingerprint(7, (-1 + 4 * 2**62 + 6 + 7) % 2**64)
    (writer,) = sink.writers
    assert [batch.num_rows for batch in writer.batches] == [2, 2, 3]
    assert {batch.schema for batch in writer.batches} == {SCHEMA}


def test_a_receipt_that_counts_other_rows_than_were_written_is_refused() -> None:
    with pytest.raises(CarriedError) as raised:
        prepare(job(Counting(options={"miscounts_by": 1})), iter([rows(1)]), partition=0, attempt=1)
    error = from_text(str(raised.value))
    assert isinstance(error, InvariantBroken)
    assert "1 rows were written" in error.message


@pytest.mark.parametrize(
    ("raised", "arrives"), [(RowRejected("no"), RowRejected), (ValueError("odd"), TaskFailed)]
)
def test_a_failing_writer_is_aborted_and_its_error_crosses_as_a_line(
    raised: Exception, arrives: type[Exception]
) -> None:
    sink = Counting(options={"fails": raised})
    with pytest.raises(CarriedError) as carried:
        prepare(job(sink), iter([rows(1)]), partition=0, attempt=1)
    assert isinstance(from_text(f"a traceback\n{carried.value}\nand more"), arrives)
    assert sink.writers[0].is_aborted


@pytest.mark.parametrize("text", ["", "receipt", "Grüße → 🚀"])
def test_a_receipt_is_sent_as_text_whatever_its_letters(text: str) -> None:
    batch = _text_batch(text)
    batch.validate(full=True)
    assert batch.to_pylist() == [{"receipt": text}]


class Unsaid(Exception):
    """As PySpark's, whose texts are in the JVM."""

    def __str__(self) -> str:
        raise Py4JNetworkError("Answer from Java side is empty")


def test_an_error_whose_text_has_gone_with_the_jvm_says_that_it_has_exited() -> None:
    for said in (as_epochal(Unsaid(), "the query"), stop_or_error(Unsaid(), "the query")):
        assert isinstance(said, TaskFailed)
        assert "the query: Spark's JVM has exited" in said.message


def test_a_name_that_java_does_not_have_is_reported_with_the_way_out() -> None:
    """As where a value of a partition is not ASCII, and the locale of a container is POSIX."""
    fact = "java.nio.file.InvalidPathException: Malformed input or input contains unmappable "
    error = as_epochal(RuntimeError(f"{fact}characters: /lake/city=?"), "epoch 7")
    assert isinstance(error, Misconfigured)
    assert "LC_ALL=C.UTF-8" in error.hint
