"""What all servers of the tests are: a process over a folder, that can be killed and started again.

A server that can't be had fails the tests that ask for it, with the reason: a skipped proof is
none.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

_LOOK_EVERY_S = 0.02
_STOP_WITHIN_S = 20.0
_PAUSED_WITHIN_S = 60.0
_PAUSE_LOOK_S = 0.002
_TAIL_CHARS = 4000


class NoServer(RuntimeError):
    """Why there is no server to prove anything on."""


def as_nobody() -> Mapping[str, Any]:
    """For servers that refuse to run as root: then they run as nobody."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def default_sigint() -> None:
    """
    Reset SIGINT in a child that is to be interrupted (`preexec_fn`). A child inherits ignored
    signals, and a shell ignores SIGINT in the background jobs of a script, of which this test run
    may be one.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def pause_process(pid: int) -> None:
    """
    Stop a process and return when all its threads are stopped. The signal alone is not enough:
    `kill` returns before that, and the process may still answer.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _PAUSED_WITHIN_S
    while not _is_paused(pid):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(_PAUSE_LOOK_S)


def await_paused(process: subprocess.Popen[Any], within_s: float) -> bool:
    """True when the process has been stopped; False if it ends before."""
    deadline = time.monotonic() + within_s
    while process.poll() is None:
        if _is_paused(process.pid):
            return True
        assert time.monotonic() < deadline, f"process {process.pid} neither stops nor ends"
        time.sleep(_LOOK_EVERY_S)
    return False


def _is_paused(pid: int) -> bool:
    return all(_has_state(stat, "TZX") for stat in Path(f"/proc/{pid}/task").glob("*/stat"))


def await_ended(pids: Iterable[int]) -> None:
    """Returns when none of them runs any more; a zombie holds nothing."""
    deadline = time.monotonic() + _PAUSED_WITHIN_S
    for pid in pids:
        while not _has_state(Path(f"/proc/{pid}/stat"), "ZX"):
            assert time.monotonic() < deadline, f"process {pid} does not end"
            time.sleep(_PAUSE_LOOK_S)


def _has_state(stat: Path, states: str) -> bool:
    """By the state behind the name, which is in parentheses and may hold spaces."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in states
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return True


class ServerProcess(ABC):
    """`kill` and `start` may follow each other any number of times."""

    title: str
    ready_within_s = 60.0
    process_options: Mapping[str, Any] = MappingProxyType({})
    """Of the process: whose it is, its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _command(self) -> Sequence[str | Path]: ...

    @abstractmethod
    def _is_ready(self) -> bool: ...

    def start(self) -> None:
        """Returns when it can be used."""
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdout=log, stderr=log, cwd=self.folder, **self.process_options
            )

    def await_ready(self) -> None:
        deadline = time.monotonic() + self.ready_within_s
        while not self._is_ready():
            is_over = self._process is None or self._process.poll() is not None
            if is_over or time.monotonic() > deadline:
                self.kill()
                said = self._log.read_text(errors="replace")[-_TAIL_CHARS:]
                raise NoServer(f"{self.title} did not start:\n{said}")
            time.sleep(_LOOK_EVERY_S)

    def pause(self) -> None:
        """Stop the process: its connections stay open, and nothing is answered."""
        if self._process is not None and self._process.poll() is None:
            pause_process(self._process.pid)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """As when the machine dies."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self, by: signal.Signals = signal.SIGTERM) -> None:
        self._signal(by)
        if self._process is not None:
            try:
                self._process.wait(timeout=_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
