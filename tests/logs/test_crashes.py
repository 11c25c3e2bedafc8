"""Processes that race for slots, and processes that are killed while they write."""

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

from epochal.contract import EpochLog
from epochal.logs import open_log

PROCESSES = 4
SLOTS = 40
KILLS = 12

RACER = """
import json, os, sys
from epochal.logs import open_log
log = open_log(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
me = str(os.getpid()).encode()
wins = [slot for slot in range(int(sys.argv[2])) if log.put_if_absent(slot, me)]
print(json.dumps(wins))
"""

WRITER = """
import hashlib, os, sys
from epochal.logs import open_log
log = open_log(sys.argv[1])
number = max(log.numbers(), default=-1) + 1
print("ready", flush=True)
while True:
    body = os.urandom(int(sys.argv[2]))
    log.put_if_absent(number, hashlib.sha256(body).digest() + body)
    print(number, flush=True)
    number += 1
"""

STUMBLER = """
import hashlib, os, signal, sys
from epochal.logs import open_log
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
for name in ("fsync", "link", "mkdir", "unlink"):
    setattr(os, name, stumbling(getattr(os, name)))
log = open_log(sys.argv[1])
for number in range(2):
    body = os.urandom(1000)
    log.put_if_absent(number, hashlib.sha256(body).digest() + body)
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""

NOBODY = """
import os, sys
from epochal.logs import open_log
from epochal.errors import EpochalError
if os.getuid() == 0:
    os.setuid(65534)
log = open_log(sys.argv[1])
for call in (lambda: log.put_if_absent(1, b"x"), log.numbers, lambda: log.read(1)):
    try:
        print("done", call())
    except EpochalError as error:
        print(error.code, bool(error.hint), error.message)
"""


def judge_records(log: EpochLog, *, told: set[int]) -> None:
    """Every record is whole, and every put that returned is there."""
    for number in log.numbers():
        record = log.read(number)
        assert record is not None
        assert hashlib.sha256(record[32:]).digest() == record[:32], f"record {number} is torn"
    assert told <= set(log.numbers()), "a record that was reported is gone"


@pytest.fixture(params=["files", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"files": f"{tmp_path}/log", "sqlite": f"sqlite://{tmp_path}/log.db"}[request.param]


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


def _write_until_killed(url: str, after_s: float, size: int) -> set[int]:
    """Run a writer, kill it with SIGKILL, and return the numbers it reported before."""
    writer = _start(WRITER, url, size)
    time.sleep(after_s)
    writer.kill()
    told, _ = writer.communicate()
    return {int(line) for line in told.splitlines(keepends=True) if line.endswith("\n")}


def test_of_many_processes_that_race_for_slots_one_wins_each(url: str) -> None:
    racers = [_start(RACER, url, SLOTS) for _ in range(PROCESSES)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    wins = {str(racer.pid).encode(): json.loads(racer.communicate()[0]) for racer in racers}
    assert sorted(slot for slots in wins.values() for slot in slots) == list(range(SLOTS))
    log = open_log(url)
    assert all(log.read(slot) == racer for racer, slots in wins.items() for slot in slots)


def test_a_writer_killed_at_every_call_of_the_disk_leaves_only_whole_records(
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
        log = open_log(folder)
        judge_records(log, told=set(map(int, writer.stdout.split())))
        if writer.returncode == 0:
            break
        assert writer.returncode == -signal.SIGKILL, writer.stderr
        assert log.put_if_absent(2, b"next") is True
    assert call > 20, "too few calls were met: the kills proved nothing"


def test_a_writer_killed_at_any_moment_leaves_only_whole_records(url: str) -> None:
    chance = random.Random(3)
    told: set[int] = set()
    for _ in range(KILLS):
        told |= _write_until_killed(url, chance.uniform(0.0, 0.05), size=300_000)
        judge_records(open_log(url), told=told)
    log = open_log(url)
    assert told, "no put ever returned: the kills proved nothing"
    assert log.put_if_absent(max(log.numbers()) + 1, b"next") is True


def test_the_judge_of_records_objects_to_a_torn_record(tmp_path: Path) -> None:
    _write_until_killed(f"{tmp_path}/log", 0.05, size=1000)
    log = open_log(tmp_path / "log")
    judge_records(log, told=set())
    newest = tmp_path / "log" / f"{max(log.numbers()):020d}.json"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(AssertionError, match="is torn"):
        judge_records(log, told=set())


def test_the_judge_of_records_objects_to_a_lost_one(tmp_path: Path) -> None:
    told = _write_until_killed(f"{tmp_path}/log", 0.05, size=1000)
    log = open_log(tmp_path / "log")
    log.delete([max(told)])
    with pytest.raises(AssertionError, match="is gone"):
        judge_records(log, told=told)


@pytest.mark.parametrize("scheme", ["", "sqlite://"])
def test_a_place_without_permission_is_told_with_a_way_out(tmp_path: Path, scheme: str) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    place = f"{scheme}{closed}/log"
    open_log(place).put_if_absent(1, b"x")
    closed.chmod(0o000)
    try:
        told = subprocess.run(
            [sys.executable, "-c", NOBODY, place],
            check=True,
            capture_output=True,
            text=True,
            cwd="/",
            env=os.environ,
        ).stdout.splitlines()
    finally:
        closed.chmod(0o700)
    assert len(told) == 3
    assert all(line.startswith("misconfigured True cannot") for line in told), told
