"""The trainers that the planner knows: Meshwright, and generations of the trainers whose runs were published.

To add a trainer, define one `TrainerProfile` and add one row to `SOURCES`, which maps published runs to it. Comments
state which values are fitted; docs/planner.md lists them with the error that remains.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.planner.workload.trainer_profile import TrainerProfile

CUDA_CONTEXT_BYTES, NCCL_COMMUNICATOR_BYTES = 1.0e9, 0.25e9
"""A CUDA context with the workspaces of its libraries, and NCCL's buffers per process group, on A100 and H100 nodes."""
ALLOCATOR_SLACK = 0.15
"""Fitted to what torchtitan's allocator reserves beyond the tensors that the memory formulas count."""


def gpu_trainer(name: str, **fields: Any) -> TrainerProfile:
    """Returns a profile with the memory overheads of a CUDA device."""
    overheads = {
        "device_context_bytes": CUDA_CONTEXT_BYTES,
        "communicator_bytes": NCCL_COMMUNICATOR_BYTES,
        "allocator_slack": ALLOCATOR_SLACK,
    }
    return TrainerProfile(name, **(overheads | fields))


MESHWRIGHT = gpu_trainer(
    "meshwright",
    allocator_slack=0.05,
    selective_policy="alternate_matmuls",
    residual_traffic_bytes=80,
    ffn_traffic_bytes=12,
    loss_traffic_bytes=60,
    attention_efficiency=0.95,
    recast_traffic_bytes=9,
    layer_launch_seconds=1.1e-3,
    moe_layer_launch_seconds=2e-3,
    stage_output_bytes=4,
    fixed_step_seconds=4e-3,
    quantize_traffic_bytes=5.2,
)
"""Fitted to thirteen runs on one H200: GPT-2, Llama-1B and eight layers of Llama-8B, eager and compiled, with and
without activation checkpointing; memory besides tensors was 1.3 to 2.6 GiB."""
MESHWRIGHT_COMPILED = replace(
    MESHWRIGHT,
    name="meshwright compiled",
    fused_kernels=True,
    residual_traffic_bytes=14,
    ffn_traffic_bytes=4,
    layer_launch_seconds=5e-4,
)
FUSED_LOSS = {"loss_chunk_bytes": 2**32, "loss_traffic_bytes": 8}
"""What a loss by chunks of tokens changes: the logits are written, turned into their gradient in place, and read.
Chunks have half as many bytes with activation checkpointing.
"""
LOSS_CHUNK_TOKENS = 16_384
"""The most tokens of a chunk."""

COMPOSER = gpu_trainer(
    "Composer 2023",
    fused_kernels=True,
    residual_bytes=0,
    shards_over_context=True,
    logit_bytes=4,
    residual_traffic_bytes=47,
    ffn_traffic_bytes=9,
    attention_efficiency=0.46,
    post_ampere_attention=0.65,
    loss_traffic_bytes=15,
    contention=0.12,
    quantize_traffic_bytes=1.2,
    default_sharding="parameters",
)
"""Its loss is one kernel that writes the gradient in place of the logits: twice the bytes of the compute precision."""

TORCHTITAN = gpu_trainer(
    "torchtitan 2024",
    fused_kernels=True,
    residual_bytes=0,
    selective_policy="alternate_matmuls",
    keeps_stages_unsharded=True,
    shards_over_context=True,
    residual_traffic_bytes=50,
    ffn_traffic_bytes=13,
    loss_traffic_bytes=40,
    attention_efficiency=0.6,
    contention=0.12,
    default_sharding="parameters",
    context_method="gather",
    splits_batch_by_stage=True,
    context_attention_slowdown=1.5,
    tensor_overlap=0.26,
    quantize_traffic_bytes=5.2,
)
TORCHTITAN_2025 = replace(TORCHTITAN, name="torchtitan 2025", logit_bytes=4)
"""From 2025 on its loss is compiled, too: logits and their gradient, in the compute precision."""

MEGATRON = gpu_trainer(
    "Megatron-LM",
    fused_kernels=True,
    residual_bytes=0,
    parameter_bytes=2,
    optimizer_bytes=12,
    selective_policy="all_but_scores",
    regathers_in_backward=True,
    torch_native=False,
    keeps_stage_outputs=False,
    shards_over_context=True,
)
"""Parameters in the compute precision, gradients in float32, master weights in the optimizer: 18 bytes each."""
MEGATRON_2021 = replace(
    MEGATRON,
    name="Megatron-LM 2021",
    flash_attention=False,
    dropout_masks=True,
    sequence_parallel=False,
    residual_traffic_bytes=16,
    ffn_traffic_bytes=9.5,
    score_traffic_bytes=9.5,
    loss_traffic_bytes=110,
    layer_launch_seconds=1.2e-3,
    reduce_bytes=2,
    unoverlapped_data_comm=True,
    scatters_stage_outputs=True,
    single_adapter_gathers=True,
    misalignment_slowdown=4.3,
    fixed_step_seconds=0.03,
)
"""Its ZeRO-3 comparison runs are DeepSpeed's of that year, whose all-gathers reached the rate of one adapter."""
MEGATRON_2022 = replace(MEGATRON_2021, name="Megatron-LM 2022", sequence_parallel=True)
"""With sequence parallelism (Korthikanti et al., arXiv:2205.05198)."""
DEEPSPEED = replace(
    MEGATRON_2021,
    name="Megatron-DeepSpeed 2022",
    dropout_masks=False,
    gradient_bytes=2,
    optimizer_bytes=16,
    keeps_stage_outputs=True,
    bucket_bytes=2e9,
    device_context_bytes=2.5e9,
    communicator_bytes=0.5e9,
    scatters_stage_outputs=False,
    all_reduces_gradients=True,
    host_gap_seconds=4.1e-3,
)
"""In fp16: gradients of the rank's optimizer shard are copied to float32 for the update, 20 bytes per parameter. Two
buckets of 5e8 elements, DeepSpeed's default. Context and communicators are fitted to what nvidia-smi shows on Jean Zay
beyond tensors, the same for all layouts. The gap in which its checkpointed layers wait for the host is fitted, too."""
DEEPSPEED_BF16 = replace(DEEPSPEED, name="Megatron-DeepSpeed 2022 bf16", accumulation_bytes=4, optimizer_bytes=12)
"""Gradients are accumulated over micro-batches in float32, unsharded on every rank."""

