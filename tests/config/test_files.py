"""A pipeline's file: its keys, and the message of each mistake."""

from pathlib import Path

import pytest

from epochal.config import Mistakes, read_file
from epochal.errors import Misconfigured
from epochal.kit.secrets import EnvironmentSecret, FileSecret
from epochal.sinks.memory import Memory
from epochal.sinks.postgres import Postgres

HEAD = """\
pipeline: orders
checkpoint: /chk
source: {format: rate}
"""
MEMORY = "sinks: {kind: memory}\n"
POSTGRES = """\
sinks:
  - kind: postgres
    url: postgresql://etl@db/shop
"""


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "p.yaml"
        path.write_text(text, encoding="utf-8")
        return read_file(path)

    return read


@pytest.fixture
def mistakes(read, tmp_path):
    def mistakes(text):
        with pytest.raises(Mistakes) as caught:
            read(text)
        return [str(one).replace(f"{tmp_path}/", "") for one in caught.value.found]

    return mistakes


def test_the_shortest_file_has_a_name_a_checkpoint_a_source_and_a_sink(read):
    file = read(HEAD + MEMORY)
    assert (file.pipeline, file.checkpoint, file.output_mode) == ("orders", "/chk", "append")
    assert list(file.streams) == ["source"]
    assert isinstance(file.sinks[0], Memory)


def test_a_sink_takes_its_own_options_and_calls(read):
    file = read(
        HEAD
        + POSTGRES
        + """\
    table: orders
    mode: upsert
    keys: [id]
    order_by: at
    password: {env: PGPASSWORD}
    pressure: {pause_wait_s: 2}
  - kind: postgres
    name: second
    url: postgresql://etl@db/shop
    table: rest
    password: {file: /run/secrets/pg}
"""
    )
    first, second = file.sinks
    assert isinstance(first, Postgres)
    assert (first.mode, list(first.keys), first.pressure.pause_wait_s) == ("upsert", ["id"], 2.0)
    assert first.password == EnvironmentSecret("PGPASSWORD")
    assert (second.name, second.password) == ("second", FileSecret("/run/secrets/pg"))


def test_options_of_other_connectors_are_known_by_their_names(read):
    file = read(
        HEAD
        + """\
sinks:
  - kind: postgres
    connection_string: postgresql://etl@db/shop
    table_name: events
    write_mode: {type: upsert, key_columns: [event_id, user_id]}
    order_by: at
    pool: {min_connections: 2, max_connections: 4, connect_timeout_secs: 3}
    flush_interval_secs: 7
"""
    )
    (sink,) = file.sinks
    assert (sink.table, sink.mode, list(sink.keys)) == ("events", "upsert", ["event_id", "user_id"])
    assert (sink.pool_max, sink.connect_timeout_s, sink.flush_interval_s) == (4, 3.0, 7.0)


def test_a_sink_may_name_another_for_what_its_table_refuses(read):
    file = read(HEAD + POSTGRES + "    table: t\n    on_reject: {kind: memory, name: refused}\n")
    assert file.sinks[0].on_reject.name == "refused"


def test_a_call_may_be_an_argument_of_another(read):
    file = read(
        HEAD + "sinks:\n  kind: kafka\n  bootstrap: b:9092\n  topic: orders\n"
        "  value:\n    avro: {registry: 'http://r:8081', auto_register: false, username: etl,"
        " password: {env: REGISTRY_PASSWORD}}\n"
    )
    value = file.sinks[0].encoding
    assert value.registry.password == EnvironmentSecret("REGISTRY_PASSWORD")
    assert (value.registry.username, value.auto_register) == ("etl", False)


def test_options_of_spark_are_converted_to_text(read):
    file = read(
        "pipeline: p\ncheckpoint: c\n"
        "source: {format: kafka, options: {subscribe: a, failOnDataLoss: false, n: 3}}\n" + MEMORY
    )
    assert file.source.options == {"subscribe": "a", "failOnDataLoss": "false", "n": "3"}


def test_booleans_and_dates_of_old_yaml_are_text(read):
    file = read("pipeline: no\ncheckpoint: 2026-01-01\nsource: {format: on}\n" + MEMORY)
    assert (file.pipeline, file.checkpoint, file.source.format) == ("no", "2026-01-01", "on")


def test_digits_that_are_no_number_are_text(read):
    file = read(HEAD + MEMORY + "run: 2026_\nlog: 2__6\nlimits: {buffer_rows: 1_000}\n")
    assert (file.run, file.log, file.limits.buffer_rows) == ("2026_", "2__6", 1000)


