"""Processes that race for keys, and processes that are killed while they write."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from epochal.storage import Store, open_store

ELSEWHERE = ["local", "objects-s3", "sqlite", "postgres", "etcd"]
PROCESSES = 4
KEYS = 40
KILLS = 12

RACER = """
import json, os, sys
from epochal.storage import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
me = str(os.getpid()).encode()
keys = [f"f/{number:04d}" for number in range(int(sys.argv[2]))]
wins = {key: store.put_if_absent(key, me) for key in keys}
read = {key: store.read(key).decode() for key in keys}
print(json.dumps([wins, read]))
"""

WRITER = """
import hashlib, os, sys
from epochal.storage import open_store
store = open_store(sys.argv[1])
number = int(max(store.names(), default=-1)) + 1
print("ready", flush=True)
while True:
    body = os.urandom(int(sys.argv[2]))
    store.put_if_absent(f"{number:08d}", hashlib.sha256(body).digest() + body)
    store.put("replaced/always", hashlib.sha256(body).digest() + body)
    print(f"{number:08d}", flush=True)
    number += 1
"""

STUMBLER = """
import hashlib, os, signal, sys
from epochal.storage import open_store
left = int(sys.argv[2])
def step():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
def stumbling(call):
    def run(*arguments, **named):
        step()
        result = call(*arguments, **named)
        step()
        return result
    return run
def write_half(descriptor, data, write=os.write):
    step()
    return write(descriptor, data[: max(1, len(data) // 2)])
os.write = write_half
for name in ("fsync", "link", "mkdir", "replace", "unlink"):
    setattr(os, name, stumbling(getattr(os, name)))
store = open_store(sys.argv[1])
for key in ("0", "1"):
    body = os.urandom(1000)
    store.put_if_absent(key, hashlib.sha256(body).digest() + body)
    store.put("replaced/always", hashlib.sha256(body).digest() + body)
    sys.stdout.write(f"{key}\\n")
    sys.stdout.flush()
"""

NOBODY = """
import os, sys
from epochal.storage import open_store
from epochal.errors import EpochalError
store = open_store(sys.argv[1])
if os.getuid() == 0:
    os.setuid(65534)
for call in (
    lambda: store.put_if_absent("k", b"x"),
    lambda: store.put("k", b"x"),
    store.names,
    lambda: store.read("k"),
    lambda: store.delete(["k"]),
):
    try:
        print("done", call())
    except EpochalError as error:
        print(error.code, bool(error.hint), error.message)
"""


def judge_contents(store: Store, *, reported: set[str]) -> None:
    """Every content is whole, and every put that returned is there."""
    for key in (*store.names(), *(f"replaced/{name}" for name in store.names("replaced"))):
        content = store.read(key)
        assert content is not None
        assert hashlib.sha256(content[32:]).digest() == content[:32], f"{key} is torn"
    assert reported <= set(store.names()), "a key that was reported is gone"


def _start(script: str, *arguments: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _write_until_killed(url: str, after_s: float, size: int, *, reports: bool) -> set[str]:
    """
    Run a writer, kill it with SIGKILL, and return the keys it reported before. `reports`: not
    before it has reported one.
    """
    writer = _start(WRITER, url, size)
    assert writer.stdout is not None
    first = writer.stdout.readline() if reports else ""
    time.sleep(after_s)
    writer.kill()
    reported, _ = writer.communicate()
    lines = (first + reported).splitlines(keepends=True)
    return {line.strip() for line in lines if line.endswith("\n")}


@pytest.mark.parametrize("kind", ELSEWHERE, indirect=True)
def test_of_many_processes_that_race_for_keys_one_wins_each_and_all_read_its_content(
    url: str,
) -> None:
    racers = [_start(RACER, url, KEYS) for _ in range(PROCESSES)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    answers = {str(racer.pid): json.loads(racer.communicate()[0]) for racer in racers}
    keys = [f"f/{number:04d}" for number in range(KEYS)]
    winners = {key: [pid for pid, (wins, _) in answers.items() if wins[key]] for key in keys}
    assert all(len(won) == 1 for won in winners.values()), winners
    for _, read in answers.values():
        assert read == {key: won[0] for key, won in winners.items()}


def test_a_writer_killed_at_every_call_of_the_disk_leaves_only_whole_contents(
    tmp_path: Path,
) -> None:
    for call in itertools.count(1):
        folder = tmp_path / str(call)
        writer = subprocess.run(
            [sys.executable, "-c", STUMBLER, str(folder), str(call)],
            check=False,
            capture_output=True,
            text=True,
        )
        store = open_store(folder)
        judge_contents(store, reported=set(writer.stdout.split()))
        if writer.returncode == 0:
            break
        assert writer.returncode == -signal.SIGKILL, writer.stderr
        assert store.put_if_absent("2", b"next") is True
    assert call > 20, "too few calls were met: the kills proved nothing"


@pytest.mark.parametrize("kind", ["local", "sqlite", "postgres", "etcd"], indirect=True)
def test_a_writer_killed_at_any_moment_leaves_only_whole_contents(url: str) -> None:
    chance = random.Random(3)
    reported: set[str] = set()
    store = open_store(url)
    for number in range(KILLS):
        reported |= _write_until_killed(
            url, chance.uniform(0.0, 0.05), size=300_000, reports=bool(number % 2)
        )
        judge_contents(store, reported=reported)
    assert len(reported) >= KILLS // 2, "too few puts returned: the kills proved nothing"
    assert store.put_if_absent("next", b"next") is True
    store.close()


def test_the_judge_of_contents_objects_to_a_torn_one(tmp_path: Path) -> None:
    _write_until_killed(f"{tmp_path}/log", 0.05, size=1000, reports=True)
    store = open_store(tmp_path / "log")
    judge_contents(store, reported=set())
    newest = tmp_path / "log" / max(store.names())
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(AssertionError, match="is torn"):
        judge_contents(store, reported=set())


def test_the_judge_of_contents_objects_to_a_lost_one(tmp_path: Path) -> None:
    reported = _write_until_killed(f"{tmp_path}/log", 0.05, size=1000, reports=True)
    store = open_store(tmp_path / "log")
    store.delete([max(reported)])
    with pytest.raises(AssertionError, match="is gone"):
        judge_contents(store, reported=reported)


@pytest.mark.parametrize("scheme", ["", "sqlite://"])
def test_a_location_without_permission_is_reported_with_a_hint(tmp_path: Path, scheme: str) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    url = f"{scheme}{closed}/log"
    open_store(url).put_if_absent("k", b"x")
    closed.chmod(0o000)
    try:
        reported = subprocess.run(
            [sys.executable, "-c", NOBODY, url],
            check=True,
            capture_output=True,
            text=True,
            cwd="/",
            env=os.environ,
        ).stdout.splitlines()
    finally:
        closed.chmod(0o700)
    assert len(reported) == 5
    assert all(line.startswith("misconfigured True cannot") for line in reported), reported
