"""Every benchmark can be imported with the product as it is; running them takes minutes."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

MODULES = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_benchmarks_can_be_imported(module):
    importlib.import_module(f"benchmarks.{module}")


def test_every_benchmark_that_has_a_name_is_run_by_it():
    from benchmarks.__main__ import BENCHMARKS

    suite = (Path(__file__).parents[2] / "benchmarks" / "suite.py").read_text()
    assert sorted(re.findall(r'if "(\w+)" in args\.only:', suite)) == sorted(BENCHMARKS)
