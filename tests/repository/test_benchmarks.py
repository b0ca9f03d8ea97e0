"""Every benchmark can be imported with the product as it is; running them takes minutes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

MODULES = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_benchmarks_can_be_imported(module):
    importlib.import_module(f"benchmarks.{module}")
