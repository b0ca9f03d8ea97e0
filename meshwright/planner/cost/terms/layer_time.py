"""Time of one layer, of the embedding and of the head on one rank, for one micro-batch.

T is the number of tokens, H the width, A and K the query and key heads of size D, F the width of the feed-forward,
t the tensor-parallel degree. The matrix products (rows, columns, inner) of a dense layer are (T, (A + 2K) D / t, H),
(T, H, A D / t), (T, 2F / t, H) and (T, H, F / t); the first has A D / t columns more if a gate scales the output of
attention. Backward runs each twice: for the input gradient (T, inner, columns)
and for the weight gradient (columns, inner, T). Attention multiplies 2 T S (A D) / t twice; flash kernels skip the
masked half, and flash backward runs five products where forward runs two. A frozen weight has no weight gradient, and
backward ends at the first trained parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache, singledispatch
from typing import Any

from meshwright.base.models.architecture import Architecture
from meshwright.base.models.block_kinds import BlockKind, attended_tokens
from meshwright.base.models.traced_model import TracedModel
from meshwright.planner.cost.terms.float8_recipe import FLOAT8_RECIPES
from meshwright.planner.cost.terms.host_time import HOST_SPEEDS, forward_kernels, host_seconds
from meshwright.planner.cost.terms.kernel_time import (
    KernelRate,
    factors_time,
    kernel_rate,
    linear_time,
    matmul_time,
    memory_bound_time,
    weight_gradient_time,
)
from meshwright.planner.cost.terms.layer_matmuls import (
    expert_matmuls,
    feed_forward_matmuls,
    mixer_projections,
    routed_tokens,
)
from meshwright.planner.cost.terms.recomputation import recomputed_parts, recomputes_latent_projections
from meshwright.planner.workload.optimizer_bytes import ALL_TRAINED, TrainedShares
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for one micro-batch."""

    forward: float
    backward: float
    weight_gradient: float
    """the part of `backward` that computes weight gradients"""
    recompute: float = 0.0
    """forward computation that activation checkpointing repeats before backward"""
    attention: float = 0.0
    """the part of `forward` that is attention itself, without its projections"""
    forward_idle: float = 0.0
    """the part of `forward` in which the device waits for the host, and collectives can run"""
    backward_idle: float = 0.0
    """the same of `backward`"""


REFERENCE_LAUNCH = 9e-6
"""Seconds in which the host launches one operator, on the machines that the trainer profiles were fitted to."""
FUSED_EXPERT_TRAFFIC = 0.5
"""Memory traffic of the intermediates of experts whose matmuls, activation and casts are one kernel, relative to
separate kernels: the epilogue writes the activation, so that its input is written once and not read."""
SCAN_EFFICIENCY = {"mamba": 0.04, "mamba2": 0.3, "linear": 0.15}
"""Rate of the scan of a mixer as a fraction of the matmul rate. Mamba computes element by element, outside of the
tensor cores; the chunks of the others are small matmuls. Of the order of the kernels of mamba-ssm and
flash-linear-attention; stated, not fitted: no published run of these models has been read."""
BACKWARD_LAUNCHES = 1.4
"""The host's launch time of a backward pass, relative to that of a forward pass."""

FACTOR_KERNELS = 4
"""Kernels of the low-rank factors of a projection: two products, the scale and the sum."""
CHUNK_QUERIES = 128
"""Queries of a chunk of Meshwright's attention with capped scores."""


@dataclass(frozen=True)
class LayerShape:
    """Everything that the time of a layer depends on. Hashable, so that equal layers are computed once."""

    model: Architecture | TracedModel
    trainer: TrainerProfile
    tokens: int
    sequence: int
    micro_batch: int
    context: int
    tensor: int
    expert: int
    activation_checkpoint: str
    linear_rate: KernelRate
    """the rates of matrix products with weights, except those that the trainer keeps in 16 bits"""
    rate: KernelRate
    """the rates of all other kernels"""
    quantized: bool
    post_ampere: bool
    """whether the device has other matrix instructions than an A100"""
    on_cpu: bool = False
    launch_seconds: float = 0.0
    """measured seconds in which the host launches one operator; 0 if unknown"""
    host_speed: float = 1.0
    """launches per second, relative to the hosts that the trainer profiles were fitted to"""
    expert_imbalance: float = 1.0
    """load of the busiest expert-parallel rank as a multiple of the mean"""
    trained: TrainedShares = ALL_TRAINED
    """which part of the model is trained"""


