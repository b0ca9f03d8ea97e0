"""Tests of the live page in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.base.records.incidents import read_heartbeats
from meshwright.base.records.run_folder import RunFolder
from meshwright.insight.watch.http_server import HttpServer
from meshwright.insight.watch.page.routes import make_page
from tests.insight.observe.watch.written_run import write_run
from tests.kit.small_run import SMALL
from tests.kit.written_rollouts import write_restarted_run

CHROMIUM = "/usr/bin/chromium"
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(not os.path.exists(CHROMIUM), reason=f"{CHROMIUM} is not installed")
SECONDS = 30_000
"""Milliseconds that the page has to show something; the machine may be busy."""


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def serve():
    servers: list[HttpServer] = []

    def start(*folders: Path) -> str:
        servers.append(HttpServer(make_page([RunFolder(folder) for folder in folders])))
        servers[-1].start()
        return servers[-1].address

    yield start
    for server in servers:
        server.stop()


class Visit:
    """A page in a browser, with what went wrong in it."""

    def __init__(self, browser: playwright.Browser, address: str, **settings) -> None:
        self.context = browser.new_context(reduced_motion="reduce", **settings)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.addresses: set[str] = set()
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.addresses.add(request.url.split("/")[2]))
        self.page.goto(address)
        self.page.wait_for_selector("#signals .figure", timeout=SECONDS)
        self.page.wait_for_selector("#curves canvas", timeout=SECONDS)
        self.expect("#heatmap .note", "seconds")

    def expect(self, selector: str, words: str) -> None:
        """Waits until an element contains the words. The page's policy forbids what `wait_for_function` does."""
        playwright.expect(self.page.locator(selector).first).to_contain_text(words, timeout=SECONDS)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def has_horizontal_scroll(self) -> bool:
        return self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")

    def close(self) -> None:
        self.context.close()


def test_page_of_a_finished_run_in_a_browser(browser, serve, tmp_path):
    hostile = "<img src=x onerror=alert(1)>"
    folder = write_run(tmp_path / hostile, spike=30)
    (folder / "attempts/0002/rank-00000.log").write_text("<script>document.title = 'broken'</script>\n")
    address = serve(folder)
    visit = Visit(browser, address, viewport={"width": 1280, "height": 900})
    page = visit.page
    assert "complete" in visit.text("#signals .badge")
    assert "120 of 120 steps" in visit.text("#signals .sentence")
    for words in ("Progress", "Exposed communication", "Recovery", "steps per second", "work at risk"):
        assert words in visit.text("#signals")
    assert "lost work" in visit.text("#goodput")
    assert "Rank 2 takes" in visit.text("#heatmap")
    assert "SIGKILL" in visit.text("#incidents")
    assert "published" in visit.text("#checkpoints")
    assert "activation" in visit.text("#memory")
    visit.expect(".log", "<script>")
    assert hostile in page.title()
    assert page.locator("img").count() == 0

    page.keyboard.press("?")
    playwright.expect(page.locator("dialog[open]")).to_have_count(1, timeout=SECONDS)
    assert "next section" in visit.text("dialog")
    page.keyboard.press("Escape")
    playwright.expect(page.locator("dialog[open]")).to_have_count(0, timeout=SECONDS)
    page.keyboard.press("h")
    step_time = page.locator("#heatmap .tools button", has_text="Step time")
    playwright.expect(step_time).to_have_attribute("aria-pressed", "true", timeout=SECONDS)
    page.keyboard.press("d")
    playwright.expect(page.locator("html")).to_have_attribute("data-theme", "dark", timeout=SECONDS)
    page.keyboard.press("+")
    visit.expect("#curves .note", "steps 30 to 89")
    page.keyboard.press("0")
    visit.expect("#curves .note", "steps 0 to 119")
    page.focus("#heatmap canvas")
    for key in ("ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    visit.expect("#heatmap .tip", "rank 2, step")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(300)
    assert not visit.has_horizontal_scroll()
    assert visit.problems == []
    assert visit.addresses == {address.split("/")[2]}
    visit.close()


def test_page_of_two_runs_overlays_curves_and_shows_what_differs(browser, serve, tmp_path):
    one = write_run(tmp_path / "first", steps=60, ranks=2, failed_at=None)
    other = write_run(tmp_path / "second", steps=40, ranks=2, failed_at=None, slow_rank=None, lr=1e-3)
    visit = Visit(browser, serve(one, other), viewport={"width": 1280, "height": 900})
    playwright.expect(visit.page.locator("#signals .run-signals")).to_have_count(2, timeout=SECONDS)
    assert "optimizer.lr" in visit.text("#configs")
    visit.expect("#curves .readout", "second")
    visit.page.keyboard.press("2")
    visit.expect("#heatmap", "No rank stands out")
    assert visit.page.title().startswith("second")
    visit.page.set_viewport_size({"width": 390, "height": 844})
    visit.page.wait_for_timeout(300)
    assert not visit.has_horizontal_scroll()
    assert visit.problems == []
    visit.close()


@pytest.mark.long
def test_page_shows_a_running_job_a_kill_the_restart_and_a_slow_rank(browser, serve, tmp_path):
    faults = "step.forward:rank1:slow=0.06x2,start.begin:slow=4#1"
    options = [
        "--steps",
        "100000",
        "--ranks",
        "3",
        "--run",
        "run",
        "--batch.global=6",
        "--batch.micro=2",
        "--checkpoint.every=20",
    ]
    code = f"from meshwright.base.cli import main; main({['train', *SMALL, *options]!r})"
    (tmp_path / "run").mkdir()
    environment = os.environ | {"MESHWRIGHT_FAULT": faults}
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        while not (tmp_path / "run/events/rank-00000.jsonl").exists():
            assert process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.1)
        visit = Visit(browser, serve(tmp_path / "run"), viewport={"width": 1280, "height": 900})
        visit.expect("#signals .badge", "progressing")
        visit.expect("#signals .sentence", "Rank 1 is slow")
        visit.expect("#heatmap", "Rank 1 takes")
        os.kill(read_heartbeats(RunFolder(tmp_path / "run"), 1)[1].pid, signal.SIGKILL)
        visit.expect("#signals .badge", "restarting")
        visit.expect("#incidents", "SIGKILL")
        visit.expect("#incidents", "Attempt 2")
        visit.expect("#signals .badge", "progressing")
        visit.expect("#incidents", "straggler")
        process.send_signal(signal.SIGTERM)
        visit.expect("#signals .badge", "stopped")
        assert process.wait(timeout=60) == 143
        assert visit.problems == []
        visit.close()
    finally:
        process.kill()
        process.wait()


def test_page_of_reinforcement_learning_shows_the_account_and_the_curves_of_rollouts(browser, serve, tmp_path):
    visit = Visit(browser, serve(write_restarted_run(tmp_path / "run").folder.root))
    visit.expect("#rollouts .account", "generated = ")
    visit.expect("#rollouts .account", "lost timeline")
    visit.expect("#rollouts .account", "75% of the step time")
    visit.page.wait_for_selector("#rollouts canvas", timeout=SECONDS)
    assert visit.page.locator("#rollouts canvas").count() == 5
    assert not visit.has_horizontal_scroll()
    assert visit.problems == []


def test_page_of_a_run_on_samples_has_no_rollouts(browser, serve, tmp_path):
    visit = Visit(browser, serve(write_run(tmp_path / "run", steps=20, failed_at=None)))
    assert visit.page.locator("#rollouts").is_hidden()
