"""The schema for editors agrees with the reader of files."""

from importlib.resources import files

import jsonschema
import pytest
import yaml

from epochal.config import json_schema
from epochal.registry import SINKS

HEAD = {"pipeline": "p", "checkpoint": "c", "source": {"format": "rate"}}


@pytest.fixture(scope="module")
def judge():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_example_passes(judge):
    text = files("epochal.config").joinpath("example.yaml").read_text(encoding="utf-8")
    judge.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "sink",
    [
        {"kind": "memory"},
        {"kind": "postgres", "url": "u", "table": "t", "password": {"env": "X"}},
        {"kind": "postgres", "connection_string": "u", "table_name": "t"},
        {"kind": "kafka", "bootstrap": "b", "topic": "t", "value": {"json": "*"}},
    ],
)
def test_sinks_that_a_file_may_declare_pass(judge, sink):
    judge.validate({**HEAD, "sinks": [sink]})
    judge.validate({**HEAD, "sinks": sink})


@pytest.mark.parametrize(
    "broken",
    [
        {"sinks": [{"kind": "postgers"}]},
        {"sinks": [{"kind": "postgres", "url": "u", "table": "t", "tabel": "t"}]},
        {"sinks": [{"kind": "postgres", "url": "u", "table": "t", "mode": "upsrt"}]},
        {"sinks": [{"kind": "memory"}], "chekpoint": "c"},
        {"sinks": [{"kind": "memory"}], "limits": {"commit_timeout_s": "soon"}},
    ],
)
def test_the_schema_objects_to_what_the_reader_objects_to(judge, broken):
    assert list(judge.iter_errors({**HEAD, **broken}))


def test_every_option_of_every_sink_is_described(judge):
    branches = judge.schema["$defs"]["sink"]["allOf"]
    assert [branch["if"]["properties"]["kind"]["const"] for branch in branches] == sorted(SINKS)
    assert judge.schema["properties"]["checkpoint"]["description"].startswith("Spark's checkpoint")
