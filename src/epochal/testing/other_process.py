"""
`OtherProcess`: a process of its own that does a job with a sink. What it prints is the result.

Jobs are forked from a process that has loaded everything and opened nothing, which is started once:
a fork costs milliseconds, a new Python a second.

    tests  ──  job, standard streams  ──▶  python -m epochal.testing.other_process
                                               fork  ──▶  job
"""

from __future__ import annotations

import atexit
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from epochal.contract import Sink, Task
from epochal.session import Session
from epochal.terms import EpochNumber, Identity, Limits, Receipt

if TYPE_CHECKING:
    import pyarrow as pa

READY = b"ready"
_WAIT_S = 120.0
_JOB_S_MAX = 600
_MESSAGE_BYTES_MAX = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Job:
    verb: str
    sink: Sink
    identity: Identity
    limits: Limits
    epoch: EpochNumber = EpochNumber(0)
    receipts: tuple[Receipt, ...] = ()
    task: Task | None = None
    unfinished: Task | None = None
    batches: Sequence[pa.RecordBatch] = ()
    log: str = ""
    """Where the epoch log of a session is."""


def commit(job: Job) -> bytes:
    committer = job.sink.committer(job.identity, job.limits)
    committer.commit(job.epoch, job.receipts)
    committer.close()
    return b""


def prepare(job: Job) -> bytes:
    return pickle.dumps(_prepared(job))


def prepare_and_wait(job: Job) -> bytes:
    """Prepare one attempt, write half of another, and wait to be killed."""
    _prepared(job)
    if job.unfinished is not None:
        writer = job.sink.writer(job.unfinished)
        for batch in job.batches:
            writer.write(batch)
    _say(READY)
    time.sleep(_WAIT_S)
    return b""


def measure_memory(job: Job) -> bytes:
    """Write every batch twice; the most memory after each round, in kibibytes."""
    writer = job.sink.writer(_task(job))
    peaks = []
    for _ in range(2):
        for batch in job.batches:
            writer.write(batch)
        peaks.append(str(_peak_kib()))
    writer.abort()
    return " ".join(peaks).encode()


def _peak_kib() -> int:
    # On Linux getrusage starts with what the parent process used, so it is asked elsewhere only.
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if sys.platform == "darwin" else peak


def run_sessions(job: Job) -> bytes:
    """
    Run a session per line of standard input: `GOAL` or `GOAL DELAY`.

    Each writes epochs up to GOAL. With a DELAY it is killed so many seconds after it began to
    commit. The reply is the seconds that the last commit took, or `killed`.
    """
    for line in sys.stdin:
        goal, _, delay = line.strip().partition(" ")
        _say(_forked_session(job, int(goal), float(delay) if delay else None).encode())
    return b""


def _forked_session(job: Job, goal: int, delay_s: float | None) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _end_with(lambda: _session(job, goal, lambda text: os.write(writer, text.encode())))
    os.close(writer)
    with os.fdopen(reader) as replies:
        replies.readline()
        if delay_s is not None:
            time.sleep(delay_s)
            os.kill(child, signal.SIGKILL)
        took, *loaded = replies.read().split() or ("",)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "killed"
    _load(loaded)
    return took or "0" if status == 0 else "failed"


def _session(job: Job, goal: int, say: Callable[[str], object]) -> None:
    schema = job.batches[0].schema
    took_s = 0.0
    with Session(
        job.identity.pipeline, sinks=[job.sink], log=job.log, schema=schema, limits=job.limits
    ) as session:
        while session.next_epoch < goal:
            epoch = session.next_epoch
            session.begin(epoch)
            session.write(job.batches[epoch])
            say("committing\n" if epoch == goal - 1 else "")
            began = time.monotonic()
            session.commit()
            took_s = time.monotonic() - began
    say(" ".join([str(took_s), *sys.modules]))


def _load(modules: Sequence[str]) -> None:
    """Import what a session had imported in the end: the next ones are forked with it."""
    for name in modules:
        if name not in sys.modules:
            # Some names are of no file: an import made them up.
            with suppress(ImportError):
                import_module(name)


