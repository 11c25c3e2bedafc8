"""A program that does one verb of a sink as another user: `python other_user.py <uid> <gid>`."""

from __future__ import annotations

import os
import pickle
import sys

import pyarrow.parquet as pq

import epochal.sinks.files.committer
import epochal.sinks.files.local
import epochal.sinks.files.spark_log
import epochal.sinks.files.writer  # noqa: F401  what is loaded late can't be read any more
from epochal.contract import Limits, prepare_rows
from epochal.errors import EpochalError


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