def layer_shape(job: PlannedJob) -> LayerShape:
    quantized = job.is_quantized
    rate = kernel_rate(job.cluster.device, "bf16" if quantized else job.precision, job.trainer)
    linear_rate = rate
    if quantized:
        linear_rate = kernel_rate(job.cluster.device, job.precision, job.trainer)
        factor = FLOAT8_RECIPES[job.trainer.float8_recipe].matmul_rate
        linear_rate = replace(linear_rate, flops=linear_rate.flops * factor)
    model, layout = job.model, job.layout
    return LayerShape(
        model,
        job.trainer,
        job.tokens_per_micro_batch,
        job.sequence,
        job.batch.micro,
        layout.context,
        layout.tensor,
        layout.expert,
        job.activation_checkpoint,
        linear_rate,
        rate,
        quantized,
        job.cluster.device.post_ampere,
        job.cluster.device.is_cpu,
        job.cluster.launch_seconds,
        HOST_SPEEDS[job.cluster.device.host],
        job.expert_imbalance,
        job.trained,
    )


def layer_time(shape: LayerShape, moe: bool) -> LayerTime:
    """The time of one block."""
    return block_time(shape.model, shape, moe)


def embedding_time(shape: LayerShape) -> LayerTime:
    """The time of what stands before the blocks."""
    return first_time(shape.model, shape)


def head_time(shape: LayerShape) -> LayerTime:
    """The time of the output projection and the loss. Activation checkpointing does not recompute them."""
    return last_time(shape.model, shape)


@singledispatch
def block_time(model: Any, shape: LayerShape, moe: bool) -> LayerTime:
    raise NotImplementedError(type(model))


@singledispatch
def first_time(model: Any, shape: LayerShape) -> LayerTime:
    raise NotImplementedError(type(model))


@singledispatch
def last_time(model: Any, shape: LayerShape) -> LayerTime:
    raise NotImplementedError(type(model))


@block_time.register
@cache
def _(model: Architecture, shape: LayerShape, moe: bool) -> LayerTime:
    """The mean over the kinds of blocks of a hybrid model."""
    times = [(kind_time(model, shape, kind), share) for kind, share in model.kinds(moe)]
    if len(times) == 1:
        return times[0][0]
    names = [field.name for field in fields(LayerTime)]
    return LayerTime(**{name: sum(share * getattr(time, name) for time, share in times) for name in names})


def kind_time(model: Architecture, shape: LayerShape, kind: BlockKind) -> LayerTime:
    """The time of one block of a kind."""
    trainer, trained = shape.trainer, shape.trained
    projections = mixer_projections(model, shape, kind)
    dense, experts = feed_forward_matmuls(model, shape, kind), expert_matmuls(model, shape, kind)
    matmuls = projections + experts + dense
    if shape.quantized and not trainer.quantizes_experts:
        quantized = linear_time(shape.linear_rate, projections + dense, cast_seconds(shape))
        linear = quantized + linear_time(shape.rate, experts)
    else:
        linear = linear_time(shape.linear_rate, matmuls, cast_seconds(shape))
    frozen_gradients = 0.0
    if trained.frozen:
        in_16_bits = shape.quantized and not trainer.quantizes_experts
        rate = shape.rate if in_16_bits else shape.linear_rate
        frozen_gradients = (1 - trained.mixer) * linear_time(shape.linear_rate, projections).weight_gradients
        frozen_gradients += (1 - trained.ffn) * linear_time(shape.linear_rate, dense).weight_gradients
        frozen_gradients += (1 - trained.routed) * linear_time(rate, experts).weight_gradients
        linear += factors_time(shape.rate, shape.tokens, shape.tensor, trained.factors)
    attention, attention_backward = mixer_time(model, shape, kind)
    weights = sum(count * n * k for _, n, k, count in matmuls)
    moved_bytes = pointwise_bytes(model, shape, kind) + trainer.recast_traffic_bytes * weights
    pointwise = memory_bound_time(shape.rate, moved_bytes, 4 * kind.sublayers)
    pointwise_backward = memory_bound_time(shape.rate, 2 * moved_bytes, 7 * kind.sublayers)
    launch = launch_time(model, shape, kind)
    gap = trainer.host_gap_seconds
    compute = linear.forward + attention + pointwise
    forward = with_launches(shape, compute, launch) + gap
    weight_gradients = linear.weight_gradients - frozen_gradients
    gradients = linear.input_gradients + weight_gradients + attention_backward + pointwise_backward
    if trained.reached < 1:
        gradients -= (1 - trained.reached) * (gradients - weight_gradients)
    backward = with_launches(shape, gradients, trained.reached * BACKWARD_LAUNCHES * launch) + trained.reached * gap
    mode, repeated = shape.activation_checkpoint, recomputed_parts(shape.activation_checkpoint, trainer)
    recompute = repeated.matmuls * (forward if mode in ("alternate", "full") else linear.forward)
    if mode == "selective":
        recompute += repeated.mixer * attention + selective_pointwise(model, shape, kind, moved_bytes, pointwise)
    mla = model.latent_attention
    if recomputes_latent_projections(mode, trainer) and mla is not None and kind.has_attention:
        inner = (mla.q_lora_rank, mla.kv_lora_rank)
        recompute += sum(matmul_time(shape.linear_rate, *matmul) for matmul in projections if matmul[2] in inner)
    recompute *= trained.reached
    idle = (
        (0.0, 0.0) if shape.on_cpu else (max(0.0, launch - compute), max(0.0, BACKWARD_LAUNCHES * launch - gradients))
    )
    return LayerTime(forward, backward, weight_gradients, recompute, attention, *idle)


