"""What the footers of earlier jobs say about the next one, and the log of a job about its files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from epochal.contract import EngineWritten
from epochal.kit.engine_files import Dictionaries, listed_sizes
from epochal.terms import NO_ROWS, Identity, SinkName, Uid

ROWS = pa.table({"distinct": range(20_000), "few": [n % 9 for n in range(20_000)]})
OFF = {"parquet.enable.dictionary#distinct": "false"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.parquet"


def test_columns_without_a_dictionary_get_none_until_all_are_tried_again(path: Path) -> None:
    dictionaries = Dictionaries()
    assert dictionaries.options() == {}
    pq.write_table(ROWS, path, use_dictionary=["few"])
    assert dictionaries.footer(path)[1] == 20_000
    found = [dictionaries.options() for _ in range(49)]
    assert found == [OFF] * 48 + [{}]
    assert dictionaries.options() == {}


def test_a_dictionary_in_one_file_is_enough_to_begin_others(path: Path) -> None:
    dictionaries = Dictionaries()
    for columns in (["few"], ["few", "distinct"]):
        pq.write_table(ROWS, path, use_dictionary=columns)
        dictionaries.footer(path)
    assert dictionaries.options() == {}


def test_few_rows_say_nothing(path: Path) -> None:
    dictionaries = Dictionaries()
    pq.write_table(ROWS.slice(1), path, use_dictionary=["few"])
    dictionaries.footer(path)
    assert dictionaries.options() == {}


def test_files_of_a_job_are_found_below_any_key(path: Path) -> None:
    identity = Identity(pipeline="p", uid=Uid("abcdefgh2345"), sink=SinkName("s"), generation=1)
    written = EngineWritten(
        handle=identity.job_handle(0, 1),
        schema=ROWS.schema,
        fingerprint=NO_ROWS,
        reports=['{"path": "s3a://lake/a%23b%3Fc/%25d/job/p=x%252Fy/part-0.parquet", "size": 7}'],
    )
    found = listed_sizes(written, "s3a://lake/a#b?c/%d/job")
    assert found == {"p=x%2Fy/part-0.parquet": 7}
