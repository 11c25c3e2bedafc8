"""Documentation agrees with the code: generated pages, links, options, commands, examples."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pyspark
import pytest
from console.conftest import FLAGS
from playwright.sync_api import sync_playwright
from pyspark import cloudpickle
from servers.programs import program

import architecture_pictures
import docs
import epochal
from epochal.cli import application
from epochal.config.pipeline import file_at
from epochal.protocol.machine import TABLE

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    str(page.relative_to(ROOT))
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
]
CLI = application()
_PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
_CODE = re.compile(r"```\w*\n.*?```|`[^`\n]+`", re.DOTALL)
_COMMAND = re.compile(
    r"(?<![\w./-])(?<!import )(?<!from )epochal (?:--debug )?"
    r"([a-z][a-z-]+)(?: ([a-z][a-z-]+))?([^`]*)"
)


def examples(page: str) -> list[str]:
    return _PYTHON.findall((ROOT / page).read_text())


def unknown_options(code: str) -> list[str]:
    """Keyword arguments of public names that they don't take."""
    return [
        f"ep.{call.func.attr}({keyword.arg}=)"
        for call in ast.walk(ast.parse(code))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "ep"
        for keyword in call.keywords
        if keyword.arg not in inspect.signature(getattr(epochal, call.func.attr)).parameters
    ]


def unknown_commands(text: str) -> list[str]:
    """Verbs and options of the command line that occur in code blocks and don't exist."""
    known = {" ".join(path): one for path, one in docs._commands(docs.get_command(CLI), ())}
    unknown = []
    for line in itertools.chain.from_iterable(code.splitlines() for code in _CODE.findall(text)):
        for verb, inner, rest in _COMMAND.findall(line):
            command = known.get(f"{verb} {inner}") or known.get(verb)
            if command is None and not any(name.startswith(f"{verb} ") for name in known):
                unknown.append(verb)
            elif command is not None:
                options = {name for one in command.params for name in one.opts}
                given = re.findall(r"(?<![\w-])--[a-z-]+", f"{inner} {rest}".partition("#")[0])
                unknown += [f"{verb} {name}" for name in given if name not in options]
    return unknown


def test_generated_pages_are_current():
    assert docs._stale() == []


def test_a_stale_page_is_noticed(monkeypatch):
    monkeypatch.setitem(docs.PAGES, "epoch.md", lambda: "something else")
    assert docs._stale() == ["docs/reference/epoch.md"]


def test_a_stale_table_of_packages_is_noticed(monkeypatch):
    monkeypatch.setitem(docs.PARTS, "layers", lambda: "something else")
    assert docs._stale() == ["CONTRIBUTING.md", "docs/internals/layers.md"]


def test_a_stale_picture_is_noticed(monkeypatch):
    monkeypatch.setattr(docs, "pictures", lambda: {"crash.svg": "something else"})
    assert docs._stale() == ["docs/images/crash.svg"]


def test_a_package_without_a_place_in_the_pictures_is_noticed():
    packages = [name for layer in docs._layers() for name, _ in layer]
    with pytest.raises(SystemExit, match="new_package/"):
        architecture_pictures.pictures([*packages, "new_package/"])


def test_every_phase_and_move_is_in_the_pictures():
    drawn = architecture_pictures.phases()
    for (phase, move), after in TABLE.items():
        assert all(f">{one.value}</text>" in drawn for one in (phase, move, after))
    assert drawn.count("marker-end") == len(TABLE)


def test_the_table_of_packages_has_every_package():
    entries = [one for one in (ROOT / "src" / "epochal").iterdir() if one.name[0] not in "_."]
    names = {f"{one.name}/" if one.is_dir() else one.name for one in entries} - {"py.typed"}
    assert set(re.findall(r"^\| `(.+?)`", docs.layers_table(), re.MULTILINE)) == names


def test_links_lead_somewhere():
    assert docs._dead_links() == []


def test_every_error_has_a_page():
    assert docs._undocumented_errors() == []


