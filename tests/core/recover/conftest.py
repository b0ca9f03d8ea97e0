"""Fixtures of the recovery tests: the undisturbed runs, created once per number of ranks or layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright import train
from tests.core.recover.recovery_runs import Runs, config


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


@pytest.fixture(scope="module")
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, golden: Callable[[int], Path]
) -> Callable[[str], Path]:
    """Returns the folder of an undisturbed run on one of the LAYOUTS of the test file, created once."""
    created: dict[str, Runs] = {}

    def get(name: str) -> Path:
        if name not in created:
            with pytest.MonkeyPatch.context() as patch:
                created[name] = Runs(tmp_path_factory.mktemp("undisturbed"), patch, golden)
                created[name].run("", *request.module.LAYOUTS[name])
        return created[name].folder

    return get
