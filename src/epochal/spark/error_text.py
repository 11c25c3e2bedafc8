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
from typing import TYPE_CHECKING

from epochal.errors import EpochalError, GateRefused, TaskFailed, from_text

if TYPE_CHECKING:
    from pyspark.errors import PySparkException

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

    Spark tells a stop from a failure by this exact text, with a regular expression that overflows
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


def stop_or_error(error: BaseException, doing: str) -> Exception:
    """`Stopped` where the query was stopped, and any other error as one of ours."""
    # Never for one of ours: an epoch that is decided and not carried out may cite an interrupt too.
    # Except a gate's: it runs before the decision, and its own jobs end with the query.
    is_ours = isinstance(error, EpochalError) and not isinstance(error, GateRefused)
    return Stopped() if not is_ours and is_stop(error) else as_epochal(error, doing)


def as_epochal(error: BaseException, doing: str) -> EpochalError:
    """Spark's error as one of ours: the one its text carries, or the shortest true reason."""
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


def _reason(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    _, traced, rest = text.rpartition("Traceback (most recent call last):")
    if traced:
        raised = _RAISED_LAST.search(rest)
        if raised is not None:
            return raised[1][:_REASON_CHARS_MAX]
    java = getattr(error, "java_exception", None)
    whole = text if java is None else str(java.toString())
    return whole.partition("\n")[0][:_REASON_CHARS_MAX]


def message_first(error: EpochalError) -> EpochalError:
    """A copy of the error to raise into Spark, whose traceback begins with message and hint."""
    again, bare = (type(error)(*error.args) for _ in range(2))
    again.__cause__ = bare
    return again
