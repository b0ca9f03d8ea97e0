"""The undisturbed run, made once for all tests of this room."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from recovering import Runs, config

from meshwright import train


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """An undisturbed run on so many ranks, made once."""
    made: dict[int, Path] = {}

    def get(ranks: int) -> Path:
        if ranks not in made:
            fault = os.environ.pop("MESHWRIGHT_FAULT", None)
            made[ranks] = tmp_path_factory.mktemp("golden") / "run"
            train(config(ranks=ranks), run=made[ranks], quiet=True)
            if fault is not None:
                os.environ["MESHWRIGHT_FAULT"] = fault
        return made[ranks]

    return get


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[int], Path]) -> Runs:
    return Runs(tmp_path, monkeypatch, golden)
