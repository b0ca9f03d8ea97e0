"""The trainers that the planner knows: Meshwright, and generations of the trainers whose runs were published.

To add a trainer, define one `TrainerProfile` and add one row to `SOURCES`, which maps published runs to it. Comments
state which values are fitted; docs/planner.md lists them with the error that remains.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.errors import ConfigError
from meshwright.planner.workload.expert_settings import DUALPIPE
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
    quantizes_experts=False,
    context_attention_slowdown=1.25,
)
"""Fitted to thirteen runs on one H200: GPT-2, Llama-1B and eight layers of Llama-8B, eager and compiled, with and
without activation checkpointing; memory besides tensors was 1.3 to 2.6 GiB. The slowdown of attention over several
chunks of a sequence is stated, not measured: half of what was fitted to torchtitan's."""
MESHWRIGHT_COMPILED = replace(
    MESHWRIGHT,
    name="meshwright compiled",
    fused_kernels=True,
    residual_traffic_bytes=14,
    ffn_traffic_bytes=4,
    layer_launch_seconds=5e-4,
)
FUSED_LOSS = {"loss_chunk_bytes": 2**32, "loss_traffic_bytes": 8, "fixed_step_seconds": 2e-3}
"""What a loss by chunks of tokens changes: the logits are written, turned into their gradient in place, and read.
Chunks have half as many bytes with activation checkpointing. The time per step beside kernels is that of the runs with
this loss in docs/speed.md; the thirteen runs of `MESHWRIGHT` had torch's.
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
    kernel_accuracy=0.054,
)
"""Its loss is one kernel that writes the gradient in place of the logits: twice the bytes of the compute precision."""

TORCHTITAN_2024 = gpu_trainer(
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
    quantize_traffic_bytes=9,
    quantizes_experts=False,
    allocator_slack=0.2,
    kernel_accuracy=0.09,
)
"""Eager, as its runs of 2024 were unless they state compile; float8 with tensorwise scales, of linear layers: the
weights of experts are no linear layers, and it quantizes them only on request."""
TORCHTITAN = replace(TORCHTITAN_2024, name="torchtitan 2025")
"""Fitted fields are those of 2024: no eager run of a later year is published with its memory."""
TORCH_COMPILE: dict[str, Any] = {"residual_traffic_bytes": 20, "ffn_traffic_bytes": 6, "layer_launch_seconds": 200e-6}
"""What compiled blocks change: norms, activations and residual additions are fused."""
COMPILED_LOSS: dict[str, Any] = {"logit_bytes": 4, "loss_traffic_bytes": 15}
"""What a compiled loss changes: logits and their gradient, in the compute precision. torchtitan compiles its loss with
its blocks from 2025 on."""
TORCHTITAN_2024_COMPILED = replace(TORCHTITAN_2024, name="torchtitan 2024 compiled", **TORCH_COMPILE)
TORCHTITAN_COMPILED = replace(TORCHTITAN, name="torchtitan 2025 compiled", **TORCH_COMPILE, **COMPILED_LOSS)
ASYNC_TENSOR: dict[str, Any] = {"tensor_overlap": 0.6}
"""What asynchronous tensor parallelism changes: collectives are split, and overlapped with the matmuls around them."""
AUTOMODEL = replace(TORCHTITAN, name="Automodel 2025", splits_batch_by_stage=False, kernel_accuracy=0.15)
"""Not fitted: FSDP2 around Hugging Face's blocks, with torchtitan's fitted fields."""
FMS_FSDP = replace(
    TORCHTITAN_2024, name="fms-fsdp 2024", splits_batch_by_stage=False, kernel_accuracy=0.15, **TORCH_COMPILE
)
"""Not fitted: FSDP with compiled blocks; torchtitan's fitted fields."""

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
    saved_token_copies=1,
)
"""Parameters in the compute precision, gradients in float32, master weights in the optimizer: 18 bytes each. Of a
routed token, the permuted input of its expert is saved: routing weights are applied before the last matmul."""
MEGATRON_2021 = replace(
    MEGATRON,
    name="Megatron-LM 2021",
    flash_attention=False,
    dropout_masks=True,
    sequence_parallel=False,
    residual_traffic_bytes=16,
    ffn_traffic_bytes=9.5,
    score_traffic_bytes=9.5,
    loss_traffic_bytes=90,
    layer_launch_seconds=0.97e-3,
    reduce_bytes=2,
    reduces_bf16_in_float32=True,
    unoverlapped_data_comm=True,
    scatters_stage_outputs=True,
    single_adapter_gathers=True,
    misalignment_slowdown=4.3,
    fixed_step_seconds=0.002,
    kernel_accuracy=0.085,
)
"""Its ZeRO-3 comparison runs are DeepSpeed's of that year, whose all-gathers reached the rate of one adapter."""
MEGATRON_2022 = replace(MEGATRON_2021, name="Megatron-LM 2022", sequence_parallel=True, interleaves=True)
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
    kernel_accuracy=0.07,
)
"""In fp16: gradients of the rank's optimizer shard are copied to float32 for the update, 20 bytes per parameter. Two
buckets of 5e8 elements, DeepSpeed's default. Context and communicators are fitted to what nvidia-smi shows on Jean Zay
beyond tensors, the same for all layouts. The gap in which its checkpointed layers wait for the host is fitted, too."""
DEEPSPEED_BF16 = replace(DEEPSPEED, name="Megatron-DeepSpeed 2022 bf16", accumulation_bytes=4, optimizer_bytes=12)
"""Gradients are accumulated over micro-batches in float32, unsharded on every rank."""

