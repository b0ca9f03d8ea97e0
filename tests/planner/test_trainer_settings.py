"""What a plan for another trainer takes from a run: its precision; settings that no profile models are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.base.hardware.cluster import preset_cluster
from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.search.candidate import Candidate, candidate_job
from meshwright.planner.workload.trainer_profile import with_matmul_precision
from meshwright.planner.workload.trainer_profiles import TRAINERS
from meshwright.planner.workload.workload_args import build_workload, for_trainer

UNMODELLED = {
    "[lora]\nrank = 8\n": "lora.rank; expected lora.rank = 0",
    '[optimizer]\nkind = "muon"\n': "optimizer.kind; expected optimizer.kind = adamw",
    '[[optimizer.groups]]\npattern = "*.attention.*"\nfrozen = true\n': "optimizer.groups; expected no frozen group",
    '[rl]\nobjective = "grpo"\n': "rl.objective; expected rl.objective = none",
    "[precision]\nfloat8 = true\n": "precision.float8; try --precision fp8",
}


@pytest.mark.parametrize("section", UNMODELLED)
def test_settings_of_a_run_file_that_a_profile_does_not_model_are_refused(tmp_path: Path, section: str) -> None:
    run = tmp_path / "run.toml"
    run.write_text('preset = "small"\n' + section)
    with pytest.raises(ConfigError) as raised:
        for_trainer(build_workload(str(run)), "megatron")
    assert f"the profile of megatron does not model {UNMODELLED[section]}" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert for_trainer(build_workload(str(run)), "meshwright").base_config is not None


def test_refused_setting_ends_the_command_with_one_line(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('preset = "small"\n[lora]\nrank = 8\n')
    command = [sys.executable, "-m", "meshwright", "plan", str(run), "--trainer", "torchtitan"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("does not model lora.rank") == 1


def test_settings_without_effect_on_a_plan_are_accepted(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('preset = "small"\n[optimizer]\nlr = 0.1\n[[optimizer.groups]]\npattern = "*"\nlr_factor = 2.0\n')
    assert for_trainer(build_workload(str(run)), "megatron").trainer is not None


@pytest.mark.parametrize("name", [name for name in TRAINERS if not name.startswith("meshwright")])
def test_float32_of_every_trainer_stores_no_16_bit_copies(name: str) -> None:
    narrow, wide = TRAINERS[name], with_matmul_precision(TRAINERS[name], "fp32")
    moments = 4 if name == "hai-llm" else 8
    assert (wide.parameter_bytes, wide.gradient_bytes, wide.accumulation_bytes, wide.optimizer_bytes) == (
        4,
        4,
        0,
        moments,
    )
    assert (wide.gather_bytes, wide.reduce_bytes, wide.stage_output_bytes) == (4, 4, 4)
    assert with_matmul_precision(narrow, "bf16") == narrow


@pytest.mark.parametrize(("precision", "expected"), [("bf16", (2, 4, 12)), ("fp32", (4, 4, 8))])
def test_plan_for_megatron_has_the_bytes_per_parameter_of_its_precision(
    precision: str, expected: tuple[int, ...]
) -> None:
    work = for_trainer(build_workload("llama-8b", batch=8, precision=precision), "megatron-2024")
    job = candidate_job(work, preset_cluster("h200", 8), Candidate(Layout(1, 8, 1, 1, 1, 1), 1))
    memory = estimate(job).peak_memory
    stored = [memory.parameters, memory.gradients, memory.optimizer]
    assert stored == pytest.approx([size * job.model.parameters for size in expected], rel=1e-3)
