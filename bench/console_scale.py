"""
[console_scale] Seconds a page of the console takes, at 1,000 pipelines and 1,000,000 epochs.

Logs and history are made in their own formats, one pipeline with all the epochs among a thousand
that a session made; the console is a process of its own, and pages come through HTTP.
"""

from __future__ import annotations

import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from bench.harness import Comparison, say, stopwatch
from epochal.coordinator.journal import newest_record
from epochal.logs import open_log, record_name
from epochal.protocol.records import encode
from epochal.session import Session
from epochal.sinks.memory import Memory
from epochal.storage import open_store
from epochal.telemetry.history import History, epoch_line, header, segment_name
from epochal.terms import EpochNumber, Generation

PIPELINES = 1000
EPOCHS = 1_000_000
SEGMENT_EPOCHS = 500
ROUNDS = 7
TARGET_S = 1.0
_STARTS_WITHIN_S = 120.0
_LONG = "long"


def run() -> Comparison:
    comparison = Comparison(
        name="console_scale",
        peer_name=f"the target: any page within {TARGET_S:g} s",
        unit="s, the slowest page",
        is_rate=False,
    )
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _make(root)
        with _console(root) as url:
            pages = _pages(url, root)
            seconds = {page: [_seconds(url + path) for _ in range(ROUNDS)] for page, path in pages}
    for page, taken in seconds.items():
        say(f"console_scale: {page}: median {statistics.median(taken):.3f} s, max {max(taken):.3f}")
    comparison.ours = [max(taken) for taken in zip(*seconds.values(), strict=True)]
    comparison.peer = [TARGET_S] * ROUNDS
    comparison.beside = {
        page.replace(" ", "_") + "_p50_s": round(statistics.median(taken), 4)
        for page, taken in seconds.items()
    }
    return comparison


def _make(root: Path) -> None:
    made = root / "made"
    schema = pa.schema([("id", pa.int64())])
    with Session("bench", sinks=[Memory()], log=made, schema=schema) as session:
        for epoch in range(3):
            session.begin(epoch)
            session.write(pa.record_batch([[1]], schema=schema))
            session.commit()
    newest = newest_record(open_log(made))
    assert newest is not None
    name, record = record_name(newest.number), newest.record
    for number in range(PIPELINES):
        pipeline = f"pipeline-{number:03d}" if number else _LONG
        log = root / pipeline / "log"
        shutil.copytree(made, log)
        state = replace(record.state, pipeline=pipeline, location=str(log))
        (log / name).write_bytes(encode(replace(record, state=state)))
    (sample,) = History(store=open_store(made / "history")).page(limit=1).epochs
    _make_history(root / _LONG / "log" / "history", epoch_line(sample), sample.epoch)
    shutil.rmtree(made)


def _make_history(folder: Path, line: bytes, epoch: int) -> None:
    """Lines as the driver writes them, but for the number of their epoch."""
    for segment in folder.glob("*.jsonl"):
        segment.unlink()
    start = b'{"epoch":%d,' % epoch
    assert line.startswith(start)
    rest, generation = line.removeprefix(start), Generation(1)
    head = header(uid="a" * 12, pipeline=_LONG, generation=generation, driver="bench")
    for part, first in enumerate(range(0, EPOCHS, SEGMENT_EPOCHS)):
        lines = [b'{"epoch":%d,' % one + rest for one in range(first, first + SEGMENT_EPOCHS)]
        name = segment_name(EpochNumber(first), generation, part)
        (folder / name).write_bytes(head + b"".join(lines))


@contextmanager
def _console(root: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "epochal.cli", "console", "--checkpoints", str(root)]
    console = subprocess.Popen([*command, "--port", str(port)])
    try:
        with stopwatch() as seconds:
            while not _answers(f"http://127.0.0.1:{port}/health"):
                assert console.poll() is None
                assert seconds() < _STARTS_WITHIN_S
                time.sleep(0.05)
            say(f"console_scale: the console answers after {seconds():.1f} s")
        yield f"http://127.0.0.1:{port}"
    finally:
        console.terminate()
        console.wait()


def _answers(url: str) -> bool:
    try:
        return bool(_get(url))
    except urllib.error.URLError:
        return False


def _pages(url: str, root: Path) -> list[tuple[str, str]]:
    """Each page with the address that it has in this console."""
    found = re.search(r'href="(/pipelines/[0-9a-f]+)"', _get(f"{url}/?q={_LONG}"))
    assert found is not None
    one = found[1]
    segments = History(store=open_store(root / _LONG / "log" / "history")).segments()
    middle, last = f"{segments[len(segments) // 2]}:250", f"{segments[0]}:30"
    return [
        ("overview", "/"),
        ("overview searched", "/?q=pipeline-99"),
        ("overview last page", f"/?page={-(-PIPELINES // 50)}"),
        ("pipeline", one),
        ("epochs first", f"{one}/epochs"),
        ("epochs middle", f"{one}/epochs?cursor={middle}"),
        ("epochs last", f"{one}/epochs?cursor={last}"),
        ("epochs one outcome", f"{one}/epochs?outcome=aborted"),
        ("epoch", f"{one}/epochs/{EPOCHS // 2}"),
        ("api status", "/api/status"),
    ]


def _seconds(url: str) -> float:
    with stopwatch() as seconds:
        _get(url)
        return seconds()


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_STARTS_WITHIN_S) as answer:  # noqa: S310  our own
        return bytes(answer.read()).decode()


RUNS = {"console_scale": run}
