"""Fields of published runs in the words of papers: models, devices, layouts, schedules, and contradictions of them."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.base.hardware.cluster import GB
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.errors import ConfigError
from meshwright.planner.calibration.published.published_figures import flop_convention
from meshwright.planner.calibration.published.published_runs import PublishedRun, parse_run
from meshwright.planner.calibration.published.published_schedules import NAMES
from meshwright.planner.calibration.published.published_software import stated_flags
from meshwright.planner.calibration.replay import replay_run
from tests.planner.test_published_runs import LLAMA_70B, run_row

MIXTRAL = {
    "layers": 32,
    "hidden": 4096,
    "ffn": 14336,
    "heads": 32,
    "kv_heads": 8,
    "vocab": 32000,
    "seq": 4096,
    "gated": True,
    "tied": False,
    "experts": 8,
    "topk": 2,
}
EXPERT_LAYOUT = {"dp": 16, "tp": 2, "pp": 2, "vpp": 2, "ep": 8, "sharding": "zero1"}


def parsed(**changes: Any) -> PublishedRun:
    return parse_run(run_row(**changes), "one")


def moe(layout: dict[str, Any] = EXPERT_LAYOUT, **sizes: Any) -> PublishedRun:
    return parsed(model={key: value for key, value in (MIXTRAL | sizes).items() if value != ""}, layout=layout)


def layout_of(**changes: Any) -> dict[str, Any]:
    return {"dp": 4, "tp": 8, "pp": 2, "sharding": "zero1"} | changes


# Models.


def test_ffn_of_a_model_with_experts_is_that_of_its_experts_unless_they_have_their_own() -> None:
    run = moe()
    assert run.job.model.parameters == pytest.approx(46.7e9, rel=0.01)
    assert run.derived == ("experts of the intermediate size ffn, which the run does not state",)
    assert moe(moe_ffn=7168).job.model.expert_ffn == 7168
    assert moe(dense_layers=3, moe_ffn=7168).job.model.moe_layers == 29


@pytest.mark.parametrize(
    ("sizes", "layout", "reason"),
    [
        ({"topk": ""}, {}, "it does not state 'topk'"),
        ({"topk": None}, {}, "it does not state 'topk'"),
        ({"topk": 0}, {}, "topk = 0 is out of range"),
        ({"topk": 9}, {}, "topk = 9 is out of range, expected from 1 to 8"),
        ({"ffn": ""}, {}, "it does not state 'moe_ffn'"),
        ({"dense_layers": 3}, {}, "it does not state 'moe_ffn'"),
        ({"dense_layers": 33, "moe_ffn": 64}, {}, "dense_layers = 33 is out of range, expected from 0 to 32"),
        ({"experts": ""}, {"ep": 1}, "it states 'topk' and no experts"),
        ({"experts": "", "topk": ""}, {"ep": 8}, "ep = 8, and the model has no experts"),
        ({"experts": 12}, {}, "ep = 8 does not divide experts = 12"),
        ({"params_b": 7.2}, {}, "its sizes have 46.7 billion parameters, and params_b = 7.2"),
    ],
)
def test_model_with_experts_that_contradicts_itself_is_excluded(
    sizes: dict[str, Any], layout: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        moe(layout=EXPERT_LAYOUT | layout, **sizes)
    assert reason in str(raised.value)


@pytest.mark.parametrize("billions", [46.7, 56, 12.9])
def test_parameters_may_be_rounded_or_those_that_a_token_uses(billions: float) -> None:
    assert moe(params_b=billions).job.model.experts == 8


def test_stated_parameters_decide_whether_an_unstated_feed_forward_is_gated() -> None:
    gpt3 = {"layers": 96, "hidden": 12288, "ffn": 49152, "heads": 96, "vocab": 51200, "seq": 2048}
    plain = parsed(model=gpt3 | {"params_b": 175})
    assert (plain.job.model.gated, plain.job.model.norm, plain.job.model.bias) == (False, "layer", True)
    assert "a feed-forward that is not gated, with LayerNorm and biases, which the run does not state" in plain.derived
    llama = {key: value for key, value in LLAMA_70B.items() if key != "gated"} | {"params_b": 70.6}
    assert parsed(model=llama).job.model.gated


@pytest.mark.parametrize(
    ("sizes", "kv_heads"), [({"attention": "MQA", "kv_heads": None}, 1), ({"attention": "GQA"}, 8), ({}, 8)]
)
def test_multi_query_attention_has_one_key_and_value_head(sizes: dict[str, Any], kv_heads: int) -> None:
    assert parsed(model=LLAMA_70B | sizes).job.model.kv_heads == kv_heads


def test_latent_attention_has_the_sizes_of_deepseek_which_is_listed() -> None:
    run = parsed(model=LLAMA_70B | {"attention": "MLA (as DeepSeek)"})
    assert run.job.model.latent_attention is not None
    assert "the latent attention of DeepSeek-V3, which the run does not state" in run.derived


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": LLAMA_70B | {"attention": "Mamba-2"}}, "attention 'mamba-2' is unknown"),
        ({"model": LLAMA_70B | {"kv_heads": 7}}, "kv_heads = 7 does not divide heads = 64"),
        ({"model": LLAMA_70B | {"heads": 60, "kv_heads": 4}}, "heads = 60 does not divide hidden = 8192"),
        ({"layout": layout_of(tp=16, dp=2), "model": LLAMA_70B | {"heads": 8}}, "tp = 16 does not divide heads = 8"),
        ({"layout": layout_of(cp=2, dp=2), "model": LLAMA_70B | {"seq": 8191}}, "cp = 2 does not divide seq = 8191"),
        ({"layout": layout_of(), "global_batch": 126}, "global_batch = 126 is not a multiple of dp = 4"),
        ({"layout": layout_of(), "micro_batch": 3}, "micro_batch = 3 does not divide the 32 samples"),
        ({"layout": layout_of(fsdp_degree=3, sharding="fsdp")}, "fsdp_degree = 3 does not divide dp = 4"),
        ({"layout": layout_of(vpp=60)}, "80 layers cannot be split into 2 x 60 pipeline stages"),
        ({"layout": layout_of(schedule="zbv", vpp=4)}, "schedule 'zbv' does not have vpp = 4 stages per rank"),
        ({"precision": "int4"}, "precision 'int4' is unknown"),
        ({"reported": {"mfu": 140}}, "mfu = 140 is above the peak of h100, 989 TFLOP/s; expected at most 100 percent"),
        ({"reported": {"hfu": 101.0}}, "hfu = 101 is above the peak of h100"),
        ({"reported": {"tflops_per_gpu": 1200}}, "tflops_per_gpu = 1,200 is above the peak of h100, 989 TFLOP/s"),
    ],
)
def test_run_that_contradicts_itself_is_excluded(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parsed(**changes)
    assert reason in str(raised.value)


def test_rate_above_the_peak_in_bf16_is_possible_in_8_bits() -> None:
    assert parsed(precision="fp8", reported={"tflops_per_gpu": 1200}).seconds


# Devices and networks.


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("A100", "a100-80"),
        ("A100 40GB", "a100-40"),
        ("A100-SXM4-40GB", "a100-40"),
        ("A100 (40G)", "a100-40"),
        ("8x NVIDIA A100-SXM4-80GB", "a100-80"),
        ("8xH100-80GB", "h100"),
        ("DGX-H100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100-96 (HBM2e, 500W)", "h100-500w"),
        ("V100-SXM3-32GB", "v100-32"),
        ("GeForce RTX 4090", "rtx4090"),
        ("GB200 NVL72", "gb200"),
        ("H200-141GB", "h200"),
    ],
)
def test_device_is_found_in_the_words_of_its_maker(gpu: str, name: str) -> None:
    assert parsed(gpu=gpu).job.cluster.device.name == name


@pytest.mark.parametrize("gpu", ["A100-64", "H100 PCIe 80GB", "H100 NVL", "V100 16GB", "TPU v4", "MI250X", "A10"])
def test_other_boards_are_not_taken_for_a_known_one(gpu: str) -> None:
    with pytest.raises(ConfigError, match="is unknown"):
        parsed(gpu=gpu)


@pytest.mark.parametrize(
    ("notes", "per_device"),
    [
        ("inter-node 800 Gb/s and intra-node 150 GB/s", 12.5),
        ("4x100Gb Omni-Path per node", 6.25),
        ("8 x 400 Gb/s InfiniBand", 50.0),
        ("400Gb/s RDMA per GPU", 50.0),
        ("200 Gbps per GPU", 25.0),
        ("3200 Gbps per node", 50.0),
    ],
)
def test_network_is_that_of_the_notes(notes: str, per_device: float) -> None:
    assert parsed(notes=notes).job.cluster.inter_node.bandwidth == pytest.approx(per_device * GB)


# Layouts.


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ZeRO stage 1", "optimizer"),
        ("zero-1 (distributed optimizer)", "optimizer"),
        ("Megatron dist-opt", "optimizer"),
        ("SHARD_GRAD_OP", "gradients"),
        ("FSDP (ZeRO-2)", "gradients"),
        ("FSDP2", "parameters"),
        ("FULL_SHARD", "parameters"),
        ("DDP", "none"),
        ("PyTorch DDP", "none"),
        ("no sharding", "none"),
        ("FSDP (NO_SHARD)", "none"),
        ("fsdp (optimizer+grad sharded)", "gradients"),
        ("optimizer + gradients", "gradients"),
        ("FSDP, gradients and optimizer states sharded", "gradients"),
        ("FSDP2, reshard_after_forward=False", "gradients"),
        ("fsdp (only optimizer state sharded)", "optimizer"),
        ("FSDP (parameters, gradients and optimizer sharded)", "parameters"),
        ("gradients, optimizer states and parameters", "parameters"),
        ("optimizer state and gradients sharded, parameters replicated", "gradients"),
        ("optimizer and gradients sharded, gradient accumulation", "gradients"),
        ("optimizer state sharded, gradient accumulation", "optimizer"),
        ("FSDP + optimizer in backward with gradient accumulation", "parameters"),
        ("FSDP without gradient sharding in optimizer step", "parameters"),
        ("FSDP, fused optimizer, gradient clipping", "parameters"),
        ("Fully Sharded Data Parallel", "parameters"),
    ],
)
def test_sharding_is_read_in_several_spellings(text: str, kind: str) -> None:
    run = parsed(layout={"dp": 8, "tp": 8, "sharding": text})
    assert run.job.sharding == kind
    assert not run.assumptions


def test_unknown_sharding_is_an_assumption_and_a_degree_of_fsdp_shards_parameters() -> None:
    assert "sharding 'MiCS', which the planner does not know, as if it were not stated" in (
        parsed(layout=layout_of(sharding="MiCS", vpp=5)).assumptions
    )
    run = parsed(layout={"dp": 64, "fsdp_degree": 8})
    assert (run.job.sharding, run.job.layout.shard, run.job.layout.replicate) == ("parameters", 8, 8)


def test_hybrid_sharding_without_a_degree_is_inside_a_node() -> None:
    run = parsed(layout={"dp": 64, "sharding": "HSDP"}, source="pytorch/torchtitan 2025")
    assert (run.job.layout.shard, run.job.layout.replicate) == (8, 8)
    assert "shards over 8 data-parallel ranks, those of a node, which the run does not state" in run.assumptions


@pytest.mark.parametrize(
    ("text", "schedule", "stages"),
    [
        ("1F1B", "1f1b", 1),
        ("PipeDream-Flush", "1f1b", 1),
        ("one_f_one_b", "1f1b", 1),
        ("1F1B (non-interleaved)", "1f1b", 1),
        ("GPipe", "gpipe", 1),
        ("AFAB", "gpipe", 1),
        ("Interleaved1F1B", "interleaved", 8),
        ("ZB-H1", "zero-bubble", 1),
        ("InterleavedZeroBubble", "zero-bubble", 2),
        ("ZBVZeroBubble", "zbv", 2),
        ("DualPipeV", "dualpipev", 2),
    ],
)
def test_stated_schedule_is_the_one_that_is_predicted(text: str, schedule: str, stages: int) -> None:
    run = parsed(layout=layout_of(schedule=text))
    assert (run.job.schedule, run.job.stages_per_rank) == (schedule, stages)
    assert not [text for text in run.assumptions if "in place of" in text]


@pytest.mark.parametrize(
    ("text", "schedule"),
    [("Chimera", "1f1b"), ("DualPipe", "dualpipev"), ("Looped BFS", "interleaved"), ("V-Half", "zbv")],
)
def test_schedule_that_the_planner_does_not_know_is_an_assumption(text: str, schedule: str) -> None:
    run = parsed(layout=layout_of(schedule=text))
    assert run.job.schedule == schedule
    assert f"schedule {schedule} in place of {text!r}, which the planner does not know" in run.assumptions
    assert not run.fully_stated


def test_schedules_differ_in_step_time_and_memory() -> None:
    estimates = {
        text: replay_run(parsed(layout=layout_of(schedule=text, pp=4, dp=2))).estimate
        for text in ("GPipe", "1F1B", "ZBV")
    }
    assert estimates["ZBV"].seconds < estimates["1F1B"].seconds
    assert estimates["GPipe"].peak_memory.activations > estimates["1F1B"].peak_memory.activations


def test_every_name_of_a_schedule_is_one_of_the_planners() -> None:
    assert {name for _, name, _ in NAMES} == set(SCHEDULES)


@pytest.mark.parametrize(
    ("source", "stages", "assumption"),
    [("pytorch/torchtitan 2025", 2, "2 stages"), ("NVIDIA/Megatron-LM 2024", 8, "8 stages")],
)
def test_number_of_stages_of_an_interleaved_schedule_is_an_assumption(
    source: str, stages: int, assumption: str
) -> None:
    run = parsed(layout=layout_of(), source=source, notes="interleaved 1F1B")
    assert run.job.stages_per_rank == stages
    assert f"{assumption} per pipeline rank, which the run does not state" in run.assumptions


# Precision, activation checkpointing, software and FLOPs.


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("bfloat16", "bf16"),
        ("BF16 (no FP8)", "bf16"),
        ("float16", "fp16"),
        ("bf16 compute, fp32 master weights", "bf16"),
        ("MXFP8", "fp8"),
        ("float8 rowwise", "fp8"),
        ("NVFP4", "fp4"),
    ],
)
def test_precision_is_read_in_several_spellings(text: str, precision: str) -> None:
    assert parsed(precision=text).job.precision == precision


@pytest.mark.parametrize(
    ("stated", "mode"),
    [
        (True, "full"),
        (False, "none"),
        ("off", "none"),
        ("Full (uniform, 1 layer)", "full"),
        ("selective: core_attn", "selective"),
        ("selective layer", "alternate"),
        ("selective op", "selective"),
    ],
)
def test_activation_checkpointing_is_read_in_several_spellings(stated: Any, mode: str) -> None:
    run = parsed(recompute=stated)
    assert run.job.activation_checkpoint == mode
    assert not run.assumptions


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("Llama 3 Herd of Models arXiv:2407.21783", "Meta 2024"),
        ("DeepSeek-V3 arXiv:2412.19437", "HAI-LLM 2024"),
        ("BLOOM arXiv:2211.05100", "Megatron-DeepSpeed 2022 bf16"),
        ("Megatron-LM, arXiv 2104.04473", "Megatron-LM 2021"),
    ],
)
def test_paper_of_a_trainer_names_its_profile(source: str, name: str) -> None:
    assert parsed(source=source).job.trainer.name == name


@pytest.mark.parametrize(
    ("stated", "convention"),
    [
        ("model_6N_plus_full_attention", "full attention"),
        ("6N + 12*L*H*Q*T (PaLM)", "full attention"),
        ("6ND", "without attention"),
        ("model_6N_without_attention", "without attention"),
        ("model_causal_half_attention", "causal half"),
        ("6ND + attention (full, non-causal)", "full attention"),
        ("hardware_8N_with_recompute", "hardware"),
        ("8ND", "hardware"),
        ("96Bslh^2", "hardware"),
        ("72Bslh^2, no hardware recomputation", "full attention"),
    ],
)
def test_flop_convention_is_read_in_several_spellings(stated: str, convention: str) -> None:
    assert flop_convention(run_row(flops_convention=stated)) == (convention, False)


def test_flop_convention_that_is_not_stated_is_an_assumption() -> None:
    run = parsed(reported={"tflops_per_gpu": 400})
    assert run.assumptions == ("FLOPs of the convention 'full attention', which the run does not state",)
    assert not parsed(reported={"tflops_per_gpu": 400}, flops_convention="6ND").assumptions


@pytest.mark.parametrize("notes", ["compile: no", "compile=False", "without compile", "torch.compile off"])
def test_compile_that_is_denied_is_not_read_as_compiled(notes: str) -> None:
    run = parsed(notes=notes, source="pytorch/torchtitan 2025", layout={"dp": 8, "tp": 8, "sharding": "fsdp"})
    assert run.job.trainer.name == "torchtitan 2025"


@pytest.mark.parametrize(
    ("notes", "flags"),
    [("fp8-sc", {"blockwise"}), ("without block-wise", set()), ("no torch.compile", set()), ("compiled", {"compile"})],
)
def test_flag_of_a_published_run_is_read_unless_it_is_negated(notes: str, flags: set[str]) -> None:
    assert stated_flags({"notes": notes}) == flags
