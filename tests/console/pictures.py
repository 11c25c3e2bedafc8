"""
Takes the pictures of docs/images: `python tests/console/pictures.py <new folder> <for pictures>`.

The first folder's name is in the pictures; the second one gets every page in both colours and at
both widths, to be looked at. One pipeline is running meanwhile, one has stopped
cleanly, one is in doubt.
"""

from __future__ import annotations

import shutil
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from console import stage  # noqa: E402  the tests are no package
from console.conftest import FLAGS, Console  # noqa: E402  the same
from playwright.sync_api import sync_playwright  # noqa: E402  the same
from servers.programs import program  # noqa: E402  the same

from epochal import Files, Session  # noqa: E402  the same

DESKTOP = {"width": 1180, "height": 820}
PHONE = {"width": 390, "height": 820}
EPOCHS_BEFORE = 60
IN_DOCS = {
    "console-pipelines": "pipelines-desktop-light",
    "console-pipeline": "pipeline-desktop-light",
    "console-in-doubt": "in-doubt-desktop-light",
    "console-recovery": "recovery-desktop-light",
    "console-phone-dark": "in-doubt-phone-dark",
}


@contextmanager
def running_driver(root: Path):
    """A driver that runs while pictures are taken."""
    is_over, is_warm = threading.Event(), threading.Event()

    def work() -> None:
        sinks = [Files(root / "orders" / name, name=name) for name in ("orders", "big")]
        with Session(
            "orders", sinks=sinks, log=root / "orders" / "log", schema=stage.SCHEMA
        ) as session:
            while not is_over.is_set():
                epoch = session.next_epoch
                session.begin(epoch)
                session.write(stage.rows(epoch, 2000 + (epoch * 37) % 900))
                session.commit()
                if epoch > EPOCHS_BEFORE:
                    is_warm.set()
                    is_over.wait(0.3)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert is_warm.wait(120)
        yield
    finally:
        is_over.set()
        worker.join()


@contextmanager
def console_of(root: Path):
    module = root / "jobs.py"
    module.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "import epochal\nfrom pathlib import Path\nfrom console import stage\n"
        f"root = Path({str(root)!r}) / 'payments'\n"
        "pipeline = epochal.Pipeline('payments', sinks=[epochal.Files(root / 'out', name='ledger'),"
        " stage.Stubborn(root / 'away', name='warehouse')], limits=stage.HASTY)\n",
        encoding="utf-8",
    )
    environment = {"CONSOLE_TOKEN": stage.TOKEN, "PYTHONPATH": str(root)}
    options = ["--token-env", "CONSOLE_TOKEN", "--pipeline", "jobs:pipeline"]
    console = Console(root, *options, environment=environment)
    try:
        yield console.url
    finally:
        console.stop()


def take(browser, url: str, images: Path, *, is_dark: bool, viewport: dict[str, int]) -> None:
    """Every page in one colour and one width."""
    scheme = "dark" if is_dark else "light"
    width = "phone" if viewport is PHONE else "desktop"
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    page = context.new_page()
    page.goto(url)
    page.fill("#user", "Alice")
    page.fill("#token", stage.TOKEN)
    page.click("button:has-text('Sign in')")

    def shoot(name: str) -> None:
        page.screenshot(path=images / f"{name}-{width}-{scheme}.png")

    page.wait_for_selector("h1:has-text('Pipelines')")
    shoot("pipelines")
    page.click("a:has-text('orders')")
    page.wait_for_selector("figure")
    shoot("pipeline")
    page.goto(url)
    page.click("a:has-text('payments')")
    page.wait_for_selector("a:has-text('Plan a recovery')")
    shoot("in-doubt")
    page.click("a:has-text('Plan a recovery')")
    page.wait_for_selector("h1:has-text('What a recovery would do')")
    shoot("recovery")
    context.close()


def main(root: Path, images: Path) -> None:
    stage.healthy(root, "clicks", epochs=5)
    stage.pipeline_in_doubt(root).close()
    path = program("chromium", package="chromium")
    with running_driver(root), console_of(root) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(path), args=FLAGS)
        for is_dark in (False, True):
            for viewport in (DESKTOP, PHONE):
                take(browser, url, images, is_dark=is_dark, viewport=viewport)
        browser.close()


if __name__ == "__main__":
    pipelines, pictures = Path(sys.argv[1]).absolute(), Path(sys.argv[2])
    pipelines.mkdir(parents=True)
    pictures.mkdir(parents=True)
    main(pipelines, pictures)
    for name, taken in IN_DOCS.items():
        shutil.copy(pictures / f"{taken}.png", ROOT / "docs" / "images" / f"{name}.png")
