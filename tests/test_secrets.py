"""
No password, token or key is in anything that a run leaves behind or shows: files, logs, metrics,
reprs, history, reports, pages of the console, arguments of processes.
"""

from __future__ import annotations

import base64
import importlib
import logging
import os
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import oracledb
import psutil
import psycopg
import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from console.conftest import Console
from prometheus_client import CollectorRegistry, generate_latest
from pyiceberg.catalog import load_catalog
from servers.mysql import MariaDBServer
from servers.ports import free_port
from servers.postgres import running_server
from servers.receiver import ReceiverServer
from servers.s3 import ACCESS_KEY, SECRET, running_s3
from sinks.oracle.conftest import h2, orders, place  # noqa: F401  fixtures
from typer.testing import CliRunner

from epochal import Oracle, Session
from epochal.broker.embedded import BrokerProcess
from epochal.cli import application
from epochal.config.resolve_target import OpenedTarget
from epochal.errors import EpochalError
from epochal.logs import open_log
from epochal.reports.doctor import diagnose
from epochal.telemetry import exporters
from epochal.telemetry.prometheus import PrometheusMeters

SECRETS = {
    "POSTGRES_PASSWORD": "hunter-postgres-7f3a",
    "MYSQL_PASSWORD": "hunter-mysql-7f3a",
    "KAFKA_PASSWORD": "hunter-kafka-7f3a",
    "HTTP_TOKEN": "hunter-token-7f3a",
    "HTTP_HEADER": "hunter-header-7f3a",
    "ORACLE_PASSWORD": "hunter-oracle-7f3a",
    "S3_SECRET": SECRET,
    "CONSOLE_TOKEN": "hunter-console-7f3a",
}
PAGES_MAX = 30
ASKING = (
    "verify secretive:pipeline",
    "recover secretive:pipeline --dry-run",
    "doctor secretive:pipeline --json",
)
REPORTS = ("status chk --json", "status chk", "epochs chk --json", "log export chk", "doctor chk")
JOBS = """
import os
import epochal as ep

s3 = {
    "endpoint_url": os.environ["S3_URL"], "region": "us-east-1", "addressing_style": "path",
    "access_key_id": os.environ["S3_KEY"],
    "secret_access_key": ep.file(os.environ["SECRETS"] + "/S3_SECRET"),
}
delta = {
    "AWS_ENDPOINT_URL": os.environ["S3_URL"], "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
    "AWS_ACCESS_KEY_ID": os.environ["S3_KEY"], "AWS_SECRET_ACCESS_KEY": os.environ["S3_SECRET"],
    "AWS_S3_ALLOW_UNSAFE_RENAME": "true",
}
password = os.environ["POSTGRES_PASSWORD"]
iceberg = {
    "type": "sql", "uri": os.environ["CATALOG_URL"].replace("postgres@", f"postgres:{password}@"),
    "warehouse": "s3://lake/iceberg", "s3.endpoint": os.environ["S3_URL"],
    "s3.region": "us-east-1", "s3.access-key-id": os.environ["S3_KEY"],
    "s3.secret-access-key": ep.file(os.environ["SECRETS"] + "/S3_SECRET"),
}
pipeline = ep.Pipeline(
    "secretive",
    sinks=[
        ep.Postgres(
            os.environ["POSTGRES_URL"].replace("postgres@", f"postgres:{password}@"),
            table="rows", create_table="if_missing", name="postgres", connect_timeout_s=5,
        ),
        ep.MySQL(
            os.environ["MYSQL_URL"], table="rows", create_table="if_missing", name="mysql",
            password=ep.file(os.environ["SECRETS"] + "/MYSQL_PASSWORD"), connect_timeout_s=5,
        ),
        ep.Kafka(
            os.environ["KAFKA"], topic="rows", name="kafka", username="etl",
            password=os.environ["KAFKA_PASSWORD"], sasl_mechanism="PLAIN",
        ),
        ep.Http(
            os.environ["HTTP_URL"], token=os.environ["HTTP_TOKEN"], name="http",
            headers={"X-Key": os.environ["HTTP_HEADER"]},
        ),
        ep.Files("s3://lake/rows", storage_options=s3, name="files"),
        ep.Iceberg("lake.shop.rows", properties=iceberg, name="iceberg"),
        ep.Delta(
            "s3://lake/delta", storage_options=delta, create_table="if_missing", name="delta"
        ),
    ],
    checkpoint=os.environ["CHECKPOINT"],
    limits=ep.Limits(commit_retry_max_s=2.0, retry_backoff_ms=(100,)),
)
"""


def forms(secret: str) -> set[bytes]:
    """A secret as it is, as a URL has it, and as headers of logins do."""
    plain = secret.encode()
    coded = {base64.b64encode(b"x" * shift + plain)[4:-4] for shift in range(3)}
    return {plain, urllib.parse.quote(secret).encode(), plain.hex().encode(), *coded}