def cast_seconds(shape: LayerShape) -> float:
    """Seconds per element that is quantized for a matrix product."""
    if not shape.quantized:
        return 0.0
    traffic = shape.trainer.quantize_traffic_bytes * FLOAT8_RECIPES[shape.trainer.float8_recipe].cast_traffic
    return traffic / shape.rate.bandwidth


def selective_pointwise(
    model: Architecture, shape: LayerShape, kind: BlockKind, moved_bytes: float, pointwise: float
) -> float:
    """Seconds of the pointwise kernels that selective activation checkpointing repeats, of all these."""
    policy = shape.trainer.selective_policy
    if policy == "all_but_pointwise":
        return memory_bound_time(shape.rate, moved_bytes - permutation_bytes(model, shape, kind))
    return 0.0 if policy == "all_but_scores" else pointwise


def launch_time(model: Architecture, shape: LayerShape, kind: BlockKind) -> float:
    """Seconds in which the host launches the forward kernels of one layer. A profile states them for a layer of the
    same kind with a gated feed-forward, without norms of queries and keys, and with matmuls of 16 bits.
    """
    trainer, moe = shape.trainer, kind.ffn == "moe"
    reference = trainer.moe_layer_launch_seconds if moe else trainer.layer_launch_seconds
    if shape.launch_seconds:
        reference *= shape.launch_seconds / REFERENCE_LAUNCH
    casts_ffn = not moe or trainer.quantizes_experts or model.shared_ffn > 0
    kernels = forward_kernels(
        trainer.fused_kernels, model.gated, model.qk_norm, shape.quantized, moe, kind.has_scan, casts_ffn
    )
    kernels += FACTOR_KERNELS * round(sum(factors[-1] for factors in shape.trained.factors))
    reference_kernels = forward_kernels(trainer.fused_kernels, moe=moe)
    seconds = host_seconds(reference, kernels, reference_kernels, trainer.graphed_kernels, shape.host_speed)
    return seconds * kind.sublayers / 2


def with_launches(shape: LayerShape, compute: float, launch: float) -> float:
    """A GPU computes while the host launches the next kernels. A CPU does both one after the other."""
    return compute + launch if shape.on_cpu else max(compute, launch)


def mixer_time(model: Architecture, shape: LayerShape, kind: BlockKind) -> tuple[float, float]:
    """Seconds of a mixer without its projections, forward and backward."""
    if kind.has_attention:
        return attention_time(model, shape, kind)
    sizes = model.linear_attention if kind.mixer == "linear" else model.state_space
    if not kind.has_scan or sizes is None:
        return 0.0, 0.0
    tokens = shape.tokens / shape.tensor
    moved = tokens * sizes.scan_elements * shape.rate.element_bytes / shape.rate.bandwidth
    forward = tokens * sizes.scan_flops() / (shape.rate.flops * SCAN_EFFICIENCY[kind.mixer]) + moved
    return forward, 2.5 * forward


