"""
How an error reaches the person: our message and hint first, without a wall of stack traces.

From a task to the driver there is only text, of which one line is ours. From the driver's callback
to Spark there is only the formatted traceback of what was raised: Python prints an exception's
cause before it, and a cause without frames is nothing but its message, so that stands first.
"""

from __future__ import annotations

import logging
import re

from epochal.errors import EpochalError, GateRefused, TaskFailed, from_text

logger = logging.getLogger("epochal")

_REASON_CHARS_MAX = 500
_STOP = re.compile(
    r"java\.lang\.InterruptedException|java\.io\.InterruptedIOException"
    r"|ClosedByInterruptException|cancelled job group|\[SPARK_JOB_CANCELLED\].* was stopped"
)
_RAISED_LAST = re.compile(r"^(?!\s)(?:[\w.]+\.)?(\w+(?::[^\n]*)?)$", re.MULTILINE)


class Stopped(Exception):
    """
    The query was stopped while an epoch was being written.

    Spark tells a stop from a failure by this very text, with a regular expression that overflows
    the stack where the text is long.
    """

    def __init__(self) -> None:
        super().__init__(
            "the query was stopped\n"
            "py4j.protocol.Py4JJavaError: An error occurred while calling an epoch.\n"
            ": java.lang.InterruptedException"
        )


def is_stop(error: BaseException) -> bool:
    return isinstance(error, Stopped) or _STOP.search(str(error)) is not None


def told(error: BaseException, doing: str) -> Exception:
    """A stop as Spark knows it, and everything else as one of ours."""
    # Never one of ours: an epoch that is decided and not carried out may cite an interrupt, too.
    # But for a gate's: it was asked before the decision, and its own jobs end with the query.
    is_ours = isinstance(error, EpochalError) and not isinstance(error, GateRefused)
    return Stopped() if not is_ours and is_stop(error) else typed(error, doing)


def typed(error: BaseException, doing: str) -> EpochalError:
    """An error of Spark's as one of ours: the one its text carries, or the shortest true reason."""
    if isinstance(error, EpochalError):
        return error
    logger.debug("%s", doing, exc_info=error)
    carried = from_text(str(error))
    if carried is not None:
        return carried
    return TaskFailed(
        f"{doing}: {_reason(error)}",
        "the epoch is tried again at the next start; the whole stack trace is in the logs of the "
        "executors, and in this driver's at level DEBUG (logger epochal)",
    )


def said_by_spark(error: BaseException) -> str:
    """What Spark says of a query or an option that it refuses, without its plan and its stack."""
    java = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.getMessage() or java.toString())
    return text.strip().partition("\n")[0].rstrip(";")


def _reason(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    _, traced, rest = text.rpartition("Traceback (most recent call last):")
    if traced:
        raised = _RAISED_LAST.search(rest)
        if raised is not None:
            return raised[1][:_REASON_CHARS_MAX]
    java = getattr(error, "java_exception", None)
    told = text if java is None else str(java.toString())
    return told.partition("\n")[0][:_REASON_CHARS_MAX]


def presented(error: EpochalError) -> EpochalError:
    """The same error, to be raised into Spark: its message will be what is printed first."""
    again, bare = (type(error)(*error.args) for _ in range(2))
    again.__cause__ = bare
    return again