def leaks(seen: dict[str, bytes]) -> list[str]:
    """Where a secret is, by name; never the secret itself."""
    return [
        f"{name} in {where}"
        for where, data in seen.items()
        for name, secret in SECRETS.items()
        if any(form in data for form in forms(secret))
    ]


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def arguments_of_processes(but: set[int]) -> dict[str, bytes]:
    found = {}
    for process in psutil.Process().children(recursive=True):
        if process.pid not in but:
            try:
                found[f"arguments of {process.name()} {process.pid}"] = " ".join(
                    process.cmdline()
                ).encode()
            except psutil.NoSuchProcess:
                continue
    return found


def create_iceberg_table(catalog_url: str, s3_url: str) -> None:
    access = {"s3.access-key-id": ACCESS_KEY, "s3.secret-access-key": SECRET}
    where = {"warehouse": "s3://lake/iceberg", "s3.endpoint": s3_url, "s3.region": "us-east-1"}
    with load_catalog("lake", type="sql", uri=catalog_url, **where, **access) as catalog:
        catalog.create_namespace("shop")
        catalog.create_table("shop.rows", pa.schema([("id", pa.int64()), ("name", pa.string())]))


@pytest.fixture
def servers(tmp_path, monkeypatch) -> Iterator[tuple[set[int], dict[str, Any]]]:
    """Every server that asks for a secret; what the tests pass to them themselves is no leak."""
    kept = tmp_path / "secrets"
    kept.mkdir()
    monkeypatch.setenv("SECRETS", str(kept))
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
        (kept / name).write_text(value)
    receiver = ReceiverServer(tmp_path / "servers" / "receiver", tokens=(SECRETS["HTTP_TOKEN"],))
    kafka = BrokerProcess(
        tmp_path / "servers" / "kafka", users={"etl": SECRETS["KAFKA_PASSWORD"]}, fsync=False
    )
    mariadb = MariaDBServer()
    with ExitStack() as stack:
        postgres = stack.enter_context(running_server())
        s3 = stack.enter_context(running_s3())
        for server in (receiver, kafka, mariadb):
            stack.callback(server.stop)
            server.start()
        with psycopg.connect(postgres.url(), autocommit=True) as connection:
            connection.execute(f"ALTER USER postgres PASSWORD '{SECRETS['POSTGRES_PASSWORD']}'")
        with mariadb.connect() as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE USER etl IDENTIFIED BY '{SECRETS['MYSQL_PASSWORD']}'")
            cursor.execute("GRANT ALL ON *.* TO etl")
            cursor.execute("CREATE DATABASE shop")
        login = {"sasl.username": "etl", "sasl.password": SECRETS["KAFKA_PASSWORD"]}
        plain = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", **login}
        admin = AdminClient({"bootstrap.servers": kafka.address, **plain})
        admin.create_topics([NewTopic("rows", 1)])["rows"].result(30)
        del admin  # it would report the broker's end
        catalog_url = postgres.url().replace("postgresql:", "postgresql+psycopg:")
        create_iceberg_table(catalog_url, s3.url)
        monkeypatch.setenv("CATALOG_URL", catalog_url)
        monkeypatch.setenv("POSTGRES_URL", postgres.url())
        monkeypatch.setenv("MYSQL_URL", mariadb.url(database="shop", user="etl"))
        monkeypatch.setenv("KAFKA", kafka.address)
        monkeypatch.setenv("HTTP_URL", receiver.url)
        monkeypatch.setenv("S3_URL", s3.url)
        monkeypatch.setenv("S3_KEY", ACCESS_KEY)
        yield {receiver._process.pid}, {"postgres": postgres, "kafka": kafka, "mysql": mariadb}


def test_a_leak_is_found_in_every_form(tmp_path):
    secret = SECRETS["HTTP_TOKEN"]
    coded = base64.b64encode(f"user:{secret}".encode())
    (tmp_path / "history.json").write_text(f'{{"why": "no answer from x:{secret}@y"}}')
    found = leaks({**files_below(tmp_path), "header": coded, "fine": b"hunter"})
    assert found == [f"HTTP_TOKEN in {tmp_path}/history.json", "HTTP_TOKEN in header"]


@pytest.fixture
def shown(monkeypatch, caplog, capfd):
    """What has been shown, by the place where it was; what was logged or printed comes last."""
    registry = CollectorRegistry()
    monkeypatch.setattr(exporters, "_meters", [PrometheusMeters(registry)])
    caplog.set_level(logging.DEBUG, logger="epochal")
    seen: dict[str, bytes] = {}
    yield seen
    sys.modules.pop("secretive", None)
    seen["metrics of the driver"] = generate_latest(registry)
    lines = map(caplog.handler.format, caplog.get_records("call"))
    seen["log"] = "\n".join(lines).encode()
    output = capfd.readouterr()
    seen["stdout and stderr"] = (output.out + output.err).encode()
    assert leaks(seen) == []
    assert b"secretive" in seen["metrics of the driver"]


