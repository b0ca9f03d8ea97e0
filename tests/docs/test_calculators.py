"""The calculators of the handbook show what the planner computes, in a real browser."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.document_commands import ROOT

playwright = pytest.importorskip("playwright.sync_api")
sys.path.insert(0, str(ROOT / "docs" / "hooks"))

import calculators  # noqa: E402
import formulas  # noqa: E402

CHROMIUM = Path("/usr/bin/chromium")
NAMES = ("state", "ring", "volume", "bubble", "batch", "activations", "checkpoint")
PAGE = "".join(f'<div class="calculator" data-calculator="{name}"></div>' for name in NAMES)
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="chromium is not installed")


def test_formulas_page_has_every_calculator():
    text = (ROOT / "docs" / "handbook" / "formulas.md").read_text()
    assert [name for name in NAMES if f'data-calculator="{name}"' in text] == list(NAMES)
    assert text.count("data-calculator=") == len(NAMES)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calculators")
    (folder / "calculator-data.js").write_text(calculators.calculator_script())
    (folder / "calculators.js").write_text((ROOT / "docs" / "javascripts" / "calculators.js").read_text())
    scripts = '<script src="calculator-data.js"></script><script src="calculators.js"></script>'
    (folder / "page.html").write_text(f"<!doctype html><meta charset='utf-8'><body>{PAGE}{scripts}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        opened = browser.new_page()
        errors: list[str] = []
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.goto((folder / "page.html").as_uri())
        yield opened
        browser.close()
    assert not errors


def calculate(page, name: str, **settings: object) -> dict[str, float]:
    """Types the settings into the form of a calculator, and returns the exact values of its results."""
    place = page.locator(f"[data-calculator={name}]")
    for key, value in settings.items():
        control = place.locator(f"[name={key}]")
        if control.evaluate("control => control.tagName") == "SELECT":
            control.select_option(str(value))
        else:
            control.fill(str(value))
    rows = place.locator("[data-result]")
    return {
        rows.nth(i).get_attribute("data-result"): float(rows.nth(i).get_attribute("data-value"))
        for i in range(rows.count())
    }


@pytest.mark.parametrize("level", formulas.LEVELS)
@pytest.mark.parametrize(("model", "ranks"), [("llama-8b", 8), ("llama-70b", 256)])
def test_state_calculator_shows_the_memory_of_the_planner(page, level, model, ranks):
    shown = calculate(page, "state", model=model, level=level, ranks=ranks, accumulates=2)
    memory = formulas.state(model, level, ranks, 6)
    assert (shown["parameter"], shown["gradient"], shown["optimizer"]) == (
        memory.parameter,
        memory.gradient,
        memory.optimizer,
    )
    once = formulas.state(model, level, ranks, 1)
    assert calculate(page, "state", accumulates=1)["gradient"] == once.gradient


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_to_all", "send"])
@pytest.mark.parametrize("ranks", [2, 7, 512])
def test_ring_calculator_shows_the_wire_bytes_of_the_topology(page, collective, ranks):
    shown = calculate(page, "ring", collective=collective, message=3, ranks=ranks)
    assert shown["sent"] == pytest.approx(formulas.wire(collective, ranks) * 3e9, rel=1e-12)


@pytest.mark.parametrize("level", formulas.LEVELS)
@pytest.mark.parametrize(("ranks", "accumulation"), [(4, 1), (32, 5)])
def test_volume_calculator_shows_the_exact_communication_volume(page, level, ranks, accumulation):
    shown = calculate(page, "volume", level=level, ranks=ranks, accumulation=accumulation)
    assert shown["factor"] == pytest.approx(formulas.volume(level, ranks, accumulation), rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 4), ("zbv", 2), ("dualpipev", 2)]
)
def test_bubble_calculator_shows_the_bubble_of_the_schedule(page, schedule, stages):
    shown = calculate(page, "bubble", schedule=schedule, ranks=8, micro=24, stages=stages)
    assert shown["bubble"] == pytest.approx(formulas.bubble(schedule, 8, 24, stages), rel=1e-12)
    if "in_flight" in shown:
        assert shown["in_flight"] == formulas.in_flight(schedule, 8, 24)


def test_batch_calculator_multiplies_by_the_data_parallel_degree(page):
    shown = calculate(page, "batch", devices=96, tensor=4, pipeline=3, context=2, micro=3, accumulation=5)
    assert shown["global"] == formulas.global_batch(3, 96, 5, 4, 3, 2)
    assert calculate(page, "batch", devices=100)["degree"] != calculate(page, "batch", devices=100)["degree"]  # NaN


@pytest.mark.parametrize("mode", calculators.MODES)
def test_activation_calculator_shows_what_a_block_saves(page, mode):
    shown = calculate(page, "activations", model="llama-70b", mode=mode, micro=1, sequence=2048)
    assert shown["block"] == pytest.approx(formulas.block_bytes("llama-70b", mode, "data.sequence=2048"), rel=1e-9)


def test_checkpoint_calculator_uses_the_interval_of_young(page):
    shown = calculate(page, "checkpoint", stall=3, failures=5, restart=90)
    assert shown["interval"] == pytest.approx(formulas.checkpoint_interval(3, 18000), rel=1e-12)
    assert shown["lost"] == pytest.approx(formulas.lost_share(3, 18000, 90), rel=1e-12)


def test_coefficients_of_a_formula_that_is_not_affine_are_refused():
    with pytest.raises(ValueError, match="not affine"):
        calculators.fit(lambda n: n * n, calculators.identity, (1, 2, 3), "a square")
