"""Avro's binary form of rows, a column at a time.

A record is its fields side by side, a union the number of its branch and then the value, a list the
count, the elements and a zero: all of it columns of bytes that one join puts together. Unions of
more than one type beside null have no column here; a record with one is written row by row.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochal.arrow_values import flag_array, flags, texts
from epochal.errors import Misconfigured, RowRejected
from epochal.kafka.varints import constant, join
from epochal.sinks.kafka.values import binary_columns as made
from epochal.sinks.kafka.values.binary_columns import Encode
from epochal.terms import quantity

Schema = Any
"""A schema as JSON has it: the name of a type, an object, or a list that is a union."""
_UNITS = {"millis": "ms", "micros": "us", "nanos": "ns"}
_INSTANTS = {
    f"{local}timestamp-{unit}": short for unit, short in _UNITS.items() for local in ("", "local-")
}


class ByRow(Exception):
    """A schema that can't be encoded column by column."""


def encoder(text: str, kind: pa.DataType) -> Encode:
    """Makes records of a column of structs. Raises `Misconfigured` where types don't fit."""
    schema = json.loads(text)
    try:
        return _Compiler().encoder(schema, kind, "value")
    except ByRow:
        return partial(_by_row, schema)


class _Compiler:
    def __init__(self) -> None:
        self._named: dict[str, tuple[Schema, str]] = {}
        self._space = ""

    def encoder(self, schema: Schema, kind: pa.DataType, path: str) -> Encode:
        """An encoder of values that may be null only where the schema says so."""
        if isinstance(schema, list):
            return self._union(schema, kind, path)
        inner = self._of_type(schema, kind, path)

        def required(column: pa.Array) -> pa.Array:
            if column.null_count:
                raise RowRejected(
                    f"{path} is null in {quantity(column.null_count, 'row')}, and its Avro type "
                    "has no null",
                    'a union with "null" in the schema, or a value in the query',
                )
            return inner(column)

        return required

    def _union(self, schema: Sequence[Schema], kind: pa.DataType, path: str) -> Encode:
        others = [branch for branch in schema if branch != "null"]
        if len(others) > 1:
            raise ByRow
        null_tag = schema.index("null") * 2 if "null" in schema else None
        if not others or pa.types.is_null(kind):
            if null_tag is None:
                raise _unfit(path, kind, schema)
            tag = bytes([null_tag])
            return lambda column: made.fixed(np.full((len(column), 1), tag[0], dtype=np.uint8))
        inner = self._of_type(others[0], kind, path)
        value_tag = schema.index(others[0]) * 2
        if null_tag is None:
            return self.encoder(others[0], kind, path)

        def either(column: pa.Array) -> pa.Array:
            if not column.null_count:
                return join([constant(bytes([value_tag])), inner(column)])
            valid = flags(column.is_valid())
            tags = np.where(valid, np.uint8(value_tag), np.uint8(null_tag)).reshape(-1, 1)
            return join([made.fixed(tags), made.spread(column, inner)])

        return either

    def _of_type(self, schema: Schema, kind: pa.DataType, path: str) -> Encode:
        if isinstance(schema, str):
            if schema in _PLAIN:
                return _checked(schema, {}, kind, path)
            return self._reference(schema, kind, path)
        name = schema["type"]
        if not isinstance(name, str):  # {"type": {"type": …}} is the inner type
            return self._of_type(name, kind, path)
        nested = {"record": self._record, "array": self._array, "map": self._map}.get(name)
        if nested is not None:
            return nested(schema, kind, path)
        if name in ("enum", "fixed"):
            self._name(schema)
        if name in _PLAIN:
            return _checked(name, schema, kind, path)
        return self._reference(name, kind, path)

    def _reference(self, name: str, kind: pa.DataType, path: str) -> Encode:
        known = self._named.get(_full(name, self._space)) or self._named.get(name)
        if known is None:
            raise Misconfigured(
                f"the Avro schema of {path} names no known type: {name!r}",
                "define the type in the schema before it is named",
            )
        schema, space = known
        outer, self._space = self._space, space
        found = self._of_type(schema, kind, path)
        self._space = outer
        return found

    def _name(self, schema: Mapping[str, Any]) -> str:
        space = schema.get("namespace", self._space)
        full = _full(schema["name"], space)
        space = full.rpartition(".")[0]
        self._named[full] = (schema, space)
        return space

    def _record(self, schema: Mapping[str, Any], kind: pa.DataType, path: str) -> Encode:
        if not pa.types.is_struct(kind):
            raise _unfit(path, kind, "record")
        outer = self._space
        self._space = self._name(schema)
        places = {kind.field(index).name: index for index in range(kind.num_fields)}
        named = [field["name"] for field in schema["fields"]]
        unknown = sorted(places.keys() - set(named))
        if unknown:
            raise Misconfigured(
                f"the Avro schema of {path} has no field for {', '.join(unknown)}",
                f"its fields are {', '.join(named)}; name the columns to be written, or add them",
            )
        parts: list[tuple[int, Encode] | pa.Scalar] = []
        for field in schema["fields"]:
            index = places.get(field["name"])
            where = f"{path}.{field['name']}"
            if index is None:
                parts.append(_default(field, where))
            else:
                inner = self.encoder(field["type"], kind.field(index).type, where)
                parts.append((index, inner))
        self._space = outer
        return partial(_joined, parts)

    def _array(self, schema: Mapping[str, Any], kind: pa.DataType, path: str) -> Encode:
        if not made.is_list(kind):
            raise _unfit(path, kind, "array")
        inner = self.encoder(schema["items"], kind.value_type, f"{path}[]")

        def lists(column: pa.Array) -> pa.Array:
            return _blocks(made.counts_of(column), inner(column.flatten()))

        return lists

    def _map(self, schema: Mapping[str, Any], kind: pa.DataType, path: str) -> Encode:
        if not pa.types.is_map(kind) or not made.is_text(kind.key_type):
            raise _unfit(path, kind, "map with keys of text")
        inner = self.encoder(schema["values"], kind.item_type, f"{path}{{}}")

        def maps(column: pa.Array) -> pa.Array:
            lists = made.entries_of(column)
            keys, values = lists.flatten().flatten()
            pairs = join([_text(keys), inner(values)])
            return _blocks(made.counts_of(lists), pairs)

        return maps


