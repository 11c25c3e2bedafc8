"""Which class a kind names: ours, an installed package's, or any that can be imported."""

from importlib.metadata import EntryPoint

import jsonschema
import pytest
from epochal_sqlite import SQLite

from epochal import registry
from epochal.config import Mistakes, json_schema, read_file
from epochal.errors import Misconfigured
from epochal.sinks.memory import Memory

HEAD = "pipeline: p\ncheckpoint: c\nsource: {format: rate}\n"


@pytest.fixture
def installed(monkeypatch):
    """Installed distributions that declare these sinks: name and class."""

    def install(*sinks):
        found = [EntryPoint(name, home, registry.GROUP) for name, home in sinks]
        monkeypatch.setattr(
            registry,
            "entry_points",
            lambda group, name=None: [one for one in found if name in (None, one.name)],
        )

    return install


@pytest.fixture
def declared(tmp_path):
    def declared(sink):
        path = tmp_path / "p.yaml"
        path.write_text(f"{HEAD}sinks: {sink}\n", encoding="utf-8")
        return read_file(path).sinks[0]

    return declared


def test_a_kind_of_an_installed_package_is_known_with_its_options(installed, declared):
    installed(("sqlite", "epochal_sqlite:SQLite"))
    sink = declared("{kind: sqlite, path: shop.db, table: orders, name: shop}")
    assert sink == SQLite(path="shop.db", table="orders", name="shop")
    with pytest.raises(Mistakes, match=r"unknown key 'tabel'.*'table'"):
        declared("{kind: sqlite, path: shop.db, tabel: orders}")


def test_a_class_that_can_be_imported_is_a_kind(declared):
    sink = declared("{kind: 'epochal_sqlite:SQLite', path: shop.db, table: orders}")
    assert isinstance(sink, SQLite)


def test_one_of_ours_is_not_replaced_by_an_installed_one(installed):
    installed(("memory", "epochal_sqlite:SQLite"))
    assert registry.sink_class("memory") is Memory


def test_two_packages_with_one_kind_are_distinguished_by_their_classes(installed):
    installed(("sqlite", "epochal_sqlite:SQLite"), ("sqlite", "another:Sink"))
    with pytest.raises(Misconfigured, match="2 installed packages") as caught:
        registry.sink_class("sqlite")
    assert "kind: epochal_sqlite:SQLite or another:Sink" in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sqlight", "unknown kind 'sqlight'.*did you mean 'sqlite'"),
        ("epochal_sqlite:Nothing", "no attribute 'Nothing'"),
        ("no_such_package:Sink", "there is no module 'no_such_package'"),
        ("epochal_sqlite:SQLiteWriter", "is no sink that a pipeline's file can declare"),
        ("epochal_sqlite:quoted", "is no sink that a pipeline's file can declare"),
    ],
)
def test_a_kind_that_names_no_sink_is_refused_with_the_way_out(installed, declared, kind, message):
    installed(("sqlite", "epochal_sqlite:SQLite"))
    with pytest.raises(Mistakes, match=message):
        declared(f"{{kind: '{kind}', path: shop.db, table: orders}}")


def test_the_schema_for_editors_knows_installed_kinds_and_lets_classes_pass(installed):
    installed(("sqlite", "epochal_sqlite:SQLite"))
    judge = jsonschema.Draft202012Validator(json_schema())
    head = {"pipeline": "p", "checkpoint": "c", "source": {"format": "rate"}}
    good = {"kind": "sqlite", "path": "shop.db", "table": "orders"}
    judge.validate({**head, "sinks": [good]})
    judge.validate({**head, "sinks": [{"kind": "jobs.sinks:Mine", "anything": 1}]})
    assert list(judge.iter_errors({**head, "sinks": [{**good, "tabel": "orders"}]}))
    assert list(judge.iter_errors({**head, "sinks": [{"kind": "sqlight"}]}))
