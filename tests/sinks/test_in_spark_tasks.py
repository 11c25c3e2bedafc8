"""Real Spark tasks prepare, in Python workers of their own; this process commits."""

from __future__ import annotations

import pickle
import sys

import pytest

from epochal.sinks.files import Files, read_epochs
from epochal.sinks.memory import Memory


def receipts_of_tasks(spark, driver, rows, epoch: int) -> list:
    sink, uid, tag = driver.sink, driver.uid, driver.identity.tag

    def prepare(batches):
        import pyarrow as pa
        from pyspark import TaskContext

        from epochal.contract import Task
        from epochal.terms import UNCLAIMED, Handle

        context = TaskContext.get()
        handle = Handle(
            uid=uid,
            generation=1,
            claim=UNCLAIMED,
            epoch=epoch,
            sink=tag,
            partition=context.partitionId(),
            attempt=context.taskAttemptId(),
        )
        writer = None
        for batch in batches:
            writer = writer or sink.writer(Task(handle=handle, schema=batch.schema))
            writer.write(batch)
        if writer is not None:
            receipt = pickle.dumps(writer.prepare())
            yield pa.RecordBatch.from_pydict({"receipt": pa.array([receipt])})

    found = rows.mapInArrow(prepare, "receipt binary").collect()
    return [pickle.loads(bytes(row.receipt)) for row in found]


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_tasks_prepare_and_the_driver_commits(drive, spark, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(spark.sparkContext, "pythonExec", sys.executable)
    sink = Memory() if kind == "memory" else Files(str(tmp_path))
    driver = drive(sink)

    def rows() -> int:
        table = sink.rows() if kind == "memory" else read_epochs(str(tmp_path)).to_table()
        return table.num_rows

    for epoch in range(2):
        receipts = receipts_of_tasks(spark, driver, spark.range(0, 30_000, 1, 3), epoch)
        assert len(receipts) == 3
        assert rows() == epoch * 30_000
        driver.commit(epoch, receipts)
        assert rows() == (epoch + 1) * 30_000
    assert driver.committer.in_doubt() == []
