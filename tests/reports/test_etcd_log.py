"""Pipelines whose log is in etcd, behind a user: history, doctor, grants, status below a prefix."""

from __future__ import annotations

import pytest
from servers.etcd import running_etcd

from epochal.console.index import Index
from epochal.reports.discover import find_logs, found_log
from epochal.reports.doctor import diagnose, grants
from epochal.reports.drop import drop
from epochal.reports.epochs import epochs
from epochal.reports.status import status


@pytest.fixture(scope="module")
def etcd():
    with running_etcd() as cluster:
        cluster.etcdctl("user", "add", "root:rootpass")
        cluster.etcdctl("user", "grant-role", "root", "root")
        cluster.etcdctl("auth", "enable")
        yield cluster


@pytest.fixture
def root(shop, etcd, request, monkeypatch):
    """A prefix of its own for each test, with two pipelines' room in it."""
    url = etcd.url(request.node.name, login="root:rootpass")
    monkeypatch.setattr(type(shop), "log_path", f"{url}/shop/log")
    return url


def test_a_log_in_etcd_is_found_below_its_prefix_and_has_a_history(shop, root):
    shop.run(epochs=3)
    shop.run(epochs=1)
    (report,) = status(root).pipelines
    assert (report.pipeline, report.last_epoch) == ("shop", 3)
    (log,) = find_logs(root)
    again = found_log(root, log.place)
    assert [one.epoch for one in epochs(again, limit=9).epochs] == [3, 2, 1, 0]
    assert "rootpass" not in log.place
    index = Index(root)
    index.refresh()
    assert index.snapshot.report(root).pipelines[0].pipeline == "shop"


def test_the_doctor_asks_every_endpoint_and_grants_names_the_prefix(shop, root, etcd):
    shop.run(epochs=1)
    report = diagnose(shop.opened)
    assert report.problems == []
    asked = {one.name: one.because for one in report.log_servers}
    assert "leader" in asked[etcd.nodes[0].endpoint]
    assert " MB of 2147 MB" in asked[etcd.nodes[0].endpoint]
    assert "never compacted" in asked["history"]
    assert any(
        "readwrite /" in line and line.endswith("/shop/log/") for line in grants(shop.opened).log
    )


def test_an_endpoint_that_is_away_is_a_problem_and_keeps_nothing_from_being_asked(
    shop, root, etcd, monkeypatch
):
    shop.run(epochs=1)
    one_more = shop.log_path.replace("@", "@127.0.0.1:1,")
    monkeypatch.setattr(type(shop), "log_path", one_more)
    report = diagnose(shop.opened)
    assert [problem.partition(": ")[0] for problem in report.problems] == ["127.0.0.1:1"]
    assert [one.is_reached for one in report.sinks] == [True, True]


def test_a_dropped_pipeline_leaves_no_key_in_etcd(shop, root, etcd, request):
    shop.run(epochs=2)
    drop(shop.opened, dry_run=False)
    left = etcd.etcdctl(
        *("get", f"/{request.node.name}", "--prefix", "--keys-only"), user="root:rootpass"
    )
    assert left.split() == []
