"""The source is read again by the pipeline's own query, and a row that is not there is missed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from epochal import Files, Memory, Pipeline
from epochal.config.resolve_target import OpenedTarget
from epochal.reports.verify import verify

SCHEMA = "id bigint, v string"


@dataclass
class Lake:
    """A folder of JSON files as the source, each an epoch, and a pipeline that reads it."""

    spark: Any
    root: Path
    sinks: list[Any] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.root / "in").mkdir()
        self.sinks = [
            Files(str(self.root / "out"), name="all"),
            Files(
                str(self.root / "odd"), name="odd", where="id % 2 = 1", select=["id", "upper(v) v"]
            ),
        ]

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline("lake", sinks=self.sinks, checkpoint=str(self.root / "chk"))

    @property
    def stream(self) -> Any:
        reader = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        return reader.json(str(self.root / "in")).where("id >= 0")

    def add(self, *ids: int) -> Path:
        at = len(self.files)
        file = self.root / "in" / f"{at:04d}.json"
        file.write_text("\n".join(json.dumps({"id": n, "v": f"v{n}"}) for n in ids))
        os.utime(file, (1_700_000_000 + at, 1_700_000_000 + at))
        self.files.append(file)
        return file

    def run(self, stream: Any = None) -> None:
        pipeline = self.pipeline
        query = pipeline.start(self.stream if stream is None else stream, availableNow=True)
        query.awaitTermination()
        pipeline.close()

    def verified(self, stream: Any = None, **options: Any) -> Any:
        pipeline = self.pipeline
        opened = OpenedTarget(
            target="lake", log=pipeline.log_of(None), pipeline="lake", sinks=pipeline.sinks
        )
        return verify(opened, stream=self.stream if stream is None else stream, **options)

    def against_source(self, stream: Any = None) -> dict[str, Any]:
        return {one.sink: one for one in self.verified(stream).sources}


@pytest.fixture
def lake(spark, tmp_path):
    return Lake(spark, tmp_path)


def verdicts(found: dict[str, Any]) -> dict[str, tuple[str, int | None]]:
    return {name: (one.verdict, one.source_rows) for name, one in found.items()}


def test_the_rows_of_the_source_agree_with_the_decided_rows(lake):
    lake.add(1, 2, 3, -4)
    lake.add(5)
    lake.run()
    lake.add(6, 7)
    lake.run()
    lake.add(8, 9)  # of no epoch yet
    report = lake.verified(spark=lake.spark)
    assert not report.differs
    found = {one.sink: one for one in report.sources}
    assert verdicts(found) == {"all": ("agrees", 6), "odd": ("agrees", 4)}
    assert found["all"].source_hash == found["all"].decided_hash is not None
    assert {one.sink: one.visible_hash for one in report.sinks}["all"] == found["all"].decided_hash


def test_a_row_that_is_gone_from_the_source_and_one_that_was_changed_are_found(lake):
    first, second = lake.add(1, 2, 3), lake.add(4, 5)
    lake.run()
    whole = first.read_text()
    first.write_text(whole.rpartition("\n")[0])
    report = lake.verified()
    assert report.differs
    assert [one.verdict for one in report.sinks] == ["agrees", "agrees"]
    (difference,) = report.sources[0].differences
    assert difference.startswith("the source returns 1 row fewer than were decided: 5 decided, 4")
    first.write_text(whole)
    second.write_text(second.read_text().replace("v4", "v9"))
    found = lake.against_source()
    assert verdicts(found) == {"all": ("differs", 5), "odd": ("agrees", 3)}
    assert "rows of the source or the query have changed" in found["all"].differences[0]


def test_a_sink_that_came_later_is_compared_from_its_first_epoch_on(lake):
    lake.add(1, 2)
    lake.add(3)
    lake.run()
    lake.sinks.append(Memory(name="late"))
    last = lake.add(4, 5, 6)
    lake.run()
    found = lake.against_source()
    assert verdicts(found)["late"] == ("agrees", 3)
    assert (found["late"].since, found["all"].since) == (2, 0)
    last.write_text(last.read_text() + '\n{"id": 7, "v": "v7"}')
    assert verdicts(lake.against_source()) == {
        "all": ("differs", 7),
        "odd": ("differs", 4),
        "late": ("differs", 4),
    }


def test_files_that_are_gone_can_not_be_read_again(lake):
    gone = lake.add(1, 2)
    lake.add(3)
    lake.run()
    gone.unlink()
    report = lake.verified()
    assert not report.differs
    (because,) = {one.because for one in report.sources}
    assert because.startswith("1 of 2 files of the source are gone: ")


HANGING_ON_MORE = {
    "keeps state": lambda stream: stream.dropDuplicates(["id"]),
    "depend on time or chance": lambda stream: stream.selectExpr("id", "uuid() v"),
    "time or chance": lambda stream: stream.selectExpr("id", "string(now()) v"),
    "joins rows": lambda stream: stream.crossJoin(stream.sparkSession.range(1).toDF("n")),
}


def test_a_query_whose_rows_hang_on_more_than_its_source_is_not_compared(lake):
    lake.add(1, 2)
    lake.sinks += [
        Memory(name="stamped", select=["id", "now() at"]),
        Memory(name="summed", select=lambda batch: batch.groupBy("v").count()),
    ]
    lake.run()
    found = lake.against_source()
    assert "time or chance" in found["stamped"].because
    assert "how epochs were cut" in found["summed"].because
    assert verdicts(found)["all"] == ("agrees", 2)
    for because, change in HANGING_ON_MORE.items():
        found = lake.against_source(change(lake.stream))
        assert verdicts(found) == dict.fromkeys(found, ("can't be compared", None))
        assert because in found["all"].because


def test_a_checkpoint_without_the_offsets_of_an_epoch_is_not_compared(lake):
    lake.add(1)
    lake.run()
    (lake.root / "chk" / "offsets" / "0").unlink()
    assert "offsets/0" in lake.against_source()["all"].because
