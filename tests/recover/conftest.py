"""Fixtures of the recovery tests: the undisturbed run, created once per number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from recovery_runs import Runs, config

from meshwright import train


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Returns the folder of an undisturbed run on a number of ranks, created once."""
    created: dict[int, Path] = {}

    def get(ranks: int) -> Path:
        if ranks not in created:
            fault = os.environ.pop("MESHWRIGHT_FAULT", None)
            created[ranks] = tmp_path_factory.mktemp("golden") / "run"
            train(config(ranks=ranks), run=created[ranks], quiet=True)
            if fault is not None:
                os.environ["MESHWRIGHT_FAULT"] = fault
        return created[ranks]

    return get


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[int], Path]) -> Runs:
    return Runs(tmp_path, monkeypatch, golden)
