"""`meshwright simulate` and `meshwright.simulate`: results, and one-line errors for layouts that cannot be built."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch.distributed as dist

import meshwright
from meshwright.base.cli import main
from meshwright.errors import ConfigError
from meshwright.prover.simulator.fake_ddp import bucket_counts
from tests.kit.small_run import load_cpu_config

SMALL = ["--model.vocab=64", "--model.width=32", "--model.heads=4", "--model.ffn=48", "--data.sequence=16"]


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """Runs the test in an empty folder, and checks that simulate writes neither a run folder nor anything else."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def simulate_json(capsys, *args: str):
    main(["simulate", *SMALL, *args, "--json"])
    return json.loads(capsys.readouterr().out)


def test_simulate_reports_communication_and_memory_of_selected_ranks(empty_folder, capsys):
    args = ["--ranks", "64", "--layout.shard=parameters", "--batch.global=64", "--model.layers=10"]
    answer = simulate_json(capsys, *args, "--rank", "3", "63")
    assert answer["ranks"] == 64
    assert [result["rank"] for result in answer["results"]] == [3, 63]
    for result in answer["results"]:
        assert {(row["axis"], row["collective"]) for row in result["communication"]} == {
            ("control", "all_reduce"),
            ("shard", "all_gather"),
            ("shard", "reduce_scatter"),
        }
        assert result["peak_total"] == sum(result["at_peak"].values()) > 0
        assert result["extrapolated"] == ["extrapolated from 4 and 5 to 10 blocks per stage"]
    main(["simulate", *SMALL, *args])
    shown = capsys.readouterr().out
    assert "shard 64 = 64 ranks" in shown
    assert "reduce_scatter" in shown


def test_simulate_pipeline_reports_first_and_last_stage_and_micro_batches_in_flight(empty_folder, capsys):
    answer = simulate_json(capsys, "--ranks", "8", "--layout.pipeline=4", "--batch.micro=1", "--model.layers=4")
    assert [result["rank"] for result in answer["results"]] == [0, 6]
    assert answer["in_flight"] == [4, 3, 2, 1]
    assert [result["max_in_flight"] for result in answer["results"]] == [4, 1]


def test_simulate_function_leaves_no_process_group(empty_folder):
    simulation = meshwright.simulate(load_cpu_config(overrides=SMALL), ranks=4, rank=[1])
    assert simulation.results[0].rank == 1
    assert any("DDP" in note for note in simulation.notes)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ranks", "9", "--layout.tensor=2"], "9 ranks"),
        (["--ranks", "6", "--layout.tensor=3"], "model.kv_heads"),
        (["--ranks", "1024"], "batch.global = 16"),
        (["--ranks", "2", "--rank", "2"], "rank 2 does not exist in layout replicate 2; expected 0 to 1"),
        (["--ranks", "many"], "--ranks = many"),
        (["--model.layers=100000000"], "model.layers = 100000000 is out of range"),
        (["--model.experts=1000000"], "model.experts = 1000000 is out of range"),
        (["--model.layers=16384"], "a step of 16,384 blocks and 1 micro-steps is too large to simulate"),
    ],
)
def test_simulate_reports_an_unsupported_layout_in_one_line(empty_folder, capsys, args, message):
    with pytest.raises(SystemExit) as exit_info:
        main(["simulate", *SMALL, *args])
    assert exit_info.value.code == 2
    line = capsys.readouterr().err
    assert message in line
    assert line.count("\n") == 1


def test_simulate_reports_an_error_of_torch_in_one_line(monkeypatch):
    from meshwright.prover.simulator import simulate

    def fail(*_args):
        raise RuntimeError("Stages do not match\n  at line 2")

    monkeypatch.setattr(simulate, "trace_steps", fail)
    expected = r"layout replicate 2, rank 0: torch cannot build this layout: Stages do not match; try another layout"
    with pytest.raises(ConfigError, match=expected):
        meshwright.simulate(load_cpu_config(overrides=SMALL))


def test_interrupted_simulation_destroys_the_fake_process_group(monkeypatch):
    from meshwright.prover.simulator import simulate

    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "trace_steps", interrupt)
    with pytest.raises(KeyboardInterrupt):
        meshwright.simulate(load_cpu_config(overrides=SMALL))
    assert not dist.is_initialized()


def test_simulation_text_does_not_import_torch():
    modules = "meshwright.prover.simulator.simulation_text, meshwright.core.api"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ddp_bucket_is_full_at_its_capacity():
    assert bucket_counts([4, 4, 4, 4, 4], 8) == [2, 2, 1]
    assert bucket_counts([4, 9, 4], 8) == [2, 1]
    assert bucket_counts([], 8) == []