def attention_time(model: Architecture, shape: LayerShape, kind: BlockKind) -> tuple[float, float]:
    """Seconds of attention without its projections, forward and backward."""
    trainer = shape.trainer
    if trainer.flash_attention and not model.capped_scores:
        causal_flops = shape.tokens * model.mixer_flops(kind, shape.sequence) / shape.tensor
        efficiency = trainer.attention_efficiency * head_dim_efficiency(model, shape.post_ampere)
        efficiency = efficiency * (trainer.post_ampere_attention if shape.post_ampere else 1.0)
        slowdown = trainer.context_attention_slowdown if shape.context > 1 else 1.0
        forward = causal_flops / (shape.rate.flops * efficiency) * slowdown
        return forward, 2.5 * forward / 0.85
    heads, head_dim = shape.micro_batch * max(1, model.heads // shape.tensor), model.head_dim
    queries, keys = shape.sequence // shape.context, shape.sequence
    if trainer.flash_attention:  # capped scores are computed by chunks of queries, without keys that none of them sees
        window = model.sliding_window if kind.mixer == "window" else 0
        keys = min(keys, round(attended_tokens(shape.sequence, window) + CHUNK_QUERIES / 2))
    scores = matmul_time(shape.rate, queries, keys, head_dim, heads)
    forward = scores + matmul_time(shape.rate, queries, head_dim, keys, heads)
    score_bytes = trainer.score_traffic_bytes * heads * queries * keys
    return forward + score_bytes / shape.rate.bandwidth, 2 * forward + 1.3 * score_bytes / shape.rate.bandwidth


def head_dim_efficiency(model: Architecture, post_ampere: bool) -> float:
    """The rate of attention relative to heads of size 128: smaller heads spend more time on softmax, whose rate has not
    grown with that of matmuls after the A100.
    """
    mla = model.latent_attention
    size = model.head_dim if mla is None else (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    return float(min(1.0, (size / 128) ** (0.45 if post_ampere else 0.15)))


def pointwise_bytes(model: Architecture, shape: LayerShape, kind: BlockKind) -> float:
    """Bytes that the memory-bound kernels of a forward pass move, without attention scores and scans."""
    trainer, tensor = shape.trainer, shape.tensor
    residual = (
        trainer.residual_traffic_bytes * shape.tokens * model.width / (tensor if trainer.sequence_parallel else 1)
    )
    moved = residual * kind.sublayers / 2
    if model.attention_gate and kind.has_attention:  # as a gated feed-forward of this inner width
        moved += 2 * trainer.ffn_traffic_bytes * shape.tokens * model.heads * model.head_dim / tensor
    if kind.ffn == "none":
        return moved
    if kind.ffn == "dense":
        return moved + trainer.ffn_traffic_bytes * shape.tokens * model.ffn * (model.ffn_matrices - 1) / tensor
    routed = routed_tokens(shape)
    permuted = permutation_bytes(model, shape, kind)
    shared = shape.tokens * model.shared_ffn / tensor
    inner = routed * model.expert_ffn * (FUSED_EXPERT_TRAFFIC if trainer.fused_experts else 1.0) + shared
    return moved + permuted + trainer.ffn_traffic_bytes * inner * (model.ffn_matrices - 1)


def permutation_bytes(model: Architecture, shape: LayerShape, kind: BlockKind) -> float:
    """Bytes that move when tokens are permuted and padded for their experts, permuted back, scaled and summed."""
    return 20 * routed_tokens(shape) * model.width if kind.ffn == "moe" else 0.0


@first_time.register
@cache
def _(model: Architecture, shape: LayerShape) -> LayerTime:
    moved_bytes = 4.0 * shape.tokens * model.width
    backward = memory_bound_time(shape.rate, 3 * moved_bytes) if shape.trained.before else 0.0
    return LayerTime(memory_bound_time(shape.rate, moved_bytes), backward, 0.0)


@last_time.register
@cache
def _(model: Architecture, shape: LayerShape) -> LayerTime:
    tokens, width = shape.tokens, model.width
    vocab = -(-model.vocab // shape.tensor // 8) * 8
    projection = matmul_time(shape.rate, tokens, vocab, width)
    weight_gradient = weight_gradient_time(shape.rate, tokens, vocab, width) if shape.trained.head else 0.0
    loss = shape.trainer.loss_traffic_bytes * tokens * vocab / shape.rate.bandwidth
    backward = matmul_time(shape.rate, tokens, width, vocab) + weight_gradient + 0.6 * loss
    return LayerTime(projection + 0.4 * loss, backward, weight_gradient)
