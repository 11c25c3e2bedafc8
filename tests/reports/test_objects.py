"""Pipelines and histories in an object store are found and read as those on a disk are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from obstore.store import LocalStore

from epochal.errors import TryAgain
from epochal.logs import open_log
from epochal.reports.epochs import epochs
from epochal.reports.status import copied_from, pipeline_status, require_record, status


@pytest.fixture
def bucket(shop, monkeypatch):
    """s3://bucket/… is a folder of this machine, through the same client."""

    def opened(url, **_):
        folder = shop.root / "bucket" / url.removeprefix("s3://bucket").strip("/")
        return LocalStore(folder, mkdir=True)

    monkeypatch.setattr("epochal.storage.objects.from_url", opened)


def test_pipelines_in_a_bucket_are_found_with_their_history(shop, bucket, monkeypatch):
    url = "s3://bucket/chk/orders/epochal/log"
    log = open_log(url)
    monkeypatch.setattr("epochal.session.open_log", lambda _: log)
    shop.run(epochs=2)
    (found,) = status("s3://bucket/chk").pipelines
    assert (found.pipeline, found.last_epoch, found.log) == ("shop", 1, url)
    assert [one.read_from for one in epochs(log).epochs] == ["history", "history"]
    assert pipeline_status(log).driver.seen_at is not None


def test_a_checkpoint_that_spark_calls_s3a_is_no_copy_where_it_is_called_s3(
    shop, bucket, monkeypatch
):
    log = open_log("s3://bucket/chk/orders/epochal/log")
    monkeypatch.setattr("epochal.session.open_log", lambda _: log)
    shop.run(epochs=1)
    (shop.root / "bucket" / "chk" / "orders" / "metadata").write_text("{}")
    state = require_record(log).record.state
    for location, bound_to in (
        ("s3a://bucket/chk/orders", ""),
        ("s3a://bucket/chk/others", "s3a://bucket/chk/others"),
    ):
        assert copied_from(log, replace(state, location=location)) == bound_to


def test_a_store_that_does_not_answer_is_reported_in_one_line(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with pytest.raises(TryAgain, match="cannot list s3://bucket/chk"):
        status("s3://bucket/chk")