def test_no_secret_is_left_behind_or_shown(servers, spark, tmp_path, monkeypatch, shown):
    theirs, running = servers
    work = tmp_path / "work"
    work.mkdir()
    (work / "secretive.py").write_text(JOBS, encoding="utf-8")
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(str(work))
    monkeypatch.setenv("CHECKPOINT", str(work / "chk"))
    pipeline = importlib.import_module("secretive").pipeline
    source = work / "in"
    spark.range(3000).selectExpr("id", "'x' AS name").write.parquet(str(source))
    stream = spark.readStream.schema("id BIGINT, name STRING").parquet(str(source))

    def note(where: str, text: object) -> None:
        shown[where] = str(text).encode()

    note("check", pipeline.check(stream))
    query = pipeline.start(stream, availableNow=True)
    shown |= arguments_of_processes(theirs)
    query.awaitTermination()
    assert [one.phase.value for one in pipeline.last_epochs()] == ["committed"]
    spark.range(3000, 6000).selectExpr("id", "'x' AS name").write.mode("append").parquet(
        str(source)
    )
    for words in ASKING:
        note(f"epochal {words}", reported(words))
    # An epoch that fails at every target that can be taken away: errors have places in them.
    for server in running.values():
        server.kill()
    with pytest.raises(Exception) as failed:  # noqa: PT011  Spark's, around ours
        pipeline.start(stream, availableNow=True).awaitTermination()
    note("error", failed.value)
    note("repr of the error", repr(failed.value.__cause__))
    note("pipeline", repr(pipeline))
    note("pipeline as HTML", pipeline._repr_html_())
    for sink in pipeline.sinks:
        note(f"sink {sink.name}", f"{sink!r} {sink} {sink.describe()}")
    for words in REPORTS:
        note(f"epochal {words}", reported(words))
    console = Console(
        work,
        *("--token-env", "CONSOLE_TOKEN", "--pipeline", "secretive:pipeline"),
        environment={"PYTHONPATH": os.pathsep.join([str(work), *sys.path])},
    )
    try:
        shown |= arguments_of_processes(theirs)
        shown |= {f"console {page}": text for page, text in pages_of(console.url)}
    finally:
        console.stop()
    note("console's log", console.output)
    assert len([where for where in shown if where.startswith("console /")]) >= 3
    assert leaks(files_below(work)) == []


def test_no_secret_of_oracle_is_left_behind_or_shown(request, tmp_path, monkeypatch, shown):
    """Its server is a stand-in; the connection that fails is one of the library itself."""
    table = request.getfixturevalue("orders")
    address = f"127.0.0.1:{free_port()}/shop"
    url = f"oracle://etl:{SECRETS['ORACLE_PASSWORD']}@{address}"
    sink = Oracle(url, table="orders", name="oracle", pool_min=1, connect_timeout_s=2)
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    log = str(tmp_path / "chk" / "epochal" / "log")
    with Session("secretive", sinks=[sink], schema=schema, log=log) as session:
        session.begin(0)
        session.write([{"id": 1, "name": "x"}])
        session.commit()
    assert table.rows(columns="id") == [(1,)]
    opened = OpenedTarget(target="x", log=open_log(log), pipeline="secretive", sinks=[sink])
    shown["doctor"] = repr(diagnose(opened)).encode()
    monkeypatch.setattr("epochal.sinks.oracle.client.oracledb", oracledb)
    with pytest.raises(EpochalError, match=address) as failed:
        Session("secretive", sinks=[sink], schema=schema, log=log)
    shown["error"] = f"{failed.value!r} {failed.value} {failed.value.hint}".encode()
    shown["doctor, none there"] = repr(diagnose(opened)).encode()
    shown["sink"] = f"{sink!r} {sink} {sink.describe()}".encode()
    for words in REPORTS:
        shown[f"epochal {words}"] = reported(words.replace("chk", str(tmp_path / "chk"))).encode()
    assert leaks(files_below(tmp_path)) == []


def reported(words: str) -> str:
    ran = CliRunner().invoke(application(), words.split())
    return f"{ran.output} {ran.exception!r}"


def fetched(url: str) -> bytes:
    asked = urllib.request.Request(url)
    asked.add_header("Authorization", f"Bearer {SECRETS['CONSOLE_TOKEN']}")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        data: bytes = answer.read()
        return data


def pages_of(url: str) -> Iterator[tuple[str, bytes]]:
    """Every page of the console that another one links to."""
    waiting, known = ["/", "/metrics", "/api/status"], set()
    while waiting and len(known) < PAGES_MAX:
        page = waiting.pop(0)
        if page not in known:
            known.add(page)
            shown = fetched(url + page)
            yield page, shown
            waiting += re.findall(r'href="(/[^"#]*)"', shown.decode())