def _joined(parts: Sequence[tuple[int, Encode] | pa.Scalar], column: pa.Array) -> pa.Array:
    if not len(column):
        return texts([], pa.binary())
    columns = column.flatten()
    pieces = [part if isinstance(part, pa.Scalar) else part[1](columns[part[0]]) for part in parts]
    if all(isinstance(piece, pa.Scalar) for piece in pieces):
        pieces.append(texts([b""] * len(column), pa.binary()))
    return join(pieces)


def _blocks(counts: Any, elements: pa.Array) -> pa.Array:
    """One block per list: the count, the elements, and the zero that ends blocks."""
    heads = made.folded(counts)
    if not len(elements):
        return heads
    ends = made.fixed(np.zeros((len(counts), 1), dtype=np.uint8))
    ends = pc.if_else(flag_array(counts > 0), ends, constant(b""))
    return join([heads, made.grouped(elements, counts), ends])


def _default(field: Mapping[str, Any], path: str) -> pa.Scalar:
    """The bytes of a field without a column."""
    if "default" not in field:
        raise Misconfigured(
            f"there is no column for {path}, and its Avro field has no default",
            "add the column, or a default to the schema",
        )
    kind, value = field["type"], field["default"]
    first = kind[0] if isinstance(kind, list) else kind
    if first == "bytes" or (isinstance(first, dict) and first["type"] in ("bytes", "fixed")):
        value = value.encode("iso-8859-1")
    return constant(_written(field["type"], value))


def _written(schema: Schema, value: Any) -> bytes:
    import fastavro  # noqa: PLC0415  few schemas need it

    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, value)
    return out.getvalue()


def _by_row(schema: Schema, column: pa.Array) -> pa.Array:
    import fastavro  # noqa: PLC0415  few schemas need it

    parsed = fastavro.parse_schema(schema)
    found = []
    for row in column.to_pylist():
        out = io.BytesIO()
        try:
            fastavro.schemaless_writer(out, parsed, row, strict_allow_default=True)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise RowRejected(f"a row does not fit its Avro schema: {error}") from error
        found.append(out.getvalue())
    return texts(found, pa.binary())


