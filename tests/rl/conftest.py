"""Fixtures of runs of reinforcement learning: the undisturbed run, created once per staleness bound."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright import train
from tests.rl.rl_runs import RLRuns, assert_rollout_rules, final_digest, processes_left, rl_config, temporary_files


@pytest.fixture(scope="session")
def rl_golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The digest of an undisturbed run with a staleness bound on some ranks, created once."""
    digests: dict[tuple[int, int], str] = {}

    def get(staleness: int, ranks: int = 1) -> str:
        if (staleness, ranks) not in digests:
            fault = os.environ.pop("MESHWRIGHT_FAULT", None)
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            train(rl_config(f"--rl.staleness={staleness}", ranks=ranks), run=folder, quiet=True)
            assert_rollout_rules(folder, staleness)
            digests[staleness, ranks] = final_digest(folder)
            if fault is not None:
                os.environ["MESHWRIGHT_FAULT"] = fault
        return digests[staleness, ranks]

    return get


@pytest.fixture
def rl_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rl_golden: Callable[..., str]) -> Iterator[RLRuns]:
    """Whatever happens to a run, it leaves no process, and no file in the folder of temporary files."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    runs = RLRuns(tmp_path / "run", monkeypatch, rl_golden)
    yield runs
    assert not temporary_files()
    assert not processes_left(runs.folder)