def test_an_error_without_its_page_is_noticed(tmp_path, monkeypatch):
    shutil.copytree(docs.TROUBLE, tmp_path / "trouble")
    (tmp_path / "trouble" / "fenced.md").write_text("# `fenced`\n\n`Fenced`, exit code 1.")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "TROUBLE", tmp_path / "trouble")
    assert [found.partition(":")[0] for found in docs._undocumented_errors()] == [
        "trouble/fenced.md"
    ]


@pytest.fixture(scope="module")
def site():
    """The built site."""
    assert docs._build_site() == 0
    return ROOT / "build" / "site"


def test_the_site_is_built_without_a_warning(site):
    assert (site / "reference" / "options.html").exists()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def search(site):
    """Types into the search field of the site, in a browser; returns the first page found."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    chromium = program("chromium", package="chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(chromium), args=FLAGS)
        page = browser.new_page()
        page.set_default_timeout(60_000)

        def search(words):
            page.goto(f"http://127.0.0.1:{server.server_port}/index.html?q={words}")
            found = page.locator(".md-search-result__item a.md-search-result__link").first
            found.wait_for(state="attached")
            return urlsplit(found.get_attribute("href")).path.strip("/")

        yield search
        browser.close()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("upgrade", "guides/upgrades.html"),
        ("stuck", "guides/runbook.html"),
        ("duplicate rows", "guides/runbook.html"),
        ("java", "guides/faq.html"),
        ("security", "concepts/security.html"),
        ("kafka timeout", "guides/kafka.html"),
        ("architecture", "concepts/architecture.html"),
        ("sizing", "guides/sizing.html"),
    ],
)
def test_a_search_finds_the_right_page_first(search, words, page):
    assert search(words) == page


def test_a_page_that_is_not_in_the_site_is_noticed(tmp_path, monkeypatch, capfd):
    settings = (ROOT / "mkdocs.yml").read_text().partition("nav:\n  -")[0]
    (tmp_path / "mkdocs.yml").write_text(f"{settings}nav:\n  - index.md\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# One\n")
    (tmp_path / "docs" / "lost.md").write_text("# Two\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    assert docs._build_site() != 0
    assert "lost.md" in capfd.readouterr().err


@pytest.mark.parametrize("page", PAGES)
def test_examples_use_existing_options(page):
    assert [name for code in examples(page) for name in unknown_options(code)] == []


def test_an_unknown_option_is_noticed():
    assert unknown_options("ep.Files('out', formatt='csv')") == ["ep.Files(formatt=)"]


@pytest.mark.parametrize("page", PAGES)
def test_documented_commands_exist(page):
    assert unknown_commands((ROOT / page).read_text()) == []


def test_a_command_that_does_not_exist_is_noticed():
    assert unknown_commands("`epochal give-up chk`") == ["give-up"]
    assert unknown_commands("`epochal recover jobs:p --force`") == ["recover --force"]


def test_the_file_of_the_yaml_guide_has_no_mistake(tmp_path):
    guide = (ROOT / "docs" / "guides" / "yaml.md").read_text()
    file = tmp_path / "orders.yaml"
    file.write_text(re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)[0])
    declared = file_at(file)
    assert [sink.name for sink in declared.sinks] == ["orders", "big"]


def test_importing_the_package_needs_neither_spark_nor_a_driver():
    drivers = ("pyspark", "py4j", "pandas", "psycopg", "pyarrow", "obstore", "typer")
    modules = subprocess.run(
        [sys.executable, "-c", "import sys, epochal; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert [name for name in drivers if name in modules] == []


@pytest.mark.parametrize("name", epochal.__all__)
def test_every_public_name_is_there(name):
    assert getattr(epochal, name) is not None


def test_a_name_that_is_not_public_is_refused_like_any_other():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = epochal.Nothing


def test_the_example_of_the_readme_runs(spark, tmp_path, monkeypatch):
    """As it is, but for the time that it takes."""
    monkeypatch.chdir(tmp_path)
    code = examples("README.md")[1].replace(
        'processingTime="10 seconds"', 'processingTime="0 seconds"'
    )
    known = {}
    exec(code.replace("query.awaitTermination()", ""), known)
    query, pipeline = known["query"], known["pipeline"]
    deadline_s = time.monotonic() + 240
    while sum(one.rows for one in pipeline.last_epochs()) < 100:
        assert query.exception() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    query.stop()
    pipeline.close()
    found = spark.read.parquet(str(tmp_path / "out" / "orders")).collect()
    assert sorted(row.id for row in found) == list(range(len(found)))
    big = [row.id for row in spark.read.json(str(tmp_path / "out" / "big")).collect()]
    assert sorted(big) == sorted(row.id for row in found if row.amount > 1000)
    assert big


class DeclarativePipelines:
    """Stands for Databricks: functions of sinks are pickled, and each flow has a checkpoint."""

    def __init__(self):
        self.sinks, self.flows = {}, []

    def foreach_batch_sink(self, *, name):
        def declare(function):
            self.sinks[name] = cloudpickle.dumps(function)

        return declare

    def append_flow(self, *, target):
        return lambda query: self.flows.append((target, query))

    def update(self, checkpoint):
        for target, query in self.flows:
            writer = query().writeStream.foreachBatch(cloudpickle.loads(self.sinks[target]))
            writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
            writer.start().awaitTermination()


def test_the_sink_of_a_declarative_pipeline_writes_once_and_a_full_refresh_is_said(
    spark, tmp_path, monkeypatch
):
    page = (ROOT / "docs" / "guides" / "spark-connect.md").read_text()
    (block,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    pipeline = epochal.Pipeline("orders", sinks=[epochal.Files(tmp_path / "out")])
    spark.range(100).write.option("path", str(tmp_path / "orders")).saveAsTable("orders")

    def update(code, checkpoint):
        platform = DeclarativePipelines()
        monkeypatch.setitem(sys.modules, "pyspark.pipelines", platform)
        monkeypatch.setattr(pyspark, "pipelines", platform, raising=False)
        known = {"pipeline": pipeline, "spark": spark, "FLOW_CHECKPOINT": checkpoint}
        exec(code, known)
        platform.update(checkpoint)
        return epochal.read_epochs(tmp_path / "out").count_rows()

    try:
        daily = block.replace(', run="2026-11-refresh"', "")
        assert update(daily, tmp_path / "flow") == 100
        spark.range(100, 150).write.insertInto("orders")
        assert update(daily, tmp_path / "flow") == 150
        with pytest.raises(epochal.Refused, match="run=") as refused:
            update(daily, tmp_path / "refreshed")
        assert "run=" in refused.value.hint
        assert update(block, tmp_path / "refreshed") == 300
    finally:
        spark.sql("DROP TABLE orders")


def test_the_example_of_the_session_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        exec(examples("docs/guides/session.md")[0], {})
    assert sorted(epochal.read_epochs("out/orders").to_table()["id"].to_pylist()) == [0, 1, 2, 3]


def test_the_quick_start_is_killed_and_counts_every_row_once(tmp_path):
    """As a newcomer does it: files copied from the page, a virtual environment not activated."""
    job, count, _ = examples("docs/guides/quick-start.md")[:3]
    until_killed = job.replace("awaitTermination(20)", "awaitTermination(600)")
    until_committed = job.replace(
        "query.awaitTermination(20)", "while not pipeline.metrics().commits: query.exception()"
    )
    (tmp_path / "killed.py").write_text(until_killed)
    (tmp_path / "again.py").write_text(until_committed)
    (tmp_path / "count_rows.py").write_text(count)
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "VIRTUAL_ENV"):
        environment.pop(name, None)

    def start(name: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, name],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    killed = start("killed.py")
    deadline_s = time.monotonic() + 240
    while not list((tmp_path / "out" / "even").glob("*.jsonl")):
        assert killed.poll() is None, killed.communicate()[1][-3000:]
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    again = start("again.py")
    _, errors = again.communicate(timeout=240)
    assert again.returncode == 0, errors[-3000:]
    counted, errors = start("count_rows.py").communicate(timeout=60)
    result = dict(line.rsplit(" ", 1) for line in counted.splitlines())
    assert int(result.pop("rows")) > 0, errors
    assert result == {"lost": "0", "twice": "0", "in one sink only": "0"}
