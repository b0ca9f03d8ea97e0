"""One server of experiments for all tests of cards: importing torch again would take most of their time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from meshwright_practice.cards.runner import ExperimentRunner, RunLimits

from tests.practice.cards.fake_cards import PACKAGE


@pytest.fixture(scope="session")
def runner():
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{before}"
    with ExperimentRunner(RunLimits(60.0, 3 << 30), PACKAGE) as started:
        yield started
    os.environ["PYTHONPATH"] = before