def _end_with(work: Callable[[], None]) -> None:
    """A forked child runs no handler of the process that it is a copy of."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001  printed, and the exit code says so
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _prepared(job: Job) -> Receipt:
    writer = job.sink.writer(_task(job))
    for batch in job.batches:
        writer.write(batch)
    return writer.prepare()


def _task(job: Job) -> Task:
    if job.task is None:
        raise ValueError(f"{job.verb} needs a task")
    return job.task


def _say(text: bytes) -> None:
    sys.stdout.buffer.write(text + b"\n")
    sys.stdout.buffer.flush()


VERBS: dict[str, Callable[[Job], bytes]] = {
    function.__name__: function
    for function in (commit, prepare, prepare_and_wait, measure_memory, run_sessions)
}


# The process that forks


def serve(requests: socket.socket) -> None:
    """Each request is the file of a job with its three streams, or a process to wait for."""
    while True:
        request, streams, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES_MAX, 3)
        if not request:
            return
        path, pid = pickle.loads(request)  # noqa: S301  our own process wrote it
        answer = _forked_job(path, streams) if streams else _waited_for(path, pid)
        requests.send(str(answer).encode())


def _forked_job(path: Path, streams: Sequence[int]) -> int:
    child = os.fork()
    if child == 0:
        _end_with(lambda: _run(path, streams))
    for stream in streams:
        os.close(stream)
    return child


def _waited_for(path: Path, pid: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        _load(_modules_of(path).read_text(encoding="utf-8").split())
    return code


def _run(path: Path, streams: Sequence[int]) -> None:
    signal.alarm(_JOB_S_MAX)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    with path.open("rb") as file:
        folder, paths, environment = pickle.load(file)  # noqa: S301  our own process wrote it
        os.chdir(folder)
        sys.path[:] = paths
        os.environ.clear()
        os.environ.update(environment)
        job: Job = pickle.load(file)  # noqa: S301  our own process wrote it
    sys.stdout.buffer.write(VERBS[job.verb](job))
    sys.stdout.buffer.flush()
    _modules_of(path).write_text(" ".join(sys.modules), encoding="utf-8")


def _modules_of(path: Path) -> Path:
    return path.with_suffix(".modules")


# The process that asks it to


class OtherProcess:
    """A process that does a job. What this one can import, it can, too."""

    def __init__(self, job: Job) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="epochal-job-")
        self._path = Path(self._folder.name) / "job"
        with self._path.open("wb") as file:
            pickle.dump((Path.cwd(), sys.path, dict(os.environ)), file)
            pickle.dump(job, file)
        its_in, in_ = os.pipe()
        out, its_out = os.pipe()
        errors, its_errors = os.pipe()
        self._in, self._out = os.fdopen(in_, "wb"), os.fdopen(out, "rb")
        self._errors = os.fdopen(errors, "rb")
        self._pid = self._asked(0, [its_in, its_out, its_errors])
        for stream in (its_in, its_out, its_errors):
            os.close(stream)

    def __enter__(self) -> OtherProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            self.kill()
            self._wait()
        for stream in (self._in, self._out, self._errors):
            stream.close()
        self._folder.cleanup()

    def ask(self, line: str) -> str:
        self._in.write(line.encode() + b"\n")
        self._in.flush()
        return self.reply()

    def reply(self) -> str:
        return self._out.readline().decode().strip()

    def end(self) -> bytes:
        """All that it printed, once it is over."""
        out = self._out.read()
        errors = self.errors()
        code = self._wait()
        if code != 0:
            raise AssertionError(f"the other process failed with {code}: {errors}")
        return out

    def errors(self) -> str:
        """The end of its standard error, once it is over."""
        self._in.close()
        return self._errors.read().decode()[-2000:]

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def _wait(self) -> int:
        pid, self._pid = self._pid, 0
        return self._asked(pid, [])

    def _asked(self, pid: int, streams: Sequence[int]) -> int:
        requests = _forking_process()
        socket.send_fds(requests, [pickle.dumps((self._path, pid))], streams)
        return int(requests.recv(_MESSAGE_BYTES_MAX))


@lru_cache(maxsize=1)
def _forking_process() -> socket.socket:
    here, there = socket.socketpair()
    with there:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(there.fileno())], pass_fds=[there.fileno()]
        )

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


if __name__ == "__main__":
    # Imported by its name, so that a pickled job finds the same class.
    from epochal.testing import other_process  # noqa: PLW0406

    other_process.serve(socket.socket(fileno=int(sys.argv[1])))