def test_environment_variables_are_substituted_before_types_are_resolved(read, monkeypatch):
    monkeypatch.setenv("LIMIT", "7")
    monkeypatch.delenv("NOWHERE", raising=False)
    file = read(
        HEAD.replace("/chk", "${NOWHERE:-/tmp}/chk")
        + MEMORY
        + "run: '${LIMIT}'\nlog: $${LIMIT}\nlimits:\n  commit_timeout_s: ${LIMIT}\n"
    )
    assert (file.checkpoint, file.run, file.log) == ("/tmp/chk", "7", "${LIMIT}")
    assert file.limits.commit_timeout_s == 7.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            HEAD.replace("checkpoint", "chekpoint") + MEMORY,
            [
                "p.yaml:1:1: the file: 'checkpoint' is missing",
                "p.yaml:2:1: the file: unknown key 'chekpoint' (did you mean 'checkpoint'?)",
            ],
        ),
        (
            HEAD + POSTGRES + "    tabel: orders\n",
            [
                "p.yaml:5:5: sinks[0]: 'table' is missing",
                "p.yaml:7:5: sinks[0]: unknown key 'tabel' (did you mean 'table'?)",
            ],
        ),
        (
            HEAD + POSTGRES + "    table: t\n    mode: upsrt\n",
            [
                "p.yaml:8:11: sinks[0].mode: 'upsrt' is none of append, upsert, replace, "
                "insert_new, update, complete (did you mean 'upsert'?)"
            ],
        ),
        (
            HEAD + POSTGRES + "    table: t\n    mode: upsert\n",
            ["p.yaml:5:5: sinks[0]: Postgres: mode='upsert' without keys (keys=[\"id\"])"],
        ),
        (
            HEAD + "sinks: {kind: postgers}\n",
            ["p.yaml:4:15: sinks[0]: unknown kind 'postgers' (did you mean 'postgres'?)"],
        ),
        (
            HEAD + MEMORY + "limits: {commit_timeout_s: soon}\n",
            ["p.yaml:5:28: limits.commit_timeout_s: 'soon', expected a number"],
        ),
        (
            HEAD.replace("orders", "7") + MEMORY,
            ["p.yaml:1:11: pipeline: 7, expected text (put it in quotes)"],
        ),
        (
            HEAD + MEMORY + "steps: [{where: a > 1, select: [b]}]\n",
            [
                "p.yaml:5:9: steps[0]: a step has exactly one key, and this one has select and "
                "where (one of sql, select, where, watermark)"
            ],
        ),
        (
            HEAD + MEMORY + "pipeline: again\n",
            ["p.yaml:5:1: 'pipeline' occurs twice (the first is at p.yaml:1:1)"],
        ),
        (
            HEAD + "sinks: [\n",
            ["p.yaml:5:1: not YAML: expected the node content, but found '<stream end>'"],
        ),
        (
            HEAD + "sinks:\n  - \x00\n",
            ["p.yaml:5:5: not YAML: special characters are not allowed"],
        ),
        (
            HEAD + MEMORY + "metrics: {port: 70000}\n",
            ["p.yaml:5:10: metrics: port 70000 is out of range (0 to 65535)"],
        ),
        (
            HEAD + MEMORY + "trigger: {processing_time: 1 second, available_now: true}\n",
            [
                "p.yaml:5:10: trigger: a run that ends has no interval "
                "(processing_time: … or available_now: true)"
            ],
        ),
        ("", ["p.yaml:1:1: the file is empty (`epochal init` writes one)"]),
        (
            HEAD + "sinks: [{kind: memory, name: m}, {kind: memory, name: m}]\n",
            ["p.yaml:1:1: the file: two sinks are named 'm' (name: … on one of them)"],
        ),
        (
            HEAD + MEMORY + "log: ${NOT_SET_ANYWHERE}\n",
            [
                "p.yaml:5:6: the environment variable NOT_SET_ANYWHERE is not set "
                "(export NOT_SET_ANYWHERE=…, or give a default: ${NOT_SET_ANYWHERE:-…})"
            ],
        ),
    ],
)
def test_a_mistake_is_reported_with_its_line_and_a_hint(mistakes, text, expected):
    assert mistakes(text) == expected


CALLED = """\
sinks: {kind: callback, spool: /spool, function: {python: "shutil:which"}}
gates: [{python: "no_such_module:gate"}]
"""


def test_a_function_is_named_where_a_sink_takes_one(read):
    (sink,) = read(HEAD + CALLED).sinks
    assert sink.target == "shutil.which"


def test_a_missing_gate_is_a_mistake_only_where_the_file_is_run(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(HEAD + CALLED, encoding="utf-8")
    assert read_file(path).gates[0].python == "no_such_module:gate"
    with pytest.raises(Mistakes) as caught:
        read_file(path, finds_names=True)
    (found,) = caught.value.found
    assert (found.position.line, found.position.column) == (5, 18)
    assert "there is no module 'no_such_module'" in found.message


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file(mistakes):
    found = mistakes(HEAD + POSTGRES + "    tabel: t\n    mode: x\nlimits: {nonsense: 1}\n")
    assert [line.split(":")[1] for line in found] == ["5", "7", "8", "9"]


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(Misconfigured, match="can't be read: No such file"):
        read_file(tmp_path / "nowhere.yaml")


def test_the_example_of_init_has_no_mistake():
    from importlib.resources import files

    example = Path(str(files("epochal.config").joinpath("example.yaml")))
    file = read_file(example)
    assert [sink.name for sink in file.sinks] == ["orders", "big"]
