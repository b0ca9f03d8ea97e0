"""Time of one layer, of the embedding and of the head on one rank, for one micro-batch.

T is the number of tokens, H the width, A and K the query and key heads of size D, F the width of the feed-forward,
t the tensor-parallel degree. The matrix products (rows, columns, inner) of a dense layer are (T, (A + 2K) D / t, H),
(T, H, A D / t), (T, 2F / t, H) and (T, H, F / t). Backward runs each twice: for the input gradient (T, inner, columns)
and for the weight gradient (columns, inner, T). Attention multiplies 2 T S (A D) / t twice; flash kernels skip the
masked half, and flash backward runs five products where forward runs two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, singledispatch
from typing import Any

from meshwright.models.architecture import Architecture
from meshwright.models.registry import run_spec
from meshwright.planner.cost.kernel_time import KernelRate, kernel_rate, matmul_time, memory_bound_time
from meshwright.planner.hardware.links import collective_seconds, group_placement
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.traced_model import TracedModel
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.topology.optimizer_state import OUTSIDE_BLOCKS, update_rule


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


REFERENCE_LAUNCH = 9e-6
"""Seconds in which the host launches one operator, on the machines that the trainer profiles were fitted to."""
OFFLOAD_SECONDS = (2 * 4 + 28) / 50e9
"""Seconds per parameter of an offloaded update: gradient and parameter cross a bus of 50 GB/s, and the host updates."""
BACKWARD_LAUNCHES = 1.4
"""The host's launch time of a backward pass, relative to that of a forward pass."""

MatmulShape = tuple[int, int, int, int]
"""rows, columns, inner, count"""


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
    """the rates of matrix products with weights"""
    rate: KernelRate
    """the rates of all other kernels"""
    quantized: bool
    post_ampere: bool
    """whether the device has other matrix instructions than an A100"""
    on_cpu: bool = False
    launch_seconds: float = 0.0
    """measured seconds in which the host launches one operator; 0 if unknown"""


def layer_shape(job: PlannedJob) -> LayerShape:
    quantized = job.precision in ("fp8", "fp4")
    rate = kernel_rate(job.cluster.device, "bf16" if quantized else job.precision, job.trainer)
    linear_rate = kernel_rate(job.cluster.device, job.precision, job.trainer) if quantized else rate
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
    )