BRIDGE = replace(
    MEGATRON,
    name="Megatron-Bridge 2026",
    gradient_bytes=2,
    experts_over_tensor_axis=True,
    logit_bytes=6,
    residual_traffic_bytes=38,
    ffn_traffic_bytes=8.7,
    attention_efficiency=0.48,
    matmul_efficiency=1.1,
    tensor_overlap=0.8,
    pipeline_overlap=0.8,
    deduplicates_tokens=True,
    default_sharding="optimizer",
    quantize_traffic_bytes=3,
    layer_launch_seconds=60e-6,
    fixed_step_seconds=0.02,
)
"""Its recipes reduce gradients in bf16; logits exist in bf16 and once in float32."""
BRIDGE_2025 = replace(BRIDGE, name="Megatron-Bridge 2025", moe_layer_launch_seconds=1.7e-3)

SOURCES: tuple[tuple[str, TrainerProfile, TrainerProfile], ...] = (
    ("bigscience", DEEPSPEED, MEGATRON_2021),
    ("vTrain", MEGATRON_2021, DEEPSPEED),
    ("Narayanan", MEGATRON_2021, DEEPSPEED),
    ("Smith", MEGATRON_2021, DEEPSPEED),
    ("Korthikanti", MEGATRON_2022, DEEPSPEED),
    ("mosaicml", COMPOSER, TORCHTITAN),
    ("torchtitan docs/performance", TORCHTITAN, COMPOSER),
    ("torchtitan_", TORCHTITAN, COMPOSER),
    ("202412_torchtitan", TORCHTITAN, COMPOSER),
    ("torchtitan", TORCHTITAN_2025, COMPOSER),
    ("Automodel", TORCHTITAN_2025, COMPOSER),
    ("fms-fsdp", TORCHTITAN, COMPOSER),
    ("(25.", BRIDGE_2025, TORCHTITAN),
    ("Megatron-Bridge", BRIDGE, TORCHTITAN),
    ("NeMo", BRIDGE_2025, TORCHTITAN),
    ("MegaScale", BRIDGE_2025, TORCHTITAN),
)
"""Text in the `source` of a published run, its trainer, and the most similar trainer of another publisher.

The first row whose text matches counts.
"""


def profile_for_run(source: str, sharding: str, device: str, precision: str) -> TrainerProfile:
    """Returns the trainer of a published run: by its source, or else by its sharding and device."""
    profile = next((profile for text, profile, _ in SOURCES if text.lower() in source.lower()), None)
    if profile is None:
        megatron = MEGATRON_2021 if device.startswith("a100") else BRIDGE_2025
        profile = TORCHTITAN if sharding in ("fsdp", "zero3", "zero2") else megatron
    return DEEPSPEED_BF16 if profile is DEEPSPEED and precision == "bf16" else profile


NEAREST_PROFILE = {profile.name: nearest for _, profile, nearest in SOURCES} | {DEEPSPEED_BF16.name: MEGATRON_2021}
"""Trainer -> the most similar trainer of another publisher."""

FITTED_FIELDS = (
    "residual_traffic_bytes",
    "ffn_traffic_bytes",
    "score_traffic_bytes",
    "loss_traffic_bytes",
    "attention_efficiency",
    "post_ampere_attention",
    "context_attention_slowdown",
    "matmul_efficiency",
    "misalignment_slowdown",
    "host_gap_seconds",
    "layer_launch_seconds",
    "moe_layer_launch_seconds",
    "tensor_overlap",
    "pipeline_overlap",
    "contention",
    "fixed_step_seconds",
    "quantize_traffic_bytes",
)
"""Fields of the step time that are fitted to runs, not known."""


def unfitted_profile(profile: TrainerProfile) -> TrainerProfile:
    """Returns the profile that one would use had this trainer never been measured.

    Its fitted fields are those of the most similar trainer of another publisher.
    """
    nearest = NEAREST_PROFILE[profile.name]
    return replace(profile, **{name: getattr(nearest, name) for name in FITTED_FIELDS})
