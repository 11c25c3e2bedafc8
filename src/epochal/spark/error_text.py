"""
Errors as text: the only form in which they cross between tasks, the driver and Spark.

From a task to the driver goes the text of a traceback, in which one line is ours
(`EpochalError.to_line`). From the driver's callback to Spark goes the formatted traceback of what
was raised. Python prints an exception's cause before the exception, and a cause without frames as
its message alone: `message_first` uses that to put message and hint above the stack trace.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from epochal.coordinator import Gate, PreparedEpoch, Stopped
from epochal.coordinator.gates import AskedTooEarly
from epochal.errors import EpochalError, Misconfigured, TaskFailed, TryAgain, from_text

if TYPE_CHECKING:
    from pyspark.errors import PySparkException

logger = logging.getLogger("epochal")

_REASON_CHARS_MAX = 500
_STOPPED = "the query was stopped"
_STOP = re.compile(
    r"cancelled job group|\[SPARK_JOB_CANCELLED\].*"
    # The last two: Ctrl-C in the driver's main thread, and spark.stop().
    r"( was stopped|cancellation of all jobs|SparkContext was shut down)"
)
_INTERRUPT = re.compile(
    r"java\.lang\.InterruptedException|java\.io\.InterruptedIOException|ClosedByInterruptException"
)
"""Of a stop as well, and of clients (S3A, HDFS, okhttp) that have waited too long for an answer."""
_OF_A_WRITE = ("[TASK_WRITE_FAILED]", "[WRITING_JOB_ABORTED]")
"""Conditions by which Spark's writer says that it failed, and not why."""
_NO_SPACE = "No space left on device"
_NO_NAME = "unmappable characters"
_QUERY_LOGS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
_RAISED_LAST = re.compile(r"^(?!\s)(?:[\w.]+\.)?(\w+(?::[^\n]*)?)$", re.MULTILINE)


def query_loggers() -> list[logging.Logger]:
    """PySpark logs every error in a query to stderr, with Java's stack trace, and raises it too."""
    with suppress(ImportError):  # before 4.0 there is no such log
        from pyspark.logger import PySparkLogger  # noqa: PLC0415  the same

        return [PySparkLogger.getLogger(name) for name in _QUERY_LOGS]
    return []


@contextmanager
def not_logged() -> Iterator[None]:
    """PySpark does not log errors that are raised within: the caller reports them."""
    kept = [(one, one.level) for one in query_loggers()]
    for one, _ in kept:
        one.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for one, level in kept:
            one.setLevel(level)


class StopSignal(Exception):
    """
    `Stopped`, raised into Spark.

    Spark tells a stop from a failure by this exact text, with a regular expression that overflows
    the stack where the text is long.
    """

    def __init__(self) -> None:
        super().__init__(
            f"{_STOPPED}\n"
            "py4j.protocol.Py4JJavaError: An error occurred while calling an epoch.\n"
            ": java.lang.InterruptedException"
        )


class Terminated(KeyboardInterrupt):
    """The end of a query on Spark Connect, whose server sends SIGTERM to its Python worker."""


def stop_or_error(
    error: BaseException, doing: str, is_stopped: Callable[[], bool] = lambda: True
) -> EpochalError:
    """
    `Stopped` where the query was stopped, and any other error as one of ours.

    An interrupt is a stop only where `is_stopped`. By default it may be one: `Stopped` then carries
    the other error, and a caller that knows the query resolves it by another call.
    """
    # Of ours only where nothing happened: one about a decided epoch may cite an interrupt too.
    may_be_stop = isinstance(error, TryAgain) or not isinstance(error, EpochalError)
    text = _asked(error.__str__) or ""
    if isinstance(error, Stopped):
        stopped = error
    elif isinstance(error, Terminated) or (may_be_stop and _STOP.search(text)):
        stopped = Stopped(_STOPPED)
    elif may_be_stop and _INTERRUPT.search(text):
        stopped = Stopped(_STOPPED)
        stopped.if_active = as_epochal(error, doing)
    else:
        return as_epochal(error, doing)
    return stopped if stopped.if_active is None or is_stopped() else stopped.if_active


def end_of_remote(failure: BaseException) -> EpochalError:
    """The same of a query that has ended elsewhere: a stop there was raised as `StopSignal`."""
    return stop_or_error(failure, "the query", lambda: _STOPPED in str(failure))


