"""The software that the planner knows: our own, and generations of the trainers whose runs were published.

What is fitted is said beside it; docs/planner.md has the list with the error that it leaves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.planner.workload.trainer_profile import TrainerProfile

CONTEXT, COMMUNICATOR = 1.0e9, 0.25e9
"""A CUDA context with the libraries' workspaces, and NCCL's buffers for one group: as seen on A100 and H100 nodes."""
SLACK = 0.15
"""Fitted to what torchtitan's allocator reserves beyond the tensors that these formulas count."""


def on_device(name: str, **fields: Any) -> TrainerProfile:
    return TrainerProfile(
        name,
        **({"device_context_bytes": CONTEXT, "communicator_bytes": COMMUNICATOR, "allocator_slack": SLACK} | fields),
    )


MESHWRIGHT = on_device(
    "meshwright",
    allocator_slack=0.05,
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
without recomputation; memory beside tensors was 1.3 to 2.6 GiB."""
MESHWRIGHT_COMPILED = replace(
    MESHWRIGHT,
    name="meshwright compiled",
    fused_kernels=True,
    residual_traffic_bytes=14,
    ffn_traffic_bytes=4,
    layer_launch_seconds=5e-4,
)

COMPOSER = on_device(
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
"""Its loss is one kernel, which writes the gradient where the logits were: two times the precision of compute."""

TORCHTITAN = on_device(
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
"""From 2025 on its loss is compiled, too: logits and their gradient, in the precision of compute."""

MEGATRON = on_device(
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
"""Weights in the precision of compute, gradients in float32, masters with the optimizer: 18 bytes a parameter."""
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
"""Where it is compared with ZeRO-3, that is DeepSpeed's of the year, whose gathers reached one adapter's rate."""
MEGATRON_2022 = replace(MEGATRON_2021, name="Megatron-LM 2022", sequence_parallel=True)
"""With the sequence cut between matrices (Korthikanti 2022)."""
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
"""In fp16: gradients of a rank's part of the optimizer are copied to float32 for the update, 20 bytes a parameter. Two
buckets of 5e8 numbers, DeepSpeed's default. Context and communicators are fitted: what nvidia-smi shows on Jean Zay
beyond tensors, the same for all layouts. So is the gap in which its checkpoints wait for the host, layer by layer."""
DEEPSPEED_BF16 = replace(DEEPSPEED, name="Megatron-DeepSpeed 2022 bf16", accumulation_bytes=4, optimizer_bytes=12)
"""Gradients of micro-steps are added up in float32, whole on every rank."""

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
"""Its recipes reduce gradients in bf16; logits in bf16, and once in float32."""
BRIDGE_2025 = replace(BRIDGE, name="Megatron-Bridge 2025", moe_layer_launch_seconds=1.7e-3)

SOURCES: tuple[tuple[str, TrainerProfile], ...] = (
    ("bigscience", DEEPSPEED),
    ("vTrain", MEGATRON_2021),
    ("Narayanan", MEGATRON_2021),
    ("Smith", MEGATRON_2021),
    ("Korthikanti", MEGATRON_2022),
    ("mosaicml", COMPOSER),
    ("torchtitan docs/performance", TORCHTITAN),
    ("torchtitan_", TORCHTITAN),
    ("202412_torchtitan", TORCHTITAN),
    ("torchtitan", TORCHTITAN_2025),
    ("Automodel", TORCHTITAN_2025),
    ("fms-fsdp", TORCHTITAN),
    ("(25.", BRIDGE_2025),
    ("Megatron-Bridge", BRIDGE),
    ("NeMo", BRIDGE_2025),
    ("MegaScale", BRIDGE_2025),
)
"""Words of a source, and the software that it ran; the first that is found."""


def profile_for_run(source: str, sharding: str, device: str, precision: str) -> TrainerProfile:
    """Of a published run: by who published it, or else by what it did on which devices."""
    found = next((stack for word, stack in SOURCES if word.lower() in source.lower()), None)
    if found is None:
        old = MEGATRON_2021 if device.startswith("a100") else BRIDGE_2025
        found = TORCHTITAN if sharding in ("fsdp", "zero3", "zero2") else old
    return DEEPSPEED_BF16 if found is DEEPSPEED and precision == "bf16" else found


NEAREST_PROFILE = {
    MEGATRON_2021.name: DEEPSPEED,
    MEGATRON_2022.name: DEEPSPEED,
    DEEPSPEED.name: MEGATRON_2021,
    DEEPSPEED_BF16.name: MEGATRON_2021,
    COMPOSER.name: TORCHTITAN,
    TORCHTITAN.name: COMPOSER,
    TORCHTITAN_2025.name: COMPOSER,
    BRIDGE_2025.name: TORCHTITAN,
    BRIDGE.name: TORCHTITAN,
}
"""The nearest software of somebody else."""

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
"""What of a software's seconds is fitted, not known."""


def unfitted_profile(stack: TrainerProfile) -> TrainerProfile:
    """With what one would plan, had this software never been measured: the constants of the nearest other one."""
    near = NEAREST_PROFILE.get(stack.name, stack)
    return replace(stack, **{name: getattr(near, name) for name in FITTED_FIELDS})