def attention_projections(model: Architecture, shape: LayerShape) -> list[MatmulShape]:
    tensor, tokens = shape.tensor, shape.tokens
    if model.latent_attention is None:
        qkv = model.head_dim * (model.heads + 2 * model.kv_heads) // tensor
        return [(tokens, max(1, qkv), model.width, 1), (tokens, model.width, model.heads * model.head_dim // tensor, 1)]
    mla = model.latent_attention
    query = model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) // tensor
    matmuls = [(tokens, mla.kv_lora_rank + mla.qk_rope_head_dim, model.width, 1)]
    matmuls += (
        [(tokens, mla.q_lora_rank, model.width, 1), (tokens, query, mla.q_lora_rank, 1)]
        if mla.q_lora_rank
        else [(tokens, query, model.width, 1)]
    )
    matmuls.append((tokens, model.heads * (mla.qk_nope_head_dim + mla.v_head_dim) // tensor, mla.kv_lora_rank, 1))
    matmuls.append((tokens, model.width, model.heads * mla.v_head_dim // tensor, 1))
    return matmuls


def feed_forward_matmuls(model: Architecture, shape: LayerShape, moe: bool) -> list[MatmulShape]:
    tensor, tokens = shape.tensor, shape.tokens
    up = model.ffn_matrices - 1
    if not moe:
        return [(tokens, up * model.ffn // tensor, model.width, 1), (tokens, model.width, model.ffn // tensor, 1)]
    local_experts = max(1, model.experts // shape.expert)
    rows = max(1, routed_tokens(shape) // local_experts)
    matmuls = [(tokens, model.experts, model.width, 1)]
    matmuls += [
        (rows, up * model.expert_ffn, model.width, local_experts),
        (rows, model.width, model.expert_ffn, local_experts),
    ]
    if model.experts_shared:
        inner = model.experts_shared * model.expert_ffn // tensor
        matmuls += [(tokens, up * inner, model.width, 1), (tokens, model.width, inner, 1)]
    return matmuls


def routed_tokens(shape: LayerShape) -> int:
    """The tokens that a rank's experts process with a uniform load; each tensor-parallel rank routes its own share."""
    return shape.tokens * shape.model.experts_active // shape.tensor


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
    trainer = shape.trainer
    matmuls = attention_projections(model, shape) + feed_forward_matmuls(model, shape, moe)
    linear = sum(matmul_time(shape.linear_rate, *matmul) for matmul in matmuls)
    input_gradients = sum(matmul_time(shape.linear_rate, m, k, n, count) for m, n, k, count in matmuls)
    weight_gradients = sum(matmul_time(shape.linear_rate, n, k, m, count) for m, n, k, count in matmuls)
    bandwidth = shape.rate.bandwidth
    if shape.quantized:
        elements = sum(count * (m * k + k * n) for m, n, k, count in matmuls)
        gradient_elements = sum(count * (m * n + n * k) for m, n, k, count in matmuls)
        linear += trainer.quantize_traffic_bytes * elements / bandwidth
        input_gradients += trainer.quantize_traffic_bytes * gradient_elements / bandwidth
    attention, attention_backward = attention_time(model, shape)
    weights = sum(count * n * k for _, n, k, count in matmuls)
    moved_bytes = pointwise_bytes(model, shape, moe) + trainer.recast_traffic_bytes * weights
    pointwise = memory_bound_time(shape.rate, moved_bytes, 8)
    pointwise_backward = memory_bound_time(shape.rate, 2 * moved_bytes, 14)
    launch = trainer.moe_layer_launch_seconds if moe else trainer.layer_launch_seconds
    if shape.launch_seconds:
        launch *= shape.launch_seconds / REFERENCE_LAUNCH
    gap = trainer.host_gap_seconds
    forward = with_launches(shape, linear + attention + pointwise, launch) + gap
    gradients = input_gradients + weight_gradients + attention_backward + pointwise_backward
    backward = with_launches(shape, gradients, BACKWARD_LAUNCHES * launch) + gap
    if trainer.flash_attention:
        selective = pointwise + (linear / 2 if trainer.selective_policy == "alternate_matmuls" else 0.0)
    else:
        selective = attention
    recompute = {"none": 0.0, "selective": selective, "alternate": forward / 2, "full": forward}
    return LayerTime(forward, backward, weight_gradients, recompute[shape.activation_checkpoint], attention)


def with_launches(shape: LayerShape, compute: float, launch: float) -> float:
    """A GPU computes while the host launches the next kernels. A CPU does both one after the other."""
    return compute + launch if shape.on_cpu else max(compute, launch)


def attention_flops(model: Architecture, shape: LayerShape) -> float:
    """FLOPs of attention in forward, without a causal mask."""
    return 2.0 * shape.tokens * shape.sequence * model.attention_width / shape.tensor


def attention_time(model: Architecture, shape: LayerShape) -> tuple[float, float]:
    """Seconds of attention without its projections, forward and backward."""
    trainer = shape.trainer
    if trainer.flash_attention and not model.capped_scores:
        causal_flops = attention_flops(model, shape) / 2
        efficiency = trainer.attention_efficiency * head_dim_efficiency(model)
        efficiency = efficiency * (trainer.post_ampere_attention if shape.post_ampere else 1.0)
        slowdown = trainer.context_attention_slowdown if shape.context > 1 else 1.0
        forward = causal_flops / (shape.rate.flops * efficiency) * slowdown
        return forward, 2.5 * forward / 0.85
    heads, head_dim = shape.micro_batch * max(1, model.heads // shape.tensor), model.head_dim
    queries = shape.sequence // shape.context
    scores = matmul_time(shape.rate, queries, shape.sequence, head_dim, heads)
    forward = scores + matmul_time(shape.rate, queries, head_dim, shape.sequence, heads)
    score_bytes = trainer.score_traffic_bytes * heads * queries * shape.sequence
    return forward + score_bytes / shape.rate.bandwidth, 2 * forward + 1.3 * score_bytes / shape.rate.bandwidth


def head_dim_efficiency(model: Architecture) -> float:
    """The rate of attention relative to heads of size 128: smaller heads spend more time on softmax."""
    mla = model.latent_attention
    size = model.head_dim if mla is None else (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    return float(min(1.0, (size / 128) ** 0.45))


def pointwise_bytes(model: Architecture, shape: LayerShape, moe: bool) -> float:
    """Bytes that the memory-bound kernels of a forward pass move, without attention scores."""
    trainer, tensor = shape.trainer, shape.tensor
    residual = (
        trainer.residual_traffic_bytes * shape.tokens * model.width / (tensor if trainer.sequence_parallel else 1)
    )
    if not moe:
        return residual + trainer.ffn_traffic_bytes * shape.tokens * model.ffn * (model.ffn_matrices - 1) / tensor
    routed = routed_tokens(shape)
    permuted = 12 * routed * model.width  # tokens are permuted, permuted back and summed
    shared = shape.tokens * model.experts_shared * model.expert_ffn / tensor
    inner = routed * model.expert_ffn + shared
    return residual + permuted + trainer.ffn_traffic_bytes * inner * (model.ffn_matrices - 1)


@first_time.register
@cache
def _(model: Architecture, shape: LayerShape) -> LayerTime:
    moved_bytes = 4.0 * shape.tokens * model.width
    return LayerTime(memory_bound_time(shape.rate, moved_bytes), memory_bound_time(shape.rate, 3 * moved_bytes), 0.0)


@last_time.register
@cache
def _(model: Architecture, shape: LayerShape) -> LayerTime:
    tokens, width = shape.tokens, model.width
    vocab = -(-model.vocab // shape.tensor // 8) * 8
    projection = matmul_time(shape.rate, tokens, vocab, width)
    weight_gradient = matmul_time(shape.rate, vocab, width, tokens)
    loss = shape.trainer.loss_traffic_bytes * tokens * vocab / shape.rate.bandwidth
    backward = matmul_time(shape.rate, tokens, width, vocab) + weight_gradient + 0.6 * loss
    return LayerTime(projection + 0.4 * loss, backward, weight_gradient)


def optimizer_time(job: PlannedJob, parameters: float) -> float:
    """Seconds of the update of this many local parameters. It reads gradient, parameter and optimizer state, and writes
    parameter and state. Before it, the gradient norm reads gradients, and clipping reads and writes them.
    """
    rate = kernel_rate(job.cluster.device, "bf16", job.trainer)
    trainer = job.trainer
    moved_bytes = 2 * (job.optimizer_bytes + trainer.parameter_bytes)
    moved_bytes = moved_bytes + trainer.compute_copy_bytes + 4 * trainer.gradient_bytes
    if trainer.master_bytes:  # one kernel clips, updates the master weights and writes the weights
        moved_bytes = 2 * job.optimizer_bytes + trainer.parameter_bytes + 2 * trainer.gradient_bytes
    offload = job.run_config is not None and job.run_config.optimizer.cpu_offload
    elementwise = moved_bytes * parameters / rate.bandwidth + (OFFLOAD_SECONDS * parameters if offload else 0.0)
    return elementwise + muon_time(job)


def muon_time(job: PlannedJob) -> float:
    """Seconds of Muon beyond an elementwise update: a rank's share of the Newton-Schulz iterations in float32, three
    products each, and the exchange of its shards with the owners of the matrices.
    """
    config, layout = job.run_config, job.layout
    if config is None or config.optimizer.kind != "muon":
        return 0.0
    rate = kernel_rate(job.cluster.device, "fp32", job.trainer)
    spec = job.model.spec if isinstance(job.model, TracedModel) else run_spec(config)
    seconds, elements = 0.0, 0
    for parameter in spec.parameters:
        in_block = parameter.unit not in OUTSIDE_BLOCKS
        if update_rule(config.optimizer, parameter.name, parameter.shape, in_block) == "muon" and parameter.trainable:
            short, long = sorted(parameter.shape[-2:])
            products = ((short, short, long), (short, short, short), (short, long, short))
            matrices = parameter.local_numel() // (short * long)
            seconds += matrices * sum(matmul_time(rate, *product) for product in products)
            elements += parameter.local_numel()
    ranks = layout.ranks // layout.pipeline
    seconds *= config.optimizer.newton_schulz_steps / layout.ranks
    shards = layout.tensor * (layout.shard * layout.context if job.sharding != "none" else 1)
    exchanged = 4.0 * elements / layout.pipeline * (1 / shards + (1 / ranks if shards > 1 else 0.0))
    placement = group_placement(job.cluster.devices_per_node, ranks, 1)
    return seconds + (collective_seconds(job.cluster, "all_to_all", exchanged, placement) if ranks > 1 else 0.0)
