"""Spark's internal expressions and plans that have no name in SQL, built through the JVM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession, functions
from pyspark.sql.types import DataType

from epochal.spark.plan_analysis import BATCH

# py4j takes a class that a release lacks for a package, which can't be called.
UNAVAILABLE = (PySparkException, Py4JError, TypeError, AttributeError)
"""Raised where a release of Spark, or a session without a JVM, lacks an expression."""

_KEPT_MAX = 64
_Built = TypeVar("_Built")
_built: WeakKeyDictionary[SparkContext, dict[Hashable, Any]] = WeakKeyDictionary()
_building = threading.Lock()


class JvmExpressions:
    """Makes columns of Catalyst expressions."""

    def __init__(self, spark: SparkSession) -> None:
        jvm: Any = spark._jvm
        self._jvm = jvm
        self._is_before_4 = spark.version.startswith("3.")
        sql = jvm.org.apache.spark.sql
        self._sql = sql
        self._expressions = sql.catalyst.expressions
        self._types = sql.types

    def unscaled(self, decimal: Column) -> Column:
        """A decimal of up to 18 digits as a long, without its point."""
        return self._column(decimal, self._expressions.UnscaledValue(self._inside(decimal)))

    def bytes_of(self, integer: Column) -> Column:
        """The integer's bytes, big-endian, by the legacy cast: ANSI mode forbids it."""
        cast = self._expressions.Cast(
            self._inside(integer),
            self._type("binary"),
            self._jvm.scala.Option.empty(),
            self._expressions.EvalMode.LEGACY(),
        )
        return self._column(integer, cast)

    def microseconds(self, timestamp: Column, kind: DataType) -> Column:
        """Microseconds since 1970 of a timestamp, with or without a zone."""
        converted = self._expressions.PreciseTimestampConversion(
            self._inside(timestamp), self._type(kind.simpleString()), self._type("bigint")
        )
        return self._column(timestamp, converted)

    def bits(self, double: Column) -> Column:
        return self._called(double, "java.lang.Double", "doubleToLongBits", "bigint")

    def bits_of_float(self, single: Column) -> Column:
        return self._called(single, "java.lang.Float", "floatToIntBits", "int")

    def bytes_by(self, column: Column, method: str) -> Column:
        """What a method without arguments of the JVM's object returns, which is bytes."""
        call = self._expressions.objects.Invoke(
            self._inside(column),
            method,
            self._type("binary"),
            self._jvm.PythonUtils.toSeq([]),
            self._jvm.PythonUtils.toSeq([]),
            True,  # propagates null
            False,  # returns null for nothing else
            True,  # deterministic
        )
        return self._column(column, call)

    def quotient(self, integer: Column, divisor: int) -> Column:
        by = functions.lit(divisor).cast("bigint")
        divided = self._expressions.IntegralDivide(self._inside(integer), self._inside(by))
        return self._column(integer, divided)

    def _called(self, column: Column, owner: str, method: str, returns: str) -> Column:
        newer = () if self._is_before_4 else (self._jvm.scala.Option.empty(),)
        call = self._expressions.objects.StaticInvoke(
            self._jvm.java.lang.Class.forName(owner),
            self._type(returns),
            method,
            self._jvm.PythonUtils.toSeq([self._inside(column)]),
            self._jvm.PythonUtils.toSeq([]),
            True,  # propagates null
            False,  # returns null for nothing else
            True,  # deterministic
            *newer,
        )
        return self._column(column, call)

    def _inside(self, column: Any) -> Any:
        if self._is_before_4:
            return column._jc.expr()
        return self._sql.classic.ExpressionUtils.expression(column._jc)

    def _column(self, like: Column, expression: Any) -> Column:
        made: Any = type(like)
        if self._is_before_4:
            jvm_column = self._sql.Column(expression)
        else:
            jvm_column = self._sql.classic.ExpressionUtils.column(expression)
        column: Column = made(jvm_column)
        return column

    def _type(self, written: str) -> Any:
        return self._types.DataType.fromDDL(written)


