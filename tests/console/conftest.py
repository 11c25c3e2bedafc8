"""A console process over pipelines of real sessions, and a Chromium."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from console import stage
from console.stage import TOKEN
from playwright.sync_api import sync_playwright
from servers.ports import free_port
from servers.programs import program

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The folder of the pipelines."""
    root = tmp_path_factory.mktemp("pipelines")
    stage.healthy(root, "orders", epochs=120, refuse=117)
    return root


class Console:
    def __init__(self, root, *more, environment=None):
        self.port = free_port()
        self.output = ""
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "epochal.cli", "console"]
        self.process = subprocess.Popen(
            [*command, "--checkpoints", str(root), "--port", str(self.port), *more],
            env={**os.environ, **(environment or {})},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._await()

    def _await(self):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        self.stop()
        raise AssertionError(f"the console did not start: {self.output}")

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        self.output = self.output or self.process.stderr.read()
        self.process.stderr.close()


@pytest.fixture
def start():
    """Starts consoles, and stops them in the end."""
    started = []

    def start(root, *more, **environment):
        started.append(Console(root, *more, environment=environment))
        return started[-1].url

    yield start
    for console in started:
        console.stop()


@pytest.fixture(scope="module")
def shown(made):
    """The URL of a read-only console."""
    console = Console(made)
    yield console.url
    console.stop()


@pytest.fixture
def doubtful(tmp_path, start):
    """A pipeline in doubt, and a console that may act on it: its address and its folder."""
    stage.pipeline_in_doubt(tmp_path).close()
    module = tmp_path / "job_in_doubt.py"
    module.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(stage.__file__).parent.parent)!r})\n"
        "import epochal\nfrom pathlib import Path\nfrom console import stage\n"
        f"root = Path({str(tmp_path)!r}) / 'payments'\n"
        "pipeline = epochal.Pipeline('payments', sinks=[epochal.Files(root / 'out', name='ledger'),"
        " stage.Stubborn(root / 'away', name='warehouse')], limits=stage.HASTY)\n",
        encoding="utf-8",
    )
    url = start(
        tmp_path,
        "--token-env",
        "CONSOLE_TOKEN",
        "--pipeline",
        "job_in_doubt:pipeline",
        CONSOLE_TOKEN=TOKEN,
        PYTHONPATH=str(tmp_path),
    )
    return url, tmp_path


@pytest.fixture(scope="session")
def chromium():
    path = program("chromium", package="chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(path), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page that fails the test on any complaint of the browser, policy violations included."""
    complaints = []
    context = chromium.new_context(viewport={"width": 1180, "height": 800})
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda message: complaints.append(message.text) if message.type == "error" else None,
    )
    page.complaints = complaints
    yield page
    context.close()
    assert complaints == []


@pytest.fixture
def sign_in(page):
    def sign_in(url):
        page.goto(url)
        page.fill("#user", "Alice")
        page.fill("#token", TOKEN)
        page.click("button:has-text('Sign in')")
        page.wait_for_selector("h1:has-text('Pipelines')")

    return sign_in
