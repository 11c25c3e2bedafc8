"""`broker`: an embedded broker in its own process, for the length of a `with` block."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from epochal.errors import EpochalError, Misconfigured

_STOP_WITHIN_S = 60.0


class BrokerProcess:
    """A broker process with its own folder. Its port stays the same over restarts."""

    PROGRAM: Sequence[str] = ("-m", "epochal.broker")

    def __init__(self, data_dir: str | Path, *, port: int = 0, **options: Any) -> None:
        """`options` are those of `serve`; `settings` is a mapping of settings that differ."""
        self._options = {"data_dir": str(data_dir), "port": port, **options}
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        return -1 if self._process is None else self._process.pid

    def start(self) -> str:
        """Returns the address once the broker can be used."""
        self._process = subprocess.Popen(
            [sys.executable, *self.PROGRAM],
            stdin=subprocess.PIPE,  # the broker stops when this pipe is closed
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        # Not as an argument, which every user of the machine can list: passwords are among them.
        given, out = self._process.stdin, self._process.stdout
        if given is not None:
            with suppress(BrokenPipeError):
                given.write(json.dumps(self._options) + "\n")
                given.flush()
        self.address = "" if out is None else out.readline().strip()
        if not self.address:
            code = self._process.wait()
            _close_pipes(self._process)
            self._process = None
            raise Misconfigured(
                f"the broker did not start (exit code {code})", "its own message on stderr says why"
            )
        self._options["port"] = int(self.address.rpartition(":")[2])
        return self.address

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash does."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise EpochalError(f"the broker did not stop within {_STOP_WITHIN_S} s") from None
        finally:
            _close_pipes(process)


def _close_pipes(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


@contextmanager
def broker(
    data_dir: str | Path | None = None, *, port: int = 0, fsync: bool = False, **options: Any
) -> Iterator[str]:
    """
    The address of a broker that lives as long as the block: `with broker() as bootstrap: …`.

    For tests and demos: it does not sync unless `fsync` says so. Without `data_dir` its data is
    removed afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="epochal-broker-") as temporary:
        process = BrokerProcess(data_dir or temporary, port=port, fsync=fsync, **options)
        try:
            yield process.start()
        finally:
            process.stop()
