"""How long one layer, and each end of the model, computes on one rank, for one micro-batch.

T tokens, H width, A and K heads of size D for queries and keys, F inner width, t ranks that divide matrices. Products
of a dense layer: (T, (A + 2K) D / t, H), (T, H, A D / t), (T, 2F / t, H), (T, H, F / t); backward runs each twice, for
its input (T, inner, columns) and for its weight (columns, inner, T). Attention multiplies 2 T S (A D) / t twice, half
of it by flash kernels that skip what is masked, and flash backward runs five products for forward's two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from meshwright.planner.cost.kernel_time import KernelRate, kernel_rate, matmul_time, memory_bound_time
from meshwright.planner.workload.architecture import Architecture
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for one micro-batch; `weight` is the part of backward that only weights wait for."""

    forward: float
    backward: float
    weight: float
    again: float = 0.0
    """what is recomputed before backward"""
    look: float = 0.0
    """of forward, what attention takes between its products with weights"""


USUAL_LAUNCH = 9e-6
"""Seconds that a host of the runs that constants were fitted to took to ask for one operator."""
OFFLOADED = (2 * 4 + 28) / 50e9
"""Seconds a parameter: its gradient and its value over a bus of 50 GB/s, and the update in the host's memory."""
ASKED = 1.4
"""How much longer than for forward the host takes to ask for backward's kernels."""

MatmulShape = tuple[int, int, int, int]
"""rows, columns, inner, count"""


@dataclass(frozen=True)
class LayerShape:
    """What a layer's cost depends on."""

    model: Architecture
    stack: TrainerProfile
    tokens: int
    sequence: int
    micro: int
    context: int
    tensor: int
    expert: int
    recompute: str
    fast: KernelRate
    """of the products with weights"""
    plain: KernelRate
    """of everything else"""
    quantised: bool
    newer: bool
    """whether the device has other instructions for products than an A100"""
    waits: bool = False
    """whether the device is the host itself"""
    launch: float = 0.0
    """seconds in which this host asks for one operator, where somebody measured"""


def layer_shape(job: PlannedJob) -> LayerShape:
    low = job.precision in ("fp8", "fp4")
    plain = kernel_rate(job.cluster.device, "bf16" if low else job.precision, job.trainer)
    fast = kernel_rate(job.cluster.device, job.precision, job.trainer) if low else plain
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
        fast,
        plain,
        low,
        job.cluster.device.post_ampere,
        job.cluster.device.is_cpu,
        job.cluster.launch_seconds,
    )