BRIDGE = replace(
    MEGATRON,
    name="Megatron-Bridge 2026",
    selective_policy="all_but_pointwise",
    gradient_bytes=2,
    reduce_bytes=2,
    experts_over_tensor_axis=True,
    logit_bytes=6,
    residual_traffic_bytes=32,
    ffn_traffic_bytes=6.8,
    attention_efficiency=0.8,
    tensor_overlap=0.9,
    pipeline_overlap=0.9,
    deduplicates_tokens=True,
    default_sharding="optimizer",
    quantize_traffic_bytes=3,
    layer_launch_seconds=60e-6,
    fixed_step_seconds=0.02,
    kernel_accuracy=0.07,
)
"""Its performance recipes have gradients in bf16 and reduce them so (`grad_reduce_in_fp32 = False`), and experts whole
on the ranks of the tensor axis (`expert_tensor_parallel_size = 1`); logits exist in bf16 and once in float32. Selective
recomputation is that of norms and activation functions (`recompute_modules` with layernorm and moe_act)."""
BRIDGE_2025 = replace(BRIDGE, name="Megatron-Bridge 2025", moe_layer_launch_seconds=1.7e-3)

MEGATRON_2024 = replace(
    BRIDGE,
    name="Megatron-LM 2024",
    gradient_bytes=4,
    reduce_bytes=4,
    selective_policy="all_but_scores",
    logit_bytes=6,
    attention_efficiency=0.6,
    tensor_overlap=0.4,
    pipeline_overlap=0.5,
    deduplicates_tokens=False,
    experts_over_tensor_axis=False,
    layer_launch_seconds=300e-6,
    interleaves=True,
    kernel_accuracy=0.15,
)
"""Not fitted: Megatron-Core with Transformer Engine and flash attention, as NeMo 24 and the production runs of 2023 and
2024 had it. Memory traffic is Megatron-Bridge's, attention is FlashAttention 2, and tensor-parallel communication is
overlapped where a matmul follows its own all-gather."""
META_2024 = replace(
    MEGATRON_2024,
    name="Meta 2024",
    recomputes_gated_product=True,
    default_sharding="gradients",
    context_method="gather",
)
"""Not fitted: the trainer of Llama 3 (arXiv:2407.21783, section 3.3), with the kernels of that generation. FSDP shards
gradients and optimizer state, and does not reshard parameters after forward: ZeRO-2, in a pipeline, too. Gradients are
accumulated and reduced in float32; inputs and outputs of stages are freed early; context parallelism gathers keys and
values. What the feed-forward saves is not stated: it is taken from xFormers, Meta's library, whose SwiGLU keeps gate
and up. An eager one keeps the activation and the product as well: 82 GB of activations for the published layout."""
HAI_LLM = replace(
    BRIDGE,
    name="HAI-LLM 2024",
    **DUALPIPE,
    gradient_bytes=4,
    optimizer_bytes=8,
    kernel_accuracy=0.15,
)
"""Not fitted: the trainer of DeepSeek-V3 (arXiv:2412.19437, sections 3.2 and 3.3), with the kernels of Megatron-Bridge.
Gradients are accumulated in float32, master weights are in float32, and both moments in bf16."""
NANOTRON = replace(
    MEGATRON,
    name="nanotron 2025",
    keeps_stage_outputs=True,
    logit_bytes=6,
    residual_traffic_bytes=50,
    ffn_traffic_bytes=13,
    attention_efficiency=0.6,
    default_sharding="optimizer",
    fixed_step_seconds=0.02,
)
"""Not fitted: no run of it is among the published ones. Its documentation and the Ultra-Scale Playbook describe bf16
parameters with float32 gradient accumulation, a ZeRO-1 optimizer, 1F1B, Megatron's tensor and sequence parallelism, and
flash attention with eager norms and activations, whose memory traffic is torchtitan's here."""

TRAINERS: dict[str, TrainerProfile] = {
    "meshwright": MESHWRIGHT_COMPILED,
    "meshwright-eager": MESHWRIGHT,
    "megatron": BRIDGE,
    "megatron-2025": BRIDGE_2025,
    "megatron-2024": MEGATRON_2024,
    "megatron-2022": MEGATRON_2022,
    "megatron-2021": MEGATRON_2021,
    "nemo": BRIDGE_2025,
    "nemo-2024": MEGATRON_2024,
    "torchtitan": TORCHTITAN_COMPILED,
    "torchtitan-eager": TORCHTITAN,
    "torchtitan-2024": TORCHTITAN_2024,
    "deepspeed": DEEPSPEED_BF16,
    "deepspeed-fp16": DEEPSPEED,
    "llm-foundry": COMPOSER,
    "nanotron": NANOTRON,
    "meta-2024": META_2024,
    "hai-llm": HAI_LLM,
}
"""Name in `plan --trainer` -> profile. A name without a year is the newest generation."""


def in_16_bits(profile: TrainerProfile) -> TrainerProfile:
    """Returns a profile whose matmuls run in 16 bits, without what it keeps and sends in fewer bits."""
    if not profile.saves_quantized_inputs:
        return profile
    return replace(
        profile, saves_quantized_inputs=False, attention_output_bytes=0, activation_input_bytes=0, dispatch_bytes=0
    )


def trainer_profile(name: str) -> TrainerProfile:
    """Returns the profile of a trainer by its name in `TRAINERS`."""
    if name not in TRAINERS:
        raise ConfigError(f"trainer {name[:40]!r} is unknown", f"expected one of {', '.join(TRAINERS)}")
    return TRAINERS[name]
