"""The practice page in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os

import pytest
from meshwright_practice.cards.answers import shown_claims
from meshwright_practice.page.routes import serve_page
from meshwright_practice.progress import PracticeProgress, load_progress, progress_file, save_progress

from tests.practice.cards.fake_cards import CHOSEN, PICTURED, PREDICTED
from tests.practice.cards.test_practice_page import KeptRunner

CHROMIUM = "/usr/bin/chromium"
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(not os.path.exists(CHROMIUM), reason=f"{CHROMIUM} is not installed")
SECONDS = 60_000
"""Milliseconds that the page has to show something; the machine may be busy."""
CARDS = {card.id: card for card in (PREDICTED, CHOSEN, PICTURED)}
SHOTS = os.environ.get("MESHWRIGHT_SHOTS", "")
"""A folder for screenshots, for a person to look at."""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def visit(browser, runner, home):
    """Opens the page in a window; what goes wrong in it is an error of the test."""
    server, stop = serve_page(cards=CARDS, runner=KeptRunner(runner))
    contexts, problems, hosts = [], [], set()

    def open_page(place="", **settings):
        contexts.append(browser.new_context(reduced_motion="reduce", **settings))
        page = contexts[-1].new_page()
        page.set_default_timeout(SECONDS)
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.goto(server.address + place)
        return page

    yield open_page
    # Chromium reports every answer of 400, which a wrong input has.
    assert [problem for problem in problems if "status of 400" not in problem] == []
    assert hosts == {server.address.split("/")[2]}
    for context in contexts:
        context.close()
    stop()


def expect(page, selector, words):
    playwright.expect(page.locator(selector).first).to_contain_text(words, timeout=SECONDS)


def fits(page, name):
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/{name}.png", full_page=True)
    return not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


SIZES = {"laptop": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}


def test_a_review_from_the_queue_to_the_explanation(visit):
    page = visit(viewport=SIZES["laptop"])
    expect(page, "h1", "3 cards for today")
    page.get_by_text("Start the review").click()
    expect(page, ".asked", "How many bytes")
    expect(page, ".note", "1 of 3")
    page.fill(".field input", "many")
    page.click("button.primary")
    expect(page, ".message", "expected a number")
    page.fill(".field input", "2*8")
    page.keyboard.press("Enter")
    expect(page, ".badge", "easy")
    expect(page, ".grades", "exact")
    expect(page, ".picture", "doubled")
    expect(page, ".relations", "Twice the size is sent.")
    expect(page, ".mistake", "Every byte is sent once.")
    page.get_by_text("Next card").click()
    expect(page, ".asked", "<img src=x onerror=alert(1)>")
    expect(page, ".note", "2 of 3")
    assert page.locator("img").count() == 0
    for letter, claim in shown_claims(PICTURED):
        if claim.relation.holds({"size": 8.0, "doubled": 16.0}):
            page.locator(".claim input").nth("abcd".index(letter)).check()
    page.click("button.primary")
    expect(page, ".badge", "easy")
    assert len(load_progress(progress_file(), pytest.fail).cards) == 2


@pytest.mark.parametrize("size", list(SIZES))
def test_every_picture_is_drawn_and_fits(visit, size):
    page = visit("#/card/fake-pictures", viewport=SIZES[size], color_scheme="dark" if size == "phone" else "light")
    page.get_by_text("Read without running").click()
    expect(page, ".short", "Twice the size.")
    shapes = {
        "bars": (".stack i", 4),
        "timeline": ("rect.span", 32),
        "heat map": ("svg rect", 32),
        "curves": ("path.line", 2),
    }
    for name, (selector, count) in shapes.items():
        page.select_option("select[name=picture]", name)
        page.click("button.again")
        playwright.expect(page.locator(f".picture {selector}")).to_have_count(count, timeout=SECONDS)
        playwright.expect(page.locator("button.again")).to_be_enabled(timeout=SECONDS)
        assert fits(page, f"{size}-{name}")
    assert load_progress(progress_file(), pytest.fail).cards == {}


def test_deck_progress_and_handbook_on_a_phone(visit):
    lab = {"passed": False, "attempts": 2, "checks_passed": 3, "checks": 8}
    save_progress(PracticeProgress(labs={"<b>ring</b>": lab}), progress_file())
    page = visit("#/deck", viewport=SIZES["phone"])
    expect(page, "h2", "communication")
    assert fits(page, "phone-deck")
    page.get_by_role("link", name="Progress").click()
    expect(page, ".labs", "3 of 8")
    expect(page, ".labs", "<b>ring</b>")
    expect(page, "main", "meshwright practice incident")
    assert fits(page, "phone-progress")
    page.get_by_role("link", name="Handbook").click()
    expect(page, "h2", "Handbook")
    assert fits(page, "phone-handbook")
    page.click("#theme")
    playwright.expect(page.locator("html")).to_have_attribute("data-theme", "dark", timeout=SECONDS)
    page.get_by_role("link", name="Today").click()
    expect(page, "h1", "3 cards for today")
    assert fits(page, "phone-today")
