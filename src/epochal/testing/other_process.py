"""
Work that another process does with a sink: `python -m epochal.testing.other_process JOB`.

A job is a pickled file. What the process prints is the result. Jobs that are killed are forked from
a process that has loaded everything and opened nothing: a fork costs milliseconds, a new Python a
second.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
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


def run(path: str) -> bytes:
    job: Job = pickle.loads(Path(path).read_bytes())  # noqa: S301  our own process wrote it
    return VERBS[job.verb](job)


if __name__ == "__main__":
    # Imported by its name, so that a pickled job finds the same class.
    from epochal.testing import other_process  # noqa: PLW0406

    sys.stdout.buffer.write(other_process.run(sys.argv[1]))
