"""The generated pages about sinks and pipeline files: options, keys, privileges, versions."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_origin

import epochal as ep
from compat import CONNECT, MINORS, SPARKS
from epochal.config import PipelineFile, json_schema
from epochal.config.type_hints import Shape, named, shape_of
from epochal.kit.secrets import CalledSecret, EnvironmentSecret, FileSecret, HeldSecret
from epochal.kit.sink_base import Promises, SinkBase
from epochal.registry import SINKS, SYNONYMS, function_names, sink_class
from epochal.terms import Limits

ROOT = Path(__file__).parent.parent
_COMMON = tuple(one.name for one in dataclasses.fields(SinkBase))
_GUIDES = {"memory": ""}
"""Sinks whose guide is not named by their kind."""
_NAMED: Mapping[Any, str] = {
    Callable: "function",
    CalledSecret: "secret",
    EnvironmentSecret: "secret",
    FileSecret: "secret",
    HeldSecret: "secret",
    Limits: "[limits](limits.md)",
    PathLike: "path",
}
"""Names of types that exist only in Python."""


def options() -> Iterator[str]:
    """Every option of every sink, from the dataclasses that declare them."""
    described = _described_sinks()
    yield (
        "Keyword arguments in Python, keys below `sinks:` in a [pipeline's file](yaml.md). A "
        "**required** option has no default."
    )
    yield "## All sinks"
    yield _table(SinkBase, described["memory"], _COMMON)
    for kind in SINKS:
        sink = sink_class(kind)
        guide = _GUIDES.get(kind, f"See [the guide](../guides/{kind}.md).")
        names = [one.name for one in _given(sink) if one.name not in _COMMON]
        yield f"## {sink.__name__}"
        yield f"`kind: {kind}` in YAML. {guide}".strip()
        yield _table(sink, described[kind], names)


def keys() -> Iterator[str]:
    """The keys of a pipeline's file, from the dataclasses that it is read into."""
    schema = json_schema()
    yield (
        "The keys of a file for `epochal run`; `epochal validate --schema` prints them as a JSON "
        "schema. The guide: [pipelines in YAML](../guides/yaml.md)."
    )
    yield _table(PipelineFile, schema["properties"], [one.name for one in _given(PipelineFile)])
    for key, part in _parts():
        inner = _properties(schema["properties"][key])
        yield f"## {key}"
        yield " ".join((part.__doc__ or "").split())
        yield _table(part, inner, [one.name for one in _given(part)])
    yield "## sinks"
    yield (
        f"`kind:` is one of {_listed(SINKS)}; or the name that an installed package gives its "
        "sink; or `package.module:Class`: [a sink of your own](../guides/your-own-sink.md). The "
        "other keys are that sink's [options](options.md). A value that is not plain YAML is a "
        "call of a function, as in "
        f"`password: {{env: PGPASSWORD}}`: {_listed(function_names())}."
    )
    yield "Other names of the same options, which other database connectors use:"
    yield _rows(("key", "is"), [(f"`{other}`", f"`{ours}`") for other, ours in SYNONYMS.items()])


def grants() -> Iterator[str]:
    """The least privileges of each sink: what `grants()` of an example prints."""
    yield (
        "`epochal grants PIPELINE` prints them for all sinks of a pipeline, `grants()` for one. "
        "They depend on mode, strategy, columns and names; these are examples."
    )
    for title, sink in _examples().items():
        found = sink.grants()
        text = found if isinstance(found, str) else "\n".join(found)
        yield f"## {title}"
        yield f"```\n{text}\n```"
    yield "## Other sinks"
    yield _rows(
        ("sink", "needs"),
        [
            (
                "Files in a folder",
                "read, write and remove below the folder and `<folder>.epochal`, for driver and "
                "tasks; to make these, write in the folder above",
            ),
            ("Files in Google's or Azure's stores", "list, get, put and delete below the path"),
            ("Delta", "read, write, list and delete below the table's folder"),
            ("Hudi", "the same, and the lock; of the driver's and the executors' Spark"),
            (
                "Iceberg",
                "load and commit the one table at the catalog; read, write, list and delete at its "
                "location; no right to create or drop tables",
            ),
            ("Http", "what its requests need; with a spool list, get, put and delete there"),
            ("Callback", "list, get, put and delete in the spool"),
            ("the checkpoint and the epoch log in it", "list, get, put and delete"),
        ],
    )