def stoppable(gate: Gate) -> Gate:
    """The gate, which does not refuse the epoch when its Spark jobs end by a stop of the query."""

    def asked(epoch: PreparedEpoch) -> bool | str | None:
        try:
            return gate(epoch)
        except (EpochalError, AskedTooEarly):
            raise
        except Exception as error:
            why = stop_or_error(error, f"gate {asked.__name__}")
            if isinstance(why, Stopped):
                raise why from None
            raise

    asked.__name__ = str(getattr(gate, "__name__", gate))
    return asked


def as_epochal(error: BaseException, doing: str) -> EpochalError:
    """Spark's error as one of ours: the one its text carries, or the shortest true reason."""
    if isinstance(error, EpochalError):
        return error
    logger.debug("%s", doing, exc_info=error)
    text = _asked(error.__str__)
    carried = from_text(text or "")
    if carried is not None:
        return carried
    if text is None or is_jvm_gone(error):
        return TaskFailed(
            f"{doing}: Spark's JVM has exited, or Ctrl-C in a call to Spark has cut it off",
            "nothing is lost: start again; its last lines on stderr, or the system's log, say "
            "whether it was killed or ran out of memory",
        )
    reason = _reason(error, text)
    if _NO_SPACE in reason:
        return TryAgain(
            f"{doing}: {reason}",
            "free some space, or raise the quota; the epoch is tried again at the next start",
        )
    if _NO_NAME in reason:
        return Misconfigured(
            f"{doing}: {reason}",
            "LC_ALL=C.UTF-8 for the driver and every executor: Java names files by the locale, and "
            "a folder or the value of a partition has characters that this one lacks",
        )
    return TaskFailed(
        f"{doing}: {reason}",
        "the epoch is tried again at the next start; the whole stack trace is in the logs of the "
        "executors, and in this driver's at level DEBUG (logger epochal)",
    )


def spark_message(error: BaseException) -> str:
    """The message of Spark's error about a query or an option, without its plan and its stack."""
    java = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.getMessage() or java.toString())
    return text.strip().partition("\n")[0].rstrip(";")


def analysis_message(error: PySparkException) -> str:
    """The same of an expression that can't be analysed; a column that is missing is named."""
    if (error.getCondition() or "").startswith("UNRESOLVED_COLUMN"):
        missing = (error.getMessageParameters() or {}).get("objectName", "")
        return f"there is no column {missing}"
    return spark_message(error)


def is_jvm_gone(error: BaseException) -> bool:
    try:
        from py4j.protocol import Py4JError, Py4JNetworkError  # noqa: PLC0415  comes with Spark
    except ImportError:  # a client of Spark Connect alone
        return isinstance(error, ConnectionError)
    # A call that got no answer is raised as the plain class, without a trace of Java.
    is_unanswered = type(error) is Py4JError and "Trace:" not in str(error)
    return is_unanswered or isinstance(error, (Py4JNetworkError, ConnectionError))


def _asked(ask: Callable[[], str]) -> str | None:
    """What an error says. PySpark asks the JVM for it: None where that has exited since."""
    try:
        return ask()
    except Exception as failure:
        logger.debug("an error that can't say what it is", exc_info=failure)
        return None


def _reason(error: BaseException, text: str) -> str:
    if not isinstance(error, Exception):
        return f"{type(error).__name__}: {text}"
    text = text.strip() or type(error).__name__
    _, traced, rest = text.rpartition("Traceback (most recent call last):")
    if traced:
        raised = _RAISED_LAST.search(rest)
        if raised is not None:
            return raised[1][:_REASON_CHARS_MAX]
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    said = text if java is None else _asked(java.toString) or text
    reason = said.partition("\n")[0][:_REASON_CHARS_MAX]
    if java is None or not any(condition in reason for condition in _OF_A_WRITE):
        return reason
    root = _asked(lambda: _root_cause(java))
    return f"{reason}: {root}" if root else reason


def _root_cause(java: Any) -> str:
    while (cause := java.getCause()) is not None:
        java = cause
    return str(java.toString()).partition("\n")[0][:_REASON_CHARS_MAX]


def message_first(error: EpochalError) -> EpochalError:
    """A copy of the error to raise into Spark, whose traceback begins with message and hint."""
    again, bare = (type(error)(*error.args) for _ in range(2))
    again.__cause__ = bare
    return again