def built_once(frame: DataFrame, key: Hashable, build: Callable[[], _Built]) -> _Built:
    """
    Columns that find others by name, and so fit the frame of every epoch: building one takes
    calls into the JVM, many for some. Kept as long as the application runs.
    """
    context = getattr(frame.sparkSession, "_sc", None)
    if context is None:
        return build()
    with _building:
        built = _built.setdefault(context, {})
        if key not in built:
            while len(built) >= _KEPT_MAX:
                built.pop(next(iter(built)))
            built[key] = build()
        found: _Built = built[key]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """Rows whose number, and the sum of a long of each, a job adds up while it reads them."""

    frame: DataFrame
    accumulator: Any
    """Once a job has ended, `count()` and `sum()` are those of its tasks that succeeded."""


def summed(frame: DataFrame, key: Hashable, number: Callable[[], Column]) -> Summed:
    """
    The same rows, with a filter that lets all pass: it adds the number of each row to an
    accumulator, inside of the code that Spark compiles for the whole stage. So every column is read
    once, for the number and for the row that is passed on. (`observe` is an operator of its own,
    which takes each row apart again.)

    As a filter has a side effect here, it is put on rows that an RDD gives: from other plans the
    optimizer could take it through a projection, which then computes its columns a second time, or
    evaluate it while it plans. `number` is built once for each key.
    """
    session: Any = frame.sparkSession
    parts = _summing(session._jvm, session.version.startswith("3."))
    accumulator = session._jsc.sc().longAccumulator()
    setters = built_once(frame, (summed, key), lambda: parts.setters(number()))
    added = parts.set_all(parts.literal.fromObject(accumulator), setters)
    nothing = parts.nothing
    # Not deterministic: it is evaluated once for each row, and where it stands.
    is_zero = parts.invoke(added, "isZero", parts.boolean, nothing, nothing, False, False, False)
    rows = _from_rdd(frame)._jdf.filter(parts.column(parts.negated(is_zero)))
    made: Any = type(frame)
    return Summed(frame=made(rows, session), accumulator=accumulator)


def _from_rdd(frame: DataFrame) -> DataFrame:
    """The same rows, by an RDD: as a batch of a stream is, and a frame that was checkpointed."""
    execution, session = frame._jdf.queryExecution(), frame.sparkSession
    if execution.analyzed().nodeName() in BATCH:
        return frame
    made: Any = type(frame)
    rows = session._jsparkSession.internalCreateDataFrame(
        execution.toRdd(), frame._jdf.schema(), False
    )
    by_rdd: DataFrame = made(rows, session)
    return by_rdd


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summing:
    """What the filter of `summed` is made of, in one JVM."""

    literal: Any
    setters: Callable[[Column], Any]
    set_all: Any
    """An expression that calls methods of an object, each with a value."""
    invoke: Any
    negated: Any
    column: Callable[[Any], Any]
    boolean: Any
    nothing: Any


@lru_cache(maxsize=1)
def _summing(jvm: Any, is_before_4: bool) -> _Summing:
    """Kept: a class of the JVM is found by one call for each part of its name."""
    sql, python = jvm.org.apache.spark.sql, jvm.PythonUtils
    expressions = sql.catalyst.expressions
    convert = None if is_before_4 else sql.classic.ExpressionUtils

    def setters(number: Any) -> Any:
        jvm_column = number._jc
        inside = jvm_column.expr() if convert is None else convert.expression(jvm_column)
        return python.toScalaMap({"add": inside})

    return _Summing(
        literal=getattr(getattr(expressions, "Literal$"), "MODULE$"),
        setters=setters,
        set_all=expressions.objects.InitializeJavaBean,
        invoke=expressions.objects.Invoke,
        negated=expressions.Not,
        column=sql.Column if convert is None else convert.column,
        boolean=sql.types.DataType.fromDDL("boolean"),
        nothing=python.toSeq([]),
    )


def limited(frame: DataFrame, rows: int) -> DataFrame:
    """The first rows of each partition; `DataFrame.limit` would move them to one partition."""
    session = frame.sparkSession
    local_limit, of_rows, number = _limit_by(session._jvm, rows)
    plan = local_limit(number, frame._jdf.queryExecution().analyzed())
    made: Any = type(frame)
    few: DataFrame = made(of_rows(session._jsparkSession, plan), session)
    return few


@lru_cache(maxsize=4)
def _limit_by(jvm: Any, rows: int) -> tuple[Any, Any, Any]:
    """Kept: a class of the JVM is found by one call for each part of its name."""
    sql = jvm.org.apache.spark.sql
    number = sql.catalyst.expressions.Literal(rows, sql.types.DataType.fromDDL("int"))
    return sql.catalyst.plans.logical.LocalLimit, sql.classic.Dataset.ofRows, number