def _full(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _unfit(path: str, kind: pa.DataType, schema: Schema) -> Misconfigured:
    return Misconfigured(
        f"{path} is {kind}, which can't be written as Avro's {_short(schema)}",
        "cast it in the query, or change the schema",
    )


def _short(schema: Schema) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


# One type each: whether it takes a column, and how that is written.


def _checked(name: str, schema: Mapping[str, Any], kind: pa.DataType, path: str) -> Encode:
    found = _PLAIN[name](schema, kind)
    if found is None:
        raise _unfit(path, kind, schema.get("logicalType") or name)

    def guarded(column: pa.Array) -> pa.Array:
        try:
            return found(column)
        except (pa.ArrowInvalid, OverflowError) as error:
            raise RowRejected(f"{path}: a value does not fit Avro's {name}: {error}") from error

    return guarded


def _integer(width: pa.DataType, schema: Mapping[str, Any], kind: pa.DataType) -> Encode | None:
    logical = schema.get("logicalType", "")
    if logical == "date" and pa.types.is_date(kind):
        return lambda column: made.folded(made.ints_of(column.cast(pa.date32())))
    if logical in _INSTANTS and pa.types.is_timestamp(kind):
        unit = pa.timestamp(_INSTANTS[logical], tz=kind.tz)
        return lambda column: made.folded(made.ints_of(column.cast(unit)))
    if logical in ("time-millis", "time-micros") and pa.types.is_time(kind):
        time = pa.time32("ms") if logical == "time-millis" else pa.time64("us")
        return lambda column: made.folded(made.ints_of(column.cast(time)))
    if pa.types.is_integer(kind):
        return lambda column: made.folded(made.ints_of(column.cast(width)))
    return None


def _float(width: str, _schema: Mapping[str, Any], kind: pa.DataType) -> Encode | None:
    fits = pa.types.is_float32(kind) or (width == "f8" and pa.types.is_float64(kind))
    return partial(made.little_endian, kind=width) if fits else None


def _boolean(_schema: Mapping[str, Any], kind: pa.DataType) -> Encode | None:
    return made.booleans if pa.types.is_boolean(kind) else None


def _string(_schema: Mapping[str, Any], kind: pa.DataType) -> Encode | None:
    return _text if made.is_text(kind) else None


def _text(column: pa.Array) -> pa.Array:
    return made.sized(made.text_bytes(column), made.folded)


def _bytes(schema: Mapping[str, Any], kind: pa.DataType) -> Encode | None:
    if schema.get("logicalType") == "decimal" and pa.types.is_decimal(kind):
        wanted = pa.decimal128(schema["precision"], schema.get("scale", 0))
        return lambda column: made.sized(_shortest(column.cast(wanted)), made.folded)
    return _text if made.is_bytes(kind) else None


def _fixed(schema: Mapping[str, Any], kind: pa.DataType) -> Encode | None:
    size = schema["size"]
    if schema.get("logicalType") == "decimal" and pa.types.is_decimal(kind):
        wanted = pa.decimal128(schema["precision"], schema.get("scale", 0))
        return lambda column: made.fixed(_widened(column.cast(wanted), size))
    if not made.is_bytes(kind):
        return None
    return lambda column: column.cast(pa.binary()).cast(pa.binary(size)).cast(pa.binary())


def _enum(schema: Mapping[str, Any], kind: pa.DataType) -> Encode | None:
    symbols = texts(schema["symbols"], pa.string())

    def places(column: pa.Array) -> pa.Array:
        found = pc.index_in(column.cast(pa.string()), symbols)
        if found.null_count:
            unknown = column.filter(found.is_null())[0].as_py()
            raise pa.ArrowInvalid(f"{unknown!r} is none of the symbols")
        return made.folded(made.ints_of(found))

    return places if made.is_text(kind) else None


def _null(_schema: Mapping[str, Any], kind: pa.DataType) -> Encode | None:
    return (
        None
        if not pa.types.is_null(kind)
        else (lambda column: made.fixed(np.empty((len(column), 0), np.uint8)))
    )


_PLAIN: Mapping[str, Callable[[Mapping[str, Any], pa.DataType], Encode | None]] = {
    "null": _null,
    "boolean": _boolean,
    "int": partial(_integer, pa.int32()),
    "long": partial(_integer, pa.int64()),
    "float": partial(_float, "f4"),
    "double": partial(_float, "f8"),
    "string": _string,
    "bytes": _bytes,
    "fixed": _fixed,
    "enum": _enum,
}


def _big_endian(column: pa.Array) -> Any:
    """The unscaled value of each decimal, highest byte first."""
    data = np.frombuffer(column.buffers()[1], np.uint8)
    return data[16 * column.offset : 16 * (column.offset + len(column))].reshape(-1, 16)[:, ::-1]


def _shortest(column: pa.Array) -> pa.Array:
    """As few bytes as keep the sign, as Java's BigInteger has it."""
    matrix = _big_endian(column)
    sign = matrix[:, :1] >> 7
    is_filling = (matrix[:, :-1] == sign * np.uint8(0xFF)) & ((matrix[:, 1:] >> 7) == sign)
    keep = np.ones(matrix.shape, dtype=np.bool_)
    keep[:, :-1] = ~np.logical_and.accumulate(is_filling, axis=1)
    return made.picked(matrix, keep)


def _widened(column: pa.Array, size: int) -> Any:
    """All decimals in `size` bytes."""
    matrix = _big_endian(column)
    filling = (matrix[:, :1] >> 7) * np.uint8(0xFF)
    if size >= matrix.shape[1]:
        return np.concatenate([np.repeat(filling, size - matrix.shape[1], axis=1), matrix], axis=1)
    left, kept = matrix[:, :-size], matrix[:, -size:]
    if (left != filling).any() or ((kept[:, :1] >> 7) != (filling >> 7)).any():
        raise OverflowError(f"a decimal needs more than {size} bytes")
    return kept
