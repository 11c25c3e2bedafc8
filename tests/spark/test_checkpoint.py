"""Reading Spark's checkpoint folder, as Spark writes it. Only its Hadoop door needs a Spark."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import obstore.store
import pytest

from epochal.errors import CorruptRecord, Refused
from epochal.logs import located
from epochal.protocol.admission import Position
from epochal.spark.checkpoint import Checkpoint, open_checkpoint
from epochal.storage import Store
from epochal.storage.hadoop import HadoopStore
from epochal.storage.local import LocalStore
from epochal.storage.objects import ObjectStore
from epochal.terms import EpochNumber


def _plan(root: Path, epoch: int, *sources: str) -> None:
    (root / "offsets").mkdir(parents=True, exist_ok=True)
    meta = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": epoch})
    (root / "offsets" / str(epoch)).write_text("\n".join(["v1", meta, *sources]))


def _entry(root: Path, name: str, files: dict[int, list[str]], source: int = 0) -> None:
    folder = root / "sources" / str(source)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"path": path, "timestamp": 1, "batchId": batch})
        for batch, paths in files.items()
        for path in paths
    ]
    (folder / name).write_text("\n".join(["v1", *lines]))


def test_a_folder_that_does_not_exist_yet_has_no_query_and_no_position(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path / "none")
    assert checkpoint.query_id is None
    assert checkpoint.position == Position()


def test_the_position_is_the_highest_number_and_passes_over_other_files(tmp_path: Path) -> None:
    (tmp_path / "commits").mkdir()
    for name in ("0", "9", "10", ".10.crc", "11.tmp", ".11.abc.tmp"):
        (tmp_path / "commits" / name).touch()
    _plan(tmp_path, 11, "5")
    (tmp_path / "metadata").write_text('{"id":"abc"}')
    checkpoint = open_checkpoint(f"file://{tmp_path}")
    assert checkpoint.position == Position(planned=EpochNumber(11), finished=EpochNumber(10))
    assert checkpoint.query_id == "abc"


def test_offsets_differ_by_source_lines_and_not_by_spark_s_own_metadata(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path)
    _plan(tmp_path, 0, '{"topic":{"0":5}}')
    first = checkpoint.offsets(EpochNumber(0))
    _plan(tmp_path, 1, '{"topic":{"0":5}}')
    assert checkpoint.offsets(EpochNumber(1)).digest == first.digest
    _plan(tmp_path, 0, '{"topic":{"0":6}}')
    assert checkpoint.offsets(EpochNumber(0)).digest != first.digest
    with pytest.raises(Refused, match="no offsets/7"):
        checkpoint.offsets(EpochNumber(7))


def test_offsets_of_a_file_source_are_its_files_wherever_compaction_put_them(
    tmp_path: Path,
) -> None:
    _plan(tmp_path, 0, '{"logOffset":8}')
    _plan(tmp_path, 1, '{"logOffset":10}')
    _entry(tmp_path, "9", {9: ["b", "a"]})
    _entry(tmp_path, "10", {10: ["c"]})
    plain = open_checkpoint(tmp_path).offsets(EpochNumber(1))
    assert "3 files" in plain.text
    (tmp_path / "sources" / "0" / "9").unlink()
    _entry(tmp_path, "9.compact", {8: ["old"], 9: ["a", "b"]})
    assert open_checkpoint(tmp_path).offsets(EpochNumber(1)) == plain
    for name in ("9.compact", "10"):
        (tmp_path / "sources" / "0" / name).unlink()
    _entry(tmp_path, "19.compact", {8: ["old"], 9: ["a", "b"], 10: ["c"], 11: ["new"]})
    assert open_checkpoint(tmp_path).offsets(EpochNumber(1)) == plain
    _entry(tmp_path, "19.compact", {9: ["a", "b"], 10: ["other"]})
    assert open_checkpoint(tmp_path).offsets(EpochNumber(1)).digest != plain.digest


class _Measured(LocalStore):
    """Counts the bytes that are read."""

    bytes_read = 0

    def read(self, key: str) -> bytes | None:
        content = super().read(key)
        self.bytes_read += len(content or b"")
        return content

    def read_range(self, key: str, start: int, end: int) -> bytes:
        content = super().read_range(key, start, end)
        self.bytes_read += len(content)
        return content


def test_an_epoch_reads_its_own_part_of_a_large_compaction_and_not_the_rest(
    tmp_path: Path,
) -> None:
    files = {
        batch: [f"file:///in/{batch:03d}/{at:05d}.json" for at in range(1000)]
        for batch in range(200)
    }
    _entry(tmp_path, "199.compact", files)
    size = (tmp_path / "sources" / "0" / "199.compact").stat().st_size
    _plan(tmp_path, 0, '{"logOffset":198}')
    _plan(tmp_path, 1, '{"logOffset":199}')
    store = _Measured(tmp_path)
    found = Checkpoint("x", store).offsets(EpochNumber(1))
    assert "1,000 files" in found.text
    assert store.bytes_read < size / 20
    _entry(tmp_path, "199", {199: files[199]})
    assert Checkpoint("x", store).offsets(EpochNumber(1)) == found
    assert Checkpoint("x", store).files(EpochNumber(1), EpochNumber(1)) == files[199]


@pytest.mark.parametrize("count", [1, 3000])
def test_an_epoch_that_fills_a_compaction_is_found_whole(tmp_path: Path, count: int) -> None:
    paths = [f"file:///in/{at:0200d}.json" for at in range(count)]
    _entry(tmp_path, "9.compact", {8: ["file:///in/before"], 9: paths})
    _plan(tmp_path, 0, '{"logOffset":8}')
    _plan(tmp_path, 1, '{"logOffset":9}')
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.files(EpochNumber(1), EpochNumber(1))) == paths
    whole = checkpoint.offsets(EpochNumber(1))
    _entry(tmp_path, "9", {9: paths})
    assert checkpoint.offsets(EpochNumber(1)) == whole


def test_one_location_has_one_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    forms = (tmp_path / "c", f"{tmp_path}/c/", f"file:{tmp_path}/c", f"file://{tmp_path}/c", "c")
    forms += ("x/../c", f"{tmp_path}/x/./../c", f"file:{tmp_path}/x/../c")
    forms += ("link", f"{tmp_path}/link/", f"file:{tmp_path}/link", f"file://localhost{tmp_path}/c")
    (tmp_path / "link").symlink_to("c")
    assert {located(form) for form in forms} == {str(tmp_path / "c")}
    urls = ("s3a://bucket/c/", "s3a://bucket//c", "s3a://bucket/x/../c", "S3A://bucket/./c")
    assert {located(url) for url in urls} == {"s3a://bucket/c"}
    assert located("hdfs:///c/") == located("hdfs:/c") == "hdfs:///c"


@pytest.mark.parametrize("kind", ["local", "objects", "hadoop"])
def test_every_store_reads_a_checkpoint_the_same(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for name in ("offsets/3", "offsets/.3.crc", "commits/2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"three")
    stores: dict[str, Callable[[], Store]] = {
        "local": lambda: LocalStore(tmp_path),
        "objects": lambda: ObjectStore(obstore.store.LocalStore(tmp_path), location="x"),
        "hadoop": lambda: HadoopStore(request.getfixturevalue("spark"), f"file://{tmp_path}"),
    }
    checkpoint = Checkpoint("x", stores[kind]())
    assert checkpoint.read("offsets/3") == b"three"
    assert checkpoint.read("offsets/4") is None
    assert checkpoint.position == Position(planned=EpochNumber(3), finished=EpochNumber(2))
    assert checkpoint.planned_at(EpochNumber(4)) is None
    planned_at = checkpoint.planned_at(EpochNumber(3))
    assert planned_at is not None
    assert abs(planned_at - time.time()) < 60


def test_a_torn_metadata_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "metadata").write_text('{"id"')
    with pytest.raises(CorruptRecord, match="metadata"):
        _ = open_checkpoint(tmp_path).query_id