def tested() -> Iterator[str]:
    """Versions from the lock file and from the servers that the tests start."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    yield (
        "The tests run against real servers on loopback, and kill and restart most of them. What "
        "is not on this page has not been tested."
    )
    yield _rows(
        ("", "tested", "remarks"),
        [
            ("Python", "3.11", "the code needs 3.11 or newer"),
            (
                "PySpark",
                f"{_locked(lock, 'pyspark')}; {', '.join(MINORS)} by `make proof ONLY=compat`",
                "`make proof ONLY=compat` runs a smaller suite on the newest patch of each",
            ),
            (
                "Spark Connect",
                _locked(lock, "pyspark"),
                "a server of the pip package on one machine; `make proof ONLY=connect` runs the "
                f"same tests on {', '.join(SPARKS[CONNECT])}",
            ),
            ("Java", "17", "17 or newer; `make setup` installs 21 if the machine has none"),
            *_servers(),
        ],
    )
    yield "## Client packages"
    yield _rows(
        ("package", "version in the lock"),
        [(f"`{name}`", _locked(lock, name)) for name in _PACKAGES],
    )
    yield "## Not tested"
    yield (
        "[Oracle](../guides/oracle.md) itself; Confluent's schema registry; S3 of Amazon, Google's "
        "and Azure's storage; Glue and Hive catalogs; managed databases; Spark on more than one "
        "machine. Tests run Spark in local mode and as a standalone cluster on one machine, and "
        "kill its processes; networks between machines and shared file systems are not tested."
    )


_PACKAGES = (
    "pyarrow", "obstore", "psycopg", "adbc-driver-postgresql", "pymysql", "oracledb", "boto3",
    "pyiceberg", "deltalake", "grpcio", "httpx", "starlette", "uvicorn", "prometheus-client",
    "opentelemetry-sdk",
)  # fmt: skip


def _servers() -> Sequence[tuple[str, str, str]]:
    clients = "read back by librdkafka"
    return (
        ("PostgreSQL", "18.4 and 15", "PgBouncer 1.18 in transaction mode before it"),
        ("etcd", "3.4 and 3.5", "one node and three; Debian's packages, unpacked beside the tests"),
        ("MariaDB", "10.11", "Debian's package"),
        ("MySQL", "9.7", "Debian's package of the suite unstable, unpacked beside the tests"),
        ("Oracle", "none", f"its SQL is parsed by H2 {_release('h2')} in Oracle mode"),
        ("Apache Kafka", _release("kafka"), f"one broker and three; {clients}"),
        ("a schema registry", f"Apicurio {_release('apicurio')}", "Avro and Protobuf values"),
        ("the embedded broker", "this release", "Java clients 3.9 and 4.x, librdkafka, aiokafka"),
        ("S3", f"s3proxy {_release('s3')}", "a proxy adds lifecycle rules, encryption and faults"),
        ("Iceberg's REST catalog", _release("iceberg"), "SQL catalogs in SQLite and PostgreSQL"),
        ("Delta", "delta-rs, as below", "read back by Spark 4.2 with delta-spark 4.4.0 too"),
        ("Hudi", "1.2.0", "PySpark 3.5 only, by `make proof ONLY=hudi`; no bundle for Spark 4"),
        ("browsers", "Chromium", "the console, at the widths of a desktop and a phone"),
    )


def _release(server: str) -> str:
    """The version that a server's fixture uses; from its text, so that it is not started."""
    tree = ast.parse((ROOT / "tests" / "servers" / f"{server}.py").read_text(encoding="utf-8"))
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "RELEASE":
            return str(ast.literal_eval(statement.value))
    raise LookupError(f"tests/servers/{server}.py names no RELEASE")


def _locked(lock: str, name: str) -> str:
    found = re.search(rf"^{re.escape(name)}==(\S+)", lock, re.MULTILINE)
    if found is None:
        raise LookupError(f"requirements.lock has no {name}")
    return found[1]


def _examples() -> dict[str, Any]:
    keyed: dict[str, Any] = {"mode": "upsert", "keys": ["id"]}
    postgres, mysql = "postgresql://etl@db/shop", "mysql://etl@db/shop"
    return {
        "PostgreSQL, append": ep.Postgres(postgres, table="public.orders"),
        "PostgreSQL, upsert of named columns": ep.Postgres(
            postgres, table="public.orders", columns=["id", "name"], **keyed
        ),
        "MySQL and MariaDB, append": ep.MySQL(mysql, table="orders"),
        "MySQL and MariaDB, upsert": ep.MySQL(mysql, table="orders", **keyed),
        "MySQL and MariaDB, XA": ep.MySQL(mysql, table="orders", strategy="prepared"),
        "Oracle, in the user's own schema": ep.Oracle("oracle://etl@db:1521/shop", table="orders"),
        "Kafka": ep.Kafka("b1:9092", topic="orders.v1", username="etl", password="-"),  # noqa: S106
        "Files on S3": ep.Files("s3://lake/orders"),
    }


