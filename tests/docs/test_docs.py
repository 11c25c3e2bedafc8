"""What is written for people is true."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import docs
import epochal

ROOT = Path(__file__).parent.parent.parent
_PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def examples(page: str) -> list[str]:
    return _PYTHON.findall((ROOT / page).read_text())


def test_generated_pages_are_as_the_code_makes_them():
    assert docs._stale() == []


def test_a_stale_page_is_noticed(monkeypatch):
    monkeypatch.setitem(docs.PAGES, "epoch.md", lambda: "something else")
    assert docs._stale() == ["epoch.md"]


def test_links_lead_somewhere():
    assert docs._dead_links() == []


def test_importing_the_package_needs_neither_spark_nor_a_driver():
    drivers = ("pyspark", "py4j", "pandas", "psycopg", "pyarrow", "obstore", "typer")
    told = subprocess.run(
        [sys.executable, "-c", "import sys, epochal; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert [name for name in drivers if name in told] == []


@pytest.mark.parametrize("name", epochal.__all__)
def test_every_public_name_is_there(name):
    assert getattr(epochal, name) is not None


def test_a_name_that_is_not_public_is_refused_like_any_other():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = epochal.Nothing


def test_the_example_of_the_readme_runs(spark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    spark.range(100).selectExpr("id", "id * 20D AS amount").write.parquet(str(source))
    orders = spark.readStream.schema("id BIGINT, amount DOUBLE").parquet(str(source))
    code = examples("README.md")[1].replace('processingTime="10 seconds"', "availableNow=True")
    known = {"orders": orders}
    exec(code, known)
    known["query"].awaitTermination()
    assert spark.read.parquet(str(tmp_path / "out" / "orders")).count() == 100
    assert spark.read.json(str(tmp_path / "out" / "big")).count() == 49


def test_the_example_of_the_session_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        exec(examples("docs/guides/session.md")[0], {})
    assert sorted(epochal.read_epochs("out").to_table()["id"].to_pylist()) == [0, 1, 2, 3]


def test_the_quick_start_runs(spark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = examples("docs/guides/quick-start.md")[0]
    known = {"wait_for_rows": wait_for_rows}
    exec(code.replace("query.awaitTermination(20)", "wait_for_rows(pipeline)"), known)
    every, even = (epochal.read_epochs(f"out/{name}").to_table() for name in ("all", "even"))
    assert every.num_rows > 0
    assert sorted(even["value"].to_pylist()) == sorted(
        value for value in every["value"].to_pylist() if value % 2 == 0
    )


def wait_for_rows(pipeline: epochal.Pipeline) -> None:
    deadline_s = time.monotonic() + 60
    while pipeline.metrics().rows == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
