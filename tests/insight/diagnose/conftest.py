"""A synthetic run in the folder of a test."""

from __future__ import annotations

import pytest

from tests.insight.diagnose.synthetic_run import SyntheticRun


@pytest.fixture
def run(tmp_path):
    def make(*settings, **options):
        return SyntheticRun(tmp_path, *settings, **options)

    return make