# What each sink promises


def promises_to_readers() -> str:
    return _rows(
        ("sink", "at one instant", "readers must", "proof (the ledger)"),
        [(one.sink, one.at_one_instant, one.readers_must, one.proof) for one in _promises()],
    )


def promised_modes() -> str:
    return _rows(
        ("sink", "append", "by key", "deletes", "Spark's output modes"),
        [(one.sink, one.append, one.by_key, one.deletes, one.output_modes) for one in _promises()],
    )


def promised_limits() -> str:
    """What users must know, and what the conformance suite is not asked to judge."""
    return _rows(
        ("sink", "limit", "not judged by the conformance suite"),
        [
            (
                one.sink,
                "; ".join(one.limits),
                "; ".join(f"can't {ability}: {reason}" for ability, reason in one.cannot.items()),
            )
            for one in _promises()
            if one.limits or one.cannot
        ],
    )


def _promises() -> Iterator[Promises]:
    for kind in SINKS:
        yield from import_module(sink_class(kind).__module__).PROMISES


# From dataclasses to tables


def _given(kind: type[Any]) -> list[dataclasses.Field[Any]]:
    return [one for one in dataclasses.fields(kind) if one.init]


def _described_sinks() -> dict[str, Mapping[str, Any]]:
    schema = json_schema()["$defs"]["sink"]
    return {
        one["if"]["properties"]["kind"]["const"]: one["then"]["properties"]
        for one in schema["allOf"]
    }


def _parts() -> Iterator[tuple[str, type[Any]]]:
    """The keys that are mappings with fixed keys; limits have their own page."""
    for name, hint in typing.get_type_hints(PipelineFile).items():
        inside = [hint, *get_args(hint)]
        part = next((one for one in inside if dataclasses.is_dataclass(one)), None)
        if part is not None and part is not Limits and name != "sources":
            yield name, typing.cast("type[Any]", part)


def _properties(schema: Any) -> Mapping[str, Any]:
    """The properties of the object that a schema, or one of its alternatives, describes."""
    if isinstance(schema, Mapping):
        if "properties" in schema:
            return typing.cast("Mapping[str, Any]", schema["properties"])
        inner = [schema.get("items"), *schema.get("anyOf", ())]
        return next((found for one in inner if (found := _properties(one))), {})
    return {}


def _table(kind: type[Any], described: Mapping[str, Any], names: Sequence[str]) -> str:
    hints = typing.get_type_hints(kind)
    fields = {one.name: one for one in dataclasses.fields(kind)}
    return _rows(
        ("", "is", "default", ""),
        [
            (
                f"`{name}`",
                _type(hints[name]),
                _default(fields[name]),
                _escaped(described.get(name, {}).get("description", "")),
            )
            for name in names
        ],
    )


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _type(hint: Any) -> str:
    """The name of a type for people; one that may be None is simply not required."""
    if isinstance(hint, typing.NewType):
        return _type(hint.__supertype__)
    shape = shape_of(hint)
    if shape is Shape.UNION:
        kinds = [_type(one) for one in get_args(hint) if one is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if shape is Shape.CHOICE:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if shape is Shape.LIST:
        return f"list of {_type(get_args(hint)[0])}"
    for kind, name in _NAMED.items():
        if hint is kind or get_origin(hint) is kind:
            return name
    return "mapping" if shape in (Shape.MAPPING, Shape.RECORD) else named(hint)


def _escaped(text: str) -> str:
    """Escape what Markdown would take for HTML, outside of code."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _default(one: dataclasses.Field[Any]) -> str:
    if one.default_factory is not dataclasses.MISSING:
        made = one.default_factory()
        return '`json("*")`' if made else ""
    value = one.default
    if value is dataclasses.MISSING:
        return "**required**"
    if value is None or value in ("", ()):
        return ""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20:
        return f"`{value >> 30} GiB`" if value >= 1 << 30 else f"`{value >> 20} MiB`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "" if dataclasses.is_dataclass(value) else f"`{value}`"
