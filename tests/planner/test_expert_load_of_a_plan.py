"""The load of experts that a plan counts with: stated, or measured by a finished run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshwright
from meshwright.base.cli.main import main
from meshwright.base.hardware.cluster import preset_cluster
from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError
from meshwright.planner.search.candidate import Candidate, candidate_job
from meshwright.planner.workload.expert_load_file import with_expert_load
from tests.planner.planned_cases import untrainable_workload


def write_run(folder: Path, loads: object) -> Path:
    """A run folder with one record of expert loads."""
    (folder / "events").mkdir(parents=True)
    events = [
        {"kind": "start", "attempt": 1, "rank": 0, "time": 1.0},
        {"kind": "experts", "attempt": 1, "rank": 0, "time": 2.0, "step": 5, "loads": loads, "dropped": [0, 0]},
    ]
    (folder / "events" / "rank-00000.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_measured_loads_give_the_imbalance_of_every_expert_degree(tmp_path: Path) -> None:
    work = untrainable_workload()
    half = work.model.experts // 2
    run = write_run(tmp_path / "run", [[3] * half + [1] * half, [1] * (2 * half)])
    work = with_expert_load(work, run)
    cluster = preset_cluster("h100", 16)
    for expert, expected in ((1, 1.0), (2, 1.25)):
        candidate = Candidate(Layout(1, 1, 16, 1, 1, expert), 1, "optimizer")
        assert candidate_job(work, cluster, candidate).expert_imbalance == expected


def test_an_uneven_load_slows_the_plan_of_the_command_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [[3, 1, 1, 1, 1, 1, 1, 1]])
    command = ["plan", "mixtral-8x7b", "--cluster", "h100:8", "--batch", "64", "--layout.expert=8", "--json"]
    seconds = []
    for load in ([], ["--expert-load", "1.5"], ["--expert-load", str(run)]):
        main([*command, *load])
        seconds.append(json.loads(capsys.readouterr().out)["plan"]["seconds"])
    assert seconds == sorted(seconds)
    assert seconds[1] > 1.05 * seconds[0]


def test_python_takes_the_same_load() -> None:
    options = {"cluster": "h100:8", "batch": 64, "overrides": ["layout.expert=8"]}
    even, uneven = (meshwright.plan("mixtral-8x7b", **options, expert_load=load) for load in (None, 1.5))  # type: ignore[arg-type]
    assert uneven.chosen.seconds > even.chosen.seconds


@pytest.mark.parametrize("load", [0.5, "nan", "inf", 1e9])
def test_loads_out_of_range_are_refused(load: float | str) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        with_expert_load(untrainable_workload(), load)


def test_a_run_of_other_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 2 experts"):
        with_expert_load(untrainable_workload(), write_run(tmp_path / "other", [[1, 2]]))
    with pytest.raises(ConfigError, match="recorded no loads"):
        with_expert_load(untrainable_workload(), write_run(tmp_path / "damaged", "none"))
    with pytest.raises(ConfigError, match="not a run folder"):
        with_expert_load(untrainable_workload(), tmp_path / "missing")


def test_a_model_without_experts_has_no_load() -> None:
    with pytest.raises(ConfigError, match="without experts"):
        meshwright.plan("llama-8b", "h100:8", expert_load=1.2)
