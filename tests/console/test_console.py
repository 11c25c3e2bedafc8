"""The console in a real browser: pages, refreshing, access and actions."""

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from console import stage
from console.stage import TOKEN

from epochal.sinks.files import read_epochs


def test_a_pipeline_is_found_and_shown_with_its_sinks_figures_and_epochs(shown, page):
    page.goto(shown)
    page.fill("#q", "ORD")
    page.keyboard.press("Enter")
    page.click("a:has-text('orders')")
    assert page.inner_text("h1").split() == ["orders", "ok"]
    assert page.locator("svg").count() == 3
    assert "rows/s" in page.inner_text(".facts")
    assert page.locator("td b:has-text('big')").count() == 1
    assert page.locator("svg .mark").count() == 1, "the refused epoch is marked"


def test_history_is_paged_on_the_server_from_the_newest_to_the_oldest(shown, page):
    page.goto(shown)
    page.click("a:has-text('orders')")
    page.click("text=All epochs")
    seen = []
    while True:
        seen += [int(text) for text in page.locator("tbody td:first-child").all_inner_texts()]
        older = page.locator("a[rel=next]")
        if not older.count():
            break
        older.click()
        page.wait_for_load_state()
    assert seen == sorted([*range(120), 117], reverse=True)


def test_a_refused_epoch_is_shown_with_its_reason_escaped(shown, page):
    page.goto(shown)
    page.click("a:has-text('orders')")
    page.click("a:text-is('117')")
    assert "fewer rows than yesterday <b>by far</b>" in page.inner_text("main")
    assert {"aborted", "committed"} <= set(page.locator(".outcome").all_inner_texts())


def test_receipts_are_shown_while_the_log_keeps_them(shown, page):
    page.goto(shown)
    page.click("a:has-text('orders')")
    page.click("a:text-is('119')")
    assert page.locator("td code").count() == 2


def test_a_page_refreshes_itself(tmp_path, start, page):
    stage.healthy(tmp_path, "clicks", epochs=3)
    page.goto(start(tmp_path))
    page.click("a:has-text('clicks')")
    assert page.inner_text("h1").split() == ["clicks", "ok"]
    stage.healthy(tmp_path, "clicks", epochs=9)
    page.wait_for_selector("tbody a:text-is('8')")
    assert page.inner_text("#pulse") == "live"


def test_it_is_usable_on_a_phone_by_keyboard_and_in_the_dark(shown, chromium):
    context = chromium.new_context(viewport={"width": 390, "height": 800}, color_scheme="dark")
    page = context.new_page()
    page.goto(shown)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("tbody a")
    page.keyboard.press("Enter")
    page.wait_for_selector("svg")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 26)"
    context.close()


def test_an_epoch_in_doubt_is_shown_first_and_recovered_on_confirmation(doubtful, page, sign_in):
    url, root = doubtful
    sign_in(url)
    page.click("a:has-text('payments')")
    assert "is decided and not committed everywhere" in page.inner_text(".alert h2")
    assert "epoch 1, decided" in page.inner_text("tr:has(b:text-is('warehouse'))")
    assert "none" in page.inner_text("tr:has(b:text-is('ledger'))")
    assert read_epochs(root / "payments" / "away").count_rows() == 400
    (root / "payments" / "away.back").touch()
    page.click("text=Plan a recovery")
    assert "commit epoch 1 on warehouse" in page.inner_text(".steps")
    assert read_epochs(root / "payments" / "away").count_rows() == 400, "a plan changes nothing"
    page.click("button:has-text('Recover')")
    page.wait_for_selector("h1:has-text('Recovered')")
    assert read_epochs(root / "payments" / "away").count_rows() == 800


def test_a_sink_is_given_up_with_the_evidence_and_a_reason(doubtful, page, sign_in):
    url, _ = doubtful
    sign_in(url)
    page.click("a:has-text('payments')")
    page.click("text=Settle by hand")
    page.fill("input[name=kept_at]", "s3://backup/away-1.parquet")
    page.fill("input[name=because]", "the warehouse burned down")
    page.click("button:has-text('Give up')")
    assert "400 rows" in page.inner_text("main")
    page.click("button:has-text('Confirm')")
    page.click("text=Back to the pipeline")
    assert "s3://backup/away-1.parquet" in page.inner_text("main")


def fetch(url, data=None, **headers):
    request = urllib.request.Request(
        url, data, {name.replace("_", "-"): value for name, value in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_without_a_token_nothing_can_be_done(shown):
    status, text = fetch(shown + "/api/status")
    assert status == 200
    assert json.loads(text)["pipelines"][0]["pipeline"] == "orders"
    page = fetch(shown)[1]
    key = page.split('href="/pipelines/')[1].split('"')[0]
    for verb in ("recover", "resolve"):
        assert fetch(f"{shown}/pipelines/{key}/{verb}", b"confirmed=yes")[0] == 403
        assert fetch(f"{shown}/pipelines/{key}/{verb}")[0] == 403


def test_with_a_token_every_page_requires_it(doubtful):
    url, _ = doubtful
    assert fetch(url + "/api/status")[0] == 401
    assert fetch(url + "/metrics")[0] == 401
    assert "The console's token" in fetch(url + "/")[1]
    assert fetch(url + "/login", b"token=wrong")[0] == 403
    assert fetch(url + "/api/status", Authorization=f"Bearer {TOKEN}")[0] == 200
    status, text = fetch(url + "/metrics", Authorization=f"Bearer {TOKEN}")
    assert status == 200
    assert 'epochal_decided_unsettled{pipeline="payments"} 1.0' in text


def test_a_form_of_another_site_is_refused_even_with_the_session(doubtful, page, sign_in):
    url, root = doubtful
    sign_in(url)
    page.click("a:has-text('payments')")
    key = page.url.rpartition("/")[2]
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    status, _ = fetch(
        f"{url}/pipelines/{key}/recover",
        b"take_over=yes",
        Cookie=f"{cookie['name']}={cookie['value']}",
    )
    assert status == 403
    assert read_epochs(root / "payments" / "away").count_rows() == 400


def test_another_host_name_is_refused(shown):
    assert fetch(shown, Host="evil.example")[0] == 421


def test_without_a_token_it_listens_on_loopback_only(tmp_path):
    command = [sys.executable, "-m", "epochal.cli", "console", "--checkpoints", str(tmp_path)]
    command += ["--host", "0.0.0.0"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode != 0
    assert "hint: give it a token" in ended.stderr


@pytest.mark.parametrize(
    "address",
    ["/pipelines/nowhere", "/pipelines/%2e%2e", "/static/../app.py", "/?page=x", "/?page=-1"],
)
def test_a_wrong_address_is_refused(shown, address):
    status, text = fetch(shown + address)
    assert status in (400, 404)
    assert "Traceback" not in text


def test_a_thousand_pipelines_are_paged_with_those_in_doubt_first(tmp_path, start, page):
    source, root = tmp_path / "made", tmp_path / "many"
    stage.healthy(source, "clicks", epochs=2)
    stage.pipeline_in_doubt(source).close()
    for number in range(999):
        shutil.copytree(source / "clicks" / "log", root / f"{number:03d}" / "log")
    shutil.copytree(source / "payments" / "log", root / "zzz" / "log")
    page.goto(start(root))
    assert "page 1 of 20, 1,000 pipelines" in page.inner_text(".pages")
    assert "payments" in page.inner_text("tbody tr:first-child")
    page.click("a[rel=next]")
    assert page.locator("tbody tr").count() == 50
