"""
Another user of the machine, who does one verb of a sink in a process of its own.

This is the program, too: `python other_user.py <uid> <gid>`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import pyarrow.parquet as pq

import epochal.kit.spool.committer
import epochal.sinks.callback.sink
import epochal.sinks.files.committer
import epochal.sinks.files.local
import epochal.sinks.files.spark_log
import epochal.sinks.files.writer  # noqa: F401  what is loaded late can't be read any more
from epochal.contract import Limits, prepare_rows
from epochal.errors import EpochalError


def as_user(uid: int, gid: int, verb: str, sink: Any, *given: Any) -> Any:
    """What the verb returns, or the error of ours that it raises."""
    done = subprocess.run(
        [sys.executable, __file__, str(uid), str(gid)],
        input=pickle.dumps((verb, sink, given)),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


def main(uid: int, gid: int) -> None:
    verb, sink, given = pickle.load(sys.stdin.buffer)
    pq.ParquetWriter  # noqa: B018  loaded before the user changes
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    os.umask(0o022)
    try:
        answer = VERBS[verb](sink, *given)
    except EpochalError as error:
        answer = error
    sys.stdout.buffer.write(pickle.dumps(answer))


def prepare(sink, task, rows):
    return prepare_rows(sink, task, rows.to_batches())


def ask(sink, identity, verb, *given):
    return getattr(sink.committer(identity, Limits()), verb)(*given)


VERBS = {"prepare": prepare, "ask": ask}

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
