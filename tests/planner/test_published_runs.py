"""Published runs are read as they are meant: degrees, software, flags, FLOP conventions and unstated settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.hardware.cluster import preset_cluster
from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError
from meshwright.planner.calibration.published.published_figures import parse_memory
from meshwright.planner.calibration.published.published_runs import parse_run, read_published_runs
from meshwright.planner.calibration.replay import replay, replay_run
from meshwright.planner.search.candidate import Candidate, candidate_trainer
from meshwright.planner.workload import trainer_profiles
from meshwright.planner.workload.trainer_profile import with_matmul_precision
from meshwright.planner.workload.trainer_profiles import BRIDGE, TORCHTITAN, TRAINERS, trainer_profile
from tests.planner.planned_cases import untrainable_workload

PUBLISHED_RUNS = Path(__file__).parents[2] / "examples" / "published_runs.json"
LLAMA_70B = {
    "layers": 80,
    "hidden": 8192,
    "ffn": 28672,
    "heads": 64,
    "kv_heads": 8,
    "vocab": 128256,
    "gated": True,
    "tied": False,
    "seq": 8192,
}


def run_row(**changes: Any) -> dict[str, Any]:
    """A run of Llama 70B on 64 H100, with 8-way tensor and 2-way pipeline parallelism."""
    row = {
        "id": "one",
        "source": "NVIDIA/Megatron-LM 2024",
        "gpu": "H100-80",
        "gpus": 64,
        "model": LLAMA_70B,
        "layout": {"dp": 4, "tp": 8, "pp": 2, "vpp": 5, "sharding": "zero1"},
        "micro_batch": 1,
        "global_batch": 128,
        "recompute": "full",
        "precision": "bf16",
        "reported": {"step_time_s": 30.0},
    }
    return row | changes


def excluded_reason(tmp_path: Path, row: dict[str, Any]) -> str:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([row]))
    runs, excluded = read_published_runs(path)
    assert not runs
    return excluded[row["id"]]


# Degrees.


def test_missing_data_parallel_degree_is_derived_from_the_devices() -> None:
    run = parse_run(run_row(layout={"tp": 8, "pp": 2, "vpp": 5, "sharding": "zero1"}), "one")
    assert run.job.layout.ranks == 64
    assert run.job.layout.data_degree == 4
    assert run.derived == ("dp = 4, derived from gpus / (tp x pp x cp)",)
    assert run.fully_stated  # it follows from what the run states


def test_degrees_that_contradict_the_devices_exclude_the_run(tmp_path: Path) -> None:
    contradictions = {
        "dp x tp x pp x cp = 128 is not gpus = 64": {"dp": 8, "tp": 8, "pp": 2},
        "gpus = 64 is not a multiple of tp x pp x cp = 24": {"tp": 8, "pp": 3},
        "it states no layout": {},
        "ep = 3 does not divide dp x cp x tp": {"tp": 8, "pp": 2, "ep": 3},
    }
    for reason, layout in contradictions.items():
        assert reason in excluded_reason(tmp_path, run_row(layout=layout))
    assert "global_batch = 2 is less than dp = 4" in excluded_reason(tmp_path, run_row(global_batch=2))


def test_sharded_run_without_degrees_is_data_parallel() -> None:
    run = parse_run(run_row(layout={"sharding": "fsdp"}), "one")
    assert (run.job.layout.shard, run.job.sharding) == (64, "parameters")


@pytest.mark.parametrize(
    "changes",
    [
        {"notes": "LoRA fine-tune"},
        {"notes": "lora r=16"},
        {"source": "org/repo (QLoRA table)"},
        {"model": LLAMA_70B | {"name": "llama-70b-PEFT"}},
        {"software": "Megatron-Bridge, adapter-only training"},
        {"id": "llama_lora_64"},
    ],
)
def test_adapter_fine_tuning_is_excluded_in_any_spelling(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert "trains adapters only" in excluded_reason(tmp_path, run_row(**changes))


def test_run_that_names_adapters_to_deny_them_is_kept() -> None:
    assert parse_run(run_row(notes="full fine-tuning, not LoRA; 4 network adapters per node"), "one").seconds == 30.0


# Figures.


@pytest.mark.parametrize(
    ("convention", "per_token"),
    [
        ("model_6N_plus_full_attention", 12),
        ("model_causal_half_attention", 6),
        ("hardware_8N_with_recompute", 16),
    ],
)
def test_step_time_follows_from_flops_with_the_convention_of_the_source(convention: str, per_token: int) -> None:
    run = parse_run(run_row(reported={"tflops_per_gpu": 400}, flops_convention=convention), "one")
    attention = per_token * 80 * 64 * 128 * 8192
    blocks = 80 * (8192 * 128 * (2 * 64 + 2 * 8) + 3 * 8192 * 28672)
    head = 128256 * 8192
    matmuls = 8 * blocks + 6 * head if "8N" in convention else 6 * (blocks + head)
    assert run.seconds == pytest.approx(128 * 8192 * (matmuls + attention) / (400e12 * 64))
    assert "tflops_per_gpu" in run.derived[0]


def test_mfu_and_percentages_of_it_are_fractions_of_the_bf16_peak() -> None:
    flops = parse_run(run_row(reported={"tflops_per_gpu": 0.4 * 989}), "one").seconds
    assert parse_run(run_row(reported={"mfu": 0.4}), "one").seconds == pytest.approx(flops)
    assert parse_run(run_row(reported={"mfu": 40}), "one").seconds == pytest.approx(flops)


def test_converted_flops_agree_with_the_step_times_of_the_same_runs() -> None:
    """Narayanan et al. and MosaicML print FLOPs, from which the collector computed the step time."""
    checked = 0
    for row in json.loads(PUBLISHED_RUNS.read_text()):
        if not row["id"].startswith(("sc21", "mosaic")) or "tflops_per_gpu" not in row["reported"]:
            continue
        measured = parse_run(row, row["id"]).seconds
        flops_only = {"tflops_per_gpu": row["reported"]["tflops_per_gpu"]}
        converted = parse_run(row | {"reported": flops_only, "derived": {}}, row["id"]).seconds
        assert converted == pytest.approx(measured, rel=0.03)
        checked += 1
    assert checked >= 10


# Software.


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md", "torchtitan 2024"),
        ("pytorch/torchtitan benchmarks/llama3_2025-11.md", "torchtitan 2025"),
        ("NVIDIA-NeMo/Megatron-Bridge docs line 1 (25.09 container)", "Megatron-Bridge 2025"),
        ("NVIDIA-NeMo/Megatron-Bridge docs line 1 (26.02.01 container)", "Megatron-Bridge 2026"),
        ("NVIDIA/NeMo-Framework-Launcher 24.05", "Megatron-LM 2024"),
        ("MegaScale arXiv:2402.15627", "Megatron-LM 2024"),
        ("Smith et al. 2022 MT-NLG arXiv:2201.11990", "Megatron-DeepSpeed 2022 bf16"),
        ("NVIDIA-NeMo/Automodel docs", "Automodel 2025"),
        ("huggingface/nanotron", "nanotron 2025"),
    ],
)
def test_software_is_found_by_source_and_year(source: str, name: str) -> None:
    assert parse_run(run_row(source=source), "one").job.trainer.name == name


def test_software_field_takes_precedence_over_the_source() -> None:
    run = parse_run(run_row(source="org/blog", software="torchtitan, Nov 2025"), "one")
    assert run.job.trainer.name == "torchtitan 2025"
    assert run.fully_stated


def test_unknown_software_is_said_to_be_unknown_and_has_a_wide_interval() -> None:
    known, unknown = parse_run(run_row(), "known"), parse_run(run_row(source="org/blog"), "unknown")
    assert unknown.job.trainer.name == "unknown (like Megatron-LM 2024)"
    assert unknown.assumptions == ("software unknown (like Megatron-LM 2024)",)
    assert not unknown.fully_stated
    narrow, wide = replay_run(known).estimate, replay_run(unknown).estimate
    assert wide.interval_high / wide.seconds > narrow.interval_high / narrow.seconds + 0.1
    sharded = parse_run(run_row(source="org/blog", layout={"sharding": "fsdp"}), "sharded")
    assert sharded.job.trainer.name == "unknown (like torchtitan 2025)"


TITAN = "pytorch/torchtitan benchmarks/2025-06.md"


def test_compile_and_the_memory_of_the_loss_follow_the_stated_flag() -> None:
    layout = {"dp": 8, "tp": 8, "pp": 1, "sharding": "fsdp"}
    eager = parse_run(run_row(source=TITAN, layout=layout), "eager").job.trainer
    compiled = parse_run(run_row(source=TITAN, layout=layout, notes="bf16, compile"), "compiled").job.trainer
    assert eager == trainer_profiles.TORCHTITAN
    assert compiled == trainer_profiles.TORCHTITAN_COMPILED
    assert (eager.logit_bytes, compiled.logit_bytes) == (0, 4)
    assert parse_run(run_row(source=TITAN, layout=layout, notes="without compile"), "no").job.trainer == eager
    assert parse_run(run_row(source=TITAN, layout=layout, compile=True), "field").job.trainer == compiled
    float8 = parse_run(run_row(source=TITAN, layout=layout, precision="fp8"), "float8").job.trainer
    assert float8 == compiled  # which its float8 needs
    earlier = "pytorch/torchtitan 202412"
    assert parse_run(run_row(source=earlier, layout=layout, notes="compile"), "2024").job.trainer.logit_bytes == 0


def test_async_tensor_parallelism_is_faster_and_rowwise_float8_slower() -> None:
    layout = {"dp": 8, "tp": 8, "pp": 1, "sharding": "fsdp"}
    rows = {
        notes: run_row(source=TITAN, layout=layout, precision="fp8", notes=f"compile {notes}")
        for notes in ("tensorwise", "tensorwise asyncTP", "rowwise asyncTP")
    }
    seconds = {notes: replay_run(parse_run(row, "one")).estimate.seconds for notes, row in rows.items()}
    assert seconds["tensorwise asyncTP"] < seconds["tensorwise"]
    assert seconds["rowwise asyncTP"] > seconds["tensorwise asyncTP"]


def test_only_torchtitan_splits_the_batch_of_a_rank_over_stages() -> None:
    layout = {"dp": 4, "tp": 8, "pp": 2, "sharding": "fsdp"}
    rows = [run_row(source=source, layout=layout, micro_batch=4) for source in (TITAN, "NVIDIA-NeMo/Automodel docs")]
    micro = [parse_run(row, "one").job.batch.micro for row in rows]
    assert micro == [16, 4]


# Unstated settings.


def test_unstated_interleaving_is_an_assumption_whose_range_is_in_the_interval() -> None:
    stated = parse_run(run_row(layout={"dp": 4, "tp": 8, "pp": 2, "vpp": 8, "sharding": "zero1"}), "stated")
    unstated = parse_run(run_row(layout={"dp": 4, "tp": 8, "pp": 2, "sharding": "zero1"}), "unstated")
    assert not stated.assumptions
    assert unstated.assumptions == ("8 stages per pipeline rank, which the run does not state",)
    assert {job.stages_per_rank for job in unstated.alternatives[0]} == {1, 40}
    narrow, wide = replay_run(stated).estimate, replay_run(unstated).estimate
    assert narrow.seconds == wide.seconds
    assert wide.interval_high > narrow.interval_high
    plain = run_row(layout={"dp": 4, "tp": 8, "pp": 2, "schedule": "1f1b", "sharding": "zero1"})
    assert parse_run(plain, "1f1b").job.stages_per_rank == 1


def test_least_activation_checkpointing_that_fits_is_assumed() -> None:
    def assumed(**changes: Any) -> Any:
        row = run_row(**changes)
        del row["recompute"]
        return parse_run(row, "one")

    small = assumed(model=LLAMA_70B | {"layers": 16})
    assert small.job.activation_checkpoint == "none"
    large = assumed(micro_batch=8)
    assert large.job.activation_checkpoint == "full"
    assert large.assumptions == ("full activation checkpointing, the least that fits",)
    assert replay_run(large).fits
    assert not replay_run(replace(large, job=replace(large.job, activation_checkpoint="none"))).fits


def test_sharding_that_is_not_stated_is_that_which_fits() -> None:
    row = run_row(layout={"dp": 64, "tp": 1, "pp": 1}, source="NVIDIA-NeMo/Megatron-Bridge (25.09 container)")
    run = parse_run(row, "one")
    assert run.job.sharding == "parameters"
    assert "parameters sharded over data-parallel ranks, because the run does not fit otherwise" in run.assumptions


def test_allocator_slack_alone_does_not_make_a_run_out_of_memory() -> None:
    run = parse_run(run_row(), "one")
    memory = replay_run(run).estimate.peak_memory
    assert memory.tensors + memory.context < memory.required < memory.total
    device = replace(run.job.cluster.device, memory=memory.total - memory.slack / 2)
    tight = replace(run, job=replace(run.job, cluster=replace(run.job.cluster, device=device)))
    assert replay_run(tight).fits
    assert not replay_run(tight).estimate.fits  # a plan keeps the slack


def test_run_that_ran_and_is_predicted_not_to_fit_is_a_false_out_of_memory_unless_it_was_made_to_fit(
    tmp_path: Path,
) -> None:
    """The least activation checkpointing that fits is assumed if a run states none, so that it cannot fail to fit."""
    path = tmp_path / "runs.json"
    failing = run_row(micro_batch=64, global_batch=256, source="org/blog")
    path.write_text(json.dumps([failing, run_row(source="org/blog", id="two"), run_row(id="three", recompute=None)]))
    replayed = replay(path)
    assert replayed["records"][0]["assumed"]
    scores = {score["source"]: (score["false_out_of_memory"], score["completed_runs"]) for score in replayed["scores"]}
    assert scores["org/blog"] == scores["all"] == (1, 2)
    assert scores["NVIDIA/Megatron-LM"] == (0, 0)


# Memory and trainers.


def test_memory_of_torch_is_in_gib_and_that_of_nvidia_smi_in_gb() -> None:
    assert parse_memory({"memory_gb": 40}, "") == (40 * 2**30, "reserved")
    assert parse_memory({"memory_gb": 40}, "by nvidia-smi") == (40e9, "total")
    assert parse_memory({"memory_gb_params_opt": 3, "memory_gb_activations": 5.5}, "") == (8.5 * 2**30, "tensors")
    assert parse_memory({"memory_gb": None, "memory_gb_activations": 5.5}, "") == (None, "total")


@pytest.mark.parametrize("field", ["framework", "trainer", "software", "notes"])
@pytest.mark.parametrize("text", ["torchtune LoRA", "DoRA", "QLoRA of all layers", "peft"])
def test_run_that_trains_adapters_is_excluded(tmp_path: Path, field: str, text: str) -> None:
    assert "it trains adapters only" in excluded_reason(tmp_path, run_row(**{field: text}))


@pytest.mark.parametrize("text", ["not using LoRA", "no LoRA", "without any DoRA", "non-PEFT"])
def test_run_without_adapters_is_not_excluded(text: str) -> None:
    assert parse_run(run_row(notes=text), "one").seconds == 30.0


def test_trainers_are_found_by_name() -> None:
    for name in ("meshwright", "megatron", "torchtitan", "nemo", "deepspeed", "llm-foundry", "nanotron"):
        assert trainer_profile(name) is TRAINERS[name]
    with pytest.raises(ConfigError, match=r"trainer 'jax' is unknown.*nanotron"):
        trainer_profile("jax")


def test_defaults_of_what_a_run_omits_are_listed_as_derived() -> None:
    """vTrain's table states neither vocabulary nor precision nor sharding, and counts as fully stated."""
    assert parse_run(run_row(), "one").derived == ()
    omitted = ("vocab", "gated", "kv_heads", "ffn", "tied")
    model = {key: value for key, value in LLAMA_70B.items() if key not in omitted}
    layout = {"dp": 4, "tp": 8, "pp": 2, "vpp": 5}
    run = parse_run(run_row(model=model, layout=layout, precision=None), "one")
    words = (
        "key and value heads",
        "51,200",
        "head that does not share",
        "4 x hidden",
        "gated feed-forward",
        "fp16",
        "sharding optimizer",
    )
    assert len(run.derived) == len(words)
    assert all(word in text for word, text in zip(words, run.derived, strict=True))
    assert run.fully_stated


def test_step_time_of_the_collector_is_marked_as_derived() -> None:
    run = parse_run(run_row(reported={}, derived={"step_time_s": 30.0}), "one")
    assert (run.seconds, run.derived) == (30.0, ("step time that the collector derived from other figures",))


def test_quantized_inputs_are_saved_alike_in_a_replay_and_in_a_plan() -> None:
    work = replace(untrainable_workload(), trainer_name="megatron", trainer=BRIDGE, precision="fp8")
    candidate = Candidate(Layout(shard=8), 1, "optimizer")
    planned, _ = candidate_trainer(work, preset_cluster("h100", 8), candidate)
    replayed = parse_run(run_row(precision="fp8"), "one").job.trainer
    assert planned.saves_quantized_inputs
    assert replayed.saves_quantized_inputs
    in_bf16, _ = candidate_trainer(replace(work, precision="bf16"), preset_cluster("h100", 8), candidate)
    assert not in_bf16.saves_quantized_inputs
    assert not with_matmul_precision(TORCHTITAN, "fp8").saves_quantized_inputs