def attention_products(of: LayerShape) -> list[MatmulShape]:
    """With weights."""
    model, cut, tokens = of.model, of.tensor, of.tokens
    if model.latent_attention is None:
        asked = model.head_dim * (model.heads + 2 * model.kv_heads) // cut
        return [(tokens, max(1, asked), model.width, 1), (tokens, model.width, model.heads * model.head_dim // cut, 1)]
    mla = model.latent_attention
    query = model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) // cut
    products = [(tokens, mla.kv_lora_rank + mla.qk_rope_head_dim, model.width, 1)]
    products += (
        [(tokens, mla.q_lora_rank, model.width, 1), (tokens, query, mla.q_lora_rank, 1)]
        if mla.q_lora_rank
        else [(tokens, query, model.width, 1)]
    )
    products.append((tokens, model.heads * (mla.qk_nope_head_dim + mla.v_head_dim) // cut, mla.kv_lora_rank, 1))
    products.append((tokens, model.width, model.heads * mla.v_head_dim // cut, 1))
    return products


def feed_forward_products(of: LayerShape, experts: bool) -> list[MatmulShape]:
    model, cut, tokens = of.model, of.tensor, of.tokens
    up = model.ffn_matrices - 1
    if not experts:
        return [(tokens, up * model.ffn // cut, model.width, 1), (tokens, model.width, model.ffn // cut, 1)]
    local = max(1, model.experts // of.expert)
    rows = max(1, routed_rows(of) // local)
    products = [(tokens, model.experts, model.width, 1)]
    products += [(rows, up * model.expert_ffn, model.width, local), (rows, model.width, model.expert_ffn, local)]
    if model.experts_shared:
        inner = model.experts_shared * model.expert_ffn // cut
        products += [(tokens, up * inner, model.width, 1), (tokens, model.width, inner, 1)]
    return products


def routed_rows(of: LayerShape) -> int:
    """Rows that a rank's experts compute, where every expert has as many: each rank of the tensor axis has its part of
    the tokens.
    """
    return of.tokens * of.model.experts_active // of.tensor


@cache
def layer_time(of: LayerShape, experts: bool) -> LayerTime:
    stack = of.stack
    products = attention_products(of) + feed_forward_products(of, experts)
    gap = stack.host_gap_seconds
    forward = sum(matmul_time(of.fast, *product) for product in products)
    inputs = sum(matmul_time(of.fast, rows, inner, columns, count) for rows, columns, inner, count in products)
    weights = sum(matmul_time(of.fast, columns, inner, rows, count) for rows, columns, inner, count in products)
    if of.quantised:
        numbers = sum(count * (rows * inner + inner * columns) for rows, columns, inner, count in products)
        forward += stack.quantize_traffic_bytes * numbers / of.plain.bandwidth
        inputs += (
            stack.quantize_traffic_bytes * sum(c * (r * n + n * k) for r, n, k, c in products) / of.plain.bandwidth
        )
    look, back = attention(of)
    moved = stream_bytes(of, experts) + stack.recast_traffic_bytes * sum(c * n * k for _, n, k, c in products)
    small = memory_bound_time(of.plain, moved, 8)
    behind = memory_bound_time(of.plain, 2 * moved, 14)
    host = stack.moe_layer_launch_seconds if experts else stack.layer_launch_seconds
    if of.launch:
        host *= of.launch / USUAL_LAUNCH
    ahead = beside(of, forward + look + small, host) + gap
    backward = beside(of, inputs + weights + back + behind, ASKED * host) + gap
    selected = (
        small + (forward / 2 if stack.selective_policy == "alternate_matmuls" else 0.0)
        if stack.flash_attention
        else look
    )
    again = {"none": 0.0, "selective": selected, "alternate": ahead / 2, "full": ahead}[of.recompute]
    return LayerTime(ahead, backward, weights, again, look)


def beside(of: LayerShape, computing: float, asking: float) -> float:
    """A device computes while the host asks for more; a host that is the device does one after the other."""
    return computing + asking if of.waits else max(computing, asking)


def attention_flops(of: LayerShape) -> float:
    """Forward, all of the square."""
    return 2.0 * of.tokens * of.sequence * of.model.attention_width / of.tensor


def attention(of: LayerShape) -> tuple[float, float]:
    """Forward and backward of what is between the products with weights."""
    model, stack = of.model, of.stack
    if stack.flash_attention:
        half = attention_flops(of) / 2
        share = stack.attention_efficiency * head_share(model) * (stack.post_ampere_attention if of.newer else 1.0)
        ahead = half / (of.plain.flops * share) * (stack.context_attention_slowdown if of.context > 1 else 1.0)
        return ahead, 2.5 * ahead / 0.85
    heads, head = of.micro * max(1, model.heads // of.tensor), model.head_dim
    local = of.sequence // of.context
    ahead = matmul_time(of.plain, local, of.sequence, head, heads) + matmul_time(
        of.plain, local, head, of.sequence, heads
    )
    score_bytes = stack.score_traffic_bytes * heads * local * of.sequence
    return ahead + score_bytes / of.plain.bandwidth, 2 * ahead + 1.3 * score_bytes / of.plain.bandwidth


def head_share(model: Architecture) -> float:
    """Of attention's rate at heads of 128: small heads leave more softmax to each product."""
    size = (
        model.head_dim
        if model.latent_attention is None
        else (model.latent_attention.qk_nope_head_dim + model.latent_attention.qk_rope_head_dim)
    )
    return float(min(1.0, (size / 128) ** 0.45))


def stream_bytes(of: LayerShape, experts: bool) -> float:
    """What a layer's forward moves beside its products, attention's scores apart."""
    model, stack, cut = of.model, of.stack, of.tensor
    wide = stack.residual_traffic_bytes * of.tokens * model.width / (cut if stack.sequence_parallel else 1)
    if not experts:
        return wide + stack.ffn_traffic_bytes * of.tokens * model.ffn * (model.ffn_matrices - 1) / cut
    rows = routed_rows(of)
    moved = 12 * rows * model.width  # sorted out, brought back and summed
    shared = of.tokens * model.experts_shared * model.expert_ffn / cut
    return wide + moved + stack.ffn_traffic_bytes * (rows * model.expert_ffn + shared) * (model.ffn_matrices - 1)


@cache
def embedding_time(of: LayerShape) -> LayerTime:
    """The embedding."""
    moved = 4.0 * of.tokens * of.model.width
    return LayerTime(memory_bound_time(of.plain, moved), memory_bound_time(of.plain, 3 * moved), 0.0)


@cache
def head_time(of: LayerShape) -> LayerTime:
    """The head and the loss."""
    columns = -(-of.model.vocab // of.tensor // 8) * 8
    product = (of.tokens, columns, of.model.width)
    rows, columns, inner = product
    ahead = matmul_time(of.plain, rows, columns, inner)
    weights = matmul_time(of.plain, columns, inner, rows)
    lost = of.stack.loss_traffic_bytes * of.tokens * columns / of.plain.bandwidth
    backward = matmul_time(of.plain, rows, inner, columns) + weights + 0.6 * lost
    return LayerTime(ahead + 0.4 * lost, backward, weights, 2.0 * rows * columns * inner)


def optimizer_time(job: PlannedJob, parameters: float) -> float:
    """AdamW over so many parameters of a rank: reads gradient, weight and both moments, writes weight and moments;
    before it the norm reads gradients, and clipping reads and writes them.
    """
    on = kernel_rate(job.cluster.device, "bf16", job.trainer)
    stack = job.trainer
    moved = 2 * (stack.optimizer_bytes + stack.parameter_bytes) + stack.compute_copy_bytes + 4 * stack.gradient_bytes
    offload = job.run_config is not None and job.run_config.optimizer.cpu_offload
    return moved * parameters / on.bandwidth + (OFFLOADED * parameters if offload else 0.0)
