"""The console in a real browser: pages, refreshing, access and actions."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from axe_playwright_python.sync_playwright import Axe
from console import stage
from console.stage import TOKEN

from epochal.cli.console import _report_unknown
from epochal.console.index import key_of as console_key
from epochal.reports.discover import find_logs
from epochal.sinks.files import read_epochs
from epochal.storage.leases import lease_at
from epochal.telemetry.standby import Presence, Role, members_of


def test_a_pipeline_is_found_and_shown_with_its_sinks_figures_and_epochs(shown, page):
    page.goto(shown)
    page.fill("#q", "ORD")
    page.keyboard.press("Enter")
    page.click("a:has-text('orders')")
    assert page.inner_text("h1").split() == ["orders", "stopped"]
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


def test_standbys_are_shown_with_their_role(tmp_path, start, page):
    stage.healthy(tmp_path, "clicks", epochs=1)
    log = next(iter(find_logs(str(tmp_path))))
    lease = lease_at(log.store)
    presence = Presence(members_of(log), lease)
    presence.role = Role.WAITING
    page.goto(start(tmp_path))
    page.click("a:has-text('clicks')")
    page.wait_for_selector("td:text-is('waiting')")
    assert "Standbys" in page.inner_text("main")
    presence.close()


def test_a_page_refreshes_itself(tmp_path, start, page):
    stage.healthy(tmp_path, "clicks", epochs=3)
    page.goto(start(tmp_path))
    page.click("a:has-text('clicks')")
    assert page.inner_text("h1").split() == ["clicks", "stopped"]
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
    page.wait_for_load_state("load")  # of the style sheet, too
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 26)"
    context.close()


BROKEN_WORDS = r"""() => {
  const broken = [];
  for (const cell of document.querySelectorAll("td, th")) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const node = texts.currentNode;
      for (const word of node.data.matchAll(/(?<=^|\s)[A-Za-z]{2,16}(?=$|[\s.,:;])/g)) {
        const range = document.createRange();
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        const lines = new Set([...range.getClientRects()].map((line) => line.top));
        if (lines.size > 1) broken.push(word[0]);
      }
    }
  }
  return broken;
}"""
"""Words in tables that go on in the next line."""


def test_the_smallest_phone_shows_whole_words_and_only_tables_scroll(doubtful, chromium):
    url, _ = doubtful
    context = chromium.new_context(viewport={"width": 320, "height": 700})
    page = context.new_page()
    page.goto(f"{url}/login")
    page.fill("#user", "Alice")
    page.fill("#token", TOKEN)
    page.click("button:has-text('Sign in')")
    page.wait_for_selector("h1:has-text('Pipelines')")
    page.click("a:has-text('payments')")
    page.wait_for_url("**/pipelines/*")
    address = page.url
    parts = ("", "/epochs", "/epochs/1", "/recover", "/resolve")
    for place in (url, *(f"{address}{part}" for part in parts)):
        page.goto(place)
        page.wait_for_load_state("load")  # of the style sheet, too
        assert page.evaluate("document.documentElement.scrollWidth") <= 320, place
        assert page.evaluate(BROKEN_WORDS) == [], place
    context.close()


def test_an_epoch_in_doubt_is_shown_first_and_recovered_on_confirmation(doubtful, page, sign_in):
    url, root = doubtful
    sign_in(url)
    page.click("a:has-text('payments')")
    assert "epoch 1 is decided, and sink 'warehouse' could not" in page.inner_text(".alert h2")
    assert "connection refused" in page.inner_text(".alert h2")
    assert "no later epoch begins" in page.inner_text(".alert")
    assert "epoch 1, decided" in page.inner_text("tr:has(b:text-is('warehouse'))")
    assert "none" in page.inner_text("tr:has(b:text-is('ledger'))")
    assert read_epochs(root / "payments" / "away").count_rows() == 400
    (root / "payments" / "away.back").touch()
    page.click("text=Plan a recovery")
    assert "commit epoch 1 on warehouse" in page.inner_text(".steps")
    assert read_epochs(root / "payments" / "away").count_rows() == 400, "a plan changes nothing"
    page.click("button:has-text('Commit epoch 1 on warehouse')")
    page.wait_for_selector("h1:has-text('Recovered')")
    assert read_epochs(root / "payments" / "away").count_rows() == 800


def test_a_sink_is_given_up_with_the_evidence_and_a_reason(doubtful, page, sign_in):
    url, _ = doubtful
    sign_in(url)
    page.click("a:has-text('payments')")
    page.click("text=Settle by hand")
    page.fill("input[name=kept_at]", "s3://backup/away-1.parquet")
    page.fill("input[name=because]", "the warehouse burned down")
    page.click("button:has-text('Give epoch 1 up on warehouse: show the evidence')")
    assert "400 rows" in page.inner_text("main")
    page.click("button:text-is('Give epoch 1 up on warehouse')")
    page.click("text=Back to the pipeline")
    assert "s3://backup/away-1.parquet" in page.inner_text("main")
    assert "Alice (console)" in page.inner_text("main")


def test_text_stays_selected_and_focus_stays_while_the_page_refreshes(tmp_path, start, page):
    stage.healthy(tmp_path, "clicks", epochs=3)
    page.goto(start(tmp_path))
    page.click("a:has-text('clicks')")
    page.wait_for_selector(".ago")
    page.evaluate(
        "() => getSelection().selectAllChildren([...document.querySelectorAll('dd')].at(-1))"
    )
    selected = page.evaluate("getSelection().toString()")
    page.focus("text=All epochs")
    stage.healthy(tmp_path, "clicks", epochs=9)
    page.wait_for_selector("tbody a:text-is('8')")
    assert selected
    assert page.evaluate("getSelection().toString()") == selected
    assert "All epochs" in page.evaluate("document.activeElement.innerText")
    assert page.locator(".ago").first.inner_text().endswith(" ago)")
    assert page.get_attribute("time >> nth=0", "title")


def test_a_command_is_copied_and_runs_as_it_is(doubtful, page, sign_in):
    url, root = doubtful
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    sign_in(url)
    page.click("a:has-text('payments')")
    page.click(".copy")
    page.wait_for_selector("text=Copied")
    command = page.evaluate("navigator.clipboard.readText()")
    words = [sys.executable, "-m", "epochal.cli", *shlex.split(command)[1:]]
    ran = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert "commit epoch 1 on warehouse" in ran.stdout + ran.stderr
    assert ran.returncode in (0, 3), ran.stderr


def test_a_link_to_a_page_survives_signing_in_and_a_lost_session_is_said(doubtful, page):
    url, _ = doubtful
    key = key_of(page, url)
    page.goto(f"{url}/pipelines/{key}/epochs?outcome=committed")
    assert "/login?next=" in page.url
    page.fill("#user", "Alice")
    page.fill("#token", TOKEN)
    page.click("button:has-text('Sign in')")
    page.wait_for_url(f"{url}/pipelines/{key}/epochs?outcome=committed")
    page.goto(f"{url}/pipelines/{key}")
    page.context.clear_cookies()
    page.wait_for_selector("text=signed out: sign in again")
    page.goto(f"{url}/login?next=//evil.example/")
    assert page.get_attribute("input[name=next]", "value") == "/"


def key_of(page, url):
    status, text = fetch(url + "/api/status", Authorization=f"Bearer {TOKEN}")
    assert status == 200
    log = json.loads(text)["pipelines"][0]["log"]
    return console_key(log)


def test_wrong_tokens_are_slowed_by_address_in_the_form_and_as_bearer(doubtful):
    url, _ = doubtful
    answers = [fetch(url + "/api/status", Authorization=f"Bearer wrong{n}")[0] for n in range(25)]
    assert answers[:20] == [401] * 20
    assert set(answers[20:]) == {429}
    assert fetch(url + "/login", b"user=x&token=wrong")[0] == 429
    assert fetch(url + "/health")[0] == 200


def test_pages_are_kept_by_no_cache(shown):
    with urllib.request.urlopen(shown, timeout=30) as answer:
        assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1180])
def test_axe_finds_no_violation(doubtful, chromium, scheme, width):
    url, _ = doubtful
    context = chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
    )
    page = context.new_page()
    page.goto(f"{url}/login")
    found = {page.url: violations(page)}
    page.fill("#user", "Alice")
    page.fill("#token", TOKEN)
    page.click("button:has-text('Sign in')")
    page.wait_for_selector("h1:has-text('Pipelines')")
    found[page.url] = violations(page)
    page.click("a:has-text('payments')")
    page.wait_for_url("**/pipelines/*")
    found[page.url] = violations(page)
    address = page.url
    for part in ("epochs", "epochs/1", "recover", "resolve"):
        page.goto(f"{address}/{part}")
        found[page.url] = violations(page)
    context.close()
    assert {address: some for address, some in found.items() if some} == {}


def violations(page) -> list[str]:
    page.wait_for_load_state("load")
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:120]}" for one in found for node in one["nodes"]]


def test_a_taken_port_and_a_missing_folder_end_in_one_line_with_a_hint(tmp_path):
    command = [sys.executable, "-m", "epochal.cli", "console", "--checkpoints"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [*command, str(tmp_path), "--port", port], check=False, capture_output=True, text=True
        )
    assert (ended.returncode, "give another one with --port" in ended.stderr) == (1, True)
    ended = subprocess.run(
        [*command, str(tmp_path / "nowhere")], check=False, capture_output=True, text=True
    )
    assert (ended.returncode, "there is no folder" in ended.stderr) == (1, True)


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
    assert fetch(url + "/login", b"user=x&token=wrong")[0] == 403
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


def test_a_pipeline_that_is_not_there_is_reported_when_the_console_starts(capsys):
    _report_unknown(["nowhere:pipeline"])
    assert "--pipeline nowhere:pipeline can't be queried: " in capsys.readouterr().err


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
