"""Message bytes of activations and their gradients that one rank communicates in a step, by axis and collective.

B is the number of samples per micro-step, S the tokens of a sequence on one context rank, W the width, e the bytes per
element, w those of a gradient element, C the context-parallel degree, H the query heads, K the key and value heads, D
the head dimension, E the experts. The messages are those of one block and one micro-step; activation checkpointing
repeats those of forward.

| axis | forward | backward |
|---|---|---|
| tensor | all-gather and reduce-scatter of B S W e, around attention and around the dense feed-forward | the same |
| tensor, embedding and head | reduce-scatter and all-gather | all-gather and reduce-scatter |
| tensor, loss | three all-reduces of one number per token | |
| context, ring | C - 1 sends of 2 B K S D e | C - 1 sends of 2 B K S D e, and C - 1 of 2 B K S D w |
| context, all-to-all | B (H + 2 K') S D e and B H S D e, with K' = lcm(K, C) | the same |
| expert | 8 E bytes of token counts; tokens to the experts and back | tokens to the experts and back |
| context+tensor | 8 B E: expert choices of full sequences, if the load-balancing loss has a weight | |
| pipeline | one send of B S W per stage | the same |

Every rank sends B S active / tensor tokens of W e bytes to experts, and receives as many back. The number of tokens
that a rank's experts receive depends on the data. For the tokens that a rank sends back, the formula assumes a uniform
load; it is exact for the sum over the ranks of an expert group.
"""

from __future__ import annotations

from collections import Counter
from math import lcm
from typing import NamedTuple

from meshwright.config import Batch, RunConfig
from meshwright.config.dtypes import COMPUTE_BYTES, parameter_bytes, residual_bytes, rounds_weights, weight_bytes
from meshwright.models.spec import ModelSpec
from meshwright.topology.layout import Layout
from meshwright.topology.parameter_shards import ParameterShard, PipelinePlacement, uses_fsdp
from meshwright.topology.schedules import rank_of_stage

MessageBytes = Counter[tuple[str, str]]
"""Message bytes by axis and collective."""


def data_dependent_axes(config: RunConfig, layout: Layout) -> dict[str, str]:
    """The axes whose volume depends on the data, each with the reason."""
    if config.model.capacity_factor and layout.expert > 1:
        return {"expert": "the number of tokens over capacity_factor depends on the data"}
    return {}


def forward_passes(config: RunConfig) -> int:
    """The number of forward passes through a block per backward pass."""
    return 1 if config.activation_checkpoint.mode == "none" else 2


def tensor_parallel_messages(
    config: RunConfig, layout: Layout, batch: Batch, placement: PipelinePlacement, spec: ModelSpec
) -> MessageBytes:
    tokens = batch.micro * config.data.sequence // layout.context
    activation = tokens * config.model.width * COMPUTE_BYTES[config.precision.compute]
    frozen = frozen_modules(config, spec)
    element_bytes = parameter_bytes(config) if frozen.embedding else weight_bytes(config)
    embedding = tokens * config.model.width * element_bytes  # the embedding's output, and its gradient
    all_gathers, reduce_scatters = recomputed_collectives(config, placement, spec)
    both_passes = 2 * tensor_parallel_modules(config, placement, spec)
    first, last = placement.has_first_stage, placement.has_last_stage
    messages: MessageBytes = Counter()
    messages["tensor", "all_gather"] = (both_passes + all_gathers + last) * activation + first * embedding
    messages["tensor", "reduce_scatter"] = (both_passes + reduce_scatters + last) * activation + first * embedding
    # The loss reduces the maximum, the sum of exponentials and the label's logit: one float32 (or wider) per token.
    messages["tensor", "all_reduce"] = last * 3 * tokens * parameter_bytes(config)
    if config.rl.enabled:  # the entropy of the policy gathers three such numbers from every rank
        messages["tensor", "all_gather"] += last * layout.tensor * 3 * tokens * parameter_bytes(config)
    if first:
        messages["tensor", "all_gather"] -= frozen.embedding * embedding + frozen.outputs * activation
        messages["tensor", "reduce_scatter"] -= frozen.inputs * activation
    return multiply(batch.accumulation, messages)


class FrozenModules(NamedTuple):
    """The tensor-parallel modules at the beginning of a model with frozen parameters that have no backward pass."""

    embedding: int
    """1 if the embedding has no gradient"""
    inputs: int
    """modules of blocks whose input has no gradient"""
    outputs: int
    """modules of blocks whose output has no gradient"""


def frozen_modules(config: RunConfig, spec: ModelSpec) -> FrozenModules:
    """Backward ends at the first trainable parameter of the model. Parameters are in the order of their use."""
    names = [parameter.name for parameter in spec.parameters]
    first = next((index for index, parameter in enumerate(spec.parameters) if parameter.trainable), len(names))
    modules: list[tuple[str, ...]] = []
    for index, block in enumerate(spec.block_names):
        modules.append((f"{block}.attention.",))
        if not is_moe_block(spec, index) or config.model.experts_shared:
            modules.append((f"{block}.ffn.", f"{block}.dense_ffn."))
    spans = [[index for index, name in enumerate(names) if name.startswith(module)] for module in modules]
    return FrozenModules(
        int(first > 0), sum(first >= span[0] for span in spans), sum(first > span[-1] for span in spans)
    )


def tensor_parallel_modules(config: RunConfig, placement: PipelinePlacement, spec: ModelSpec) -> int:
    """The number of tensor-parallel modules of a rank's blocks: attention, and a feed-forward that processes every
    token, which experts without shared ones are not.
    """
    without = 0 if config.model.experts_shared else moe_layers(placement, spec)
    return 2 * placement.layers - without


def moe_layers(placement: PipelinePlacement, spec: ModelSpec) -> int:
    """The number of a rank's blocks that have experts."""
    return sum(is_moe_block(spec, block) for blocks in placement.stages.values() for block in blocks)


def is_moe_block(spec: ModelSpec, block: int) -> bool:
    return spec.architecture is not None and spec.architecture.is_moe_layer(block)


def recomputed_collectives(config: RunConfig, placement: PipelinePlacement, spec: ModelSpec) -> tuple[int, int]:
    """The all-gathers and reduce-scatters that activation checkpointing repeats. The reduce-scatter at the end of a
    block produces nothing that the block's backward needs, so it is not repeated, except inside a segment of several
    blocks, and before a norm at the end of the block. A mixture of experts ends with a reduce-scatter only if it has
    shared experts and no load-balancing loss.
    """
    checkpointing, model = config.activation_checkpoint, config.model
    modules = tensor_parallel_modules(config, placement, spec)
    if checkpointing.mode == "none":
        return 0, 0
    if checkpointing.mode == "selective":
        return modules, 0

    def ends_with_scatter(block: int) -> bool:
        if spec.architecture is not None and spec.architecture.post_norms:
            return False
        return not is_moe_block(spec, block) or (model.experts_shared > 0 and not model.router_aux_loss)

    segments = (
        blocks[start : start + checkpointing.segment]
        for blocks in placement.stages.values()
        for start in range(0, len(blocks), checkpointing.segment)
    )
    return modules, modules - sum(ends_with_scatter(segment[-1]) for segment in segments)


def context_parallel_messages(
    config: RunConfig, layout: Layout, batch: Batch, placement: PipelinePlacement, spec: ModelSpec
) -> MessageBytes:
    model, ranks = spec.architecture, layout.context
    assert model is not None
    heads, kv_heads = model.heads // layout.tensor, model.kv_heads // layout.tensor
    head_elements = batch.micro * (config.data.sequence // ranks) * model.head_dim
    compute_bytes, gradient_bytes = COMPUTE_BYTES[config.precision.compute], parameter_bytes(config)
    if config.context.method == "ring":
        forward = (ranks - 1) * 2 * kv_heads * head_elements * compute_bytes
        backward = forward + (ranks - 1) * 2 * kv_heads * head_elements * gradient_bytes
        collective = "send"
    else:
        forward = backward = (2 * heads + 2 * lcm(kv_heads, ranks)) * head_elements * compute_bytes
        collective = "all_to_all"
    per_block = forward_passes(config) * forward + backward
    return Counter({("context", collective): batch.accumulation * placement.layers * per_block})


def expert_parallel_messages(
    config: RunConfig, layout: Layout, batch: Batch, placement: PipelinePlacement, spec: ModelSpec
) -> MessageBytes:
    model = config.model
    tokens = batch.micro * config.data.sequence // (layout.context * layout.tensor)
    dispatch_and_combine = 2 * tokens * model.experts_active * model.width * COMPUTE_BYTES[config.precision.compute]
    messages: MessageBytes = Counter()
    if layout.expert > 1:
        forward = 8 * model.experts + dispatch_and_combine
        messages["expert", "all_to_all"] = forward_passes(config) * forward + dispatch_and_combine
    if layout.context * layout.tensor > 1 and model.router_aux_loss:
        messages["context+tensor", "all_reduce"] = forward_passes(config) * 8 * batch.micro * model.experts
    return multiply(batch.accumulation * moe_layers(placement, spec), messages)


def pipeline_messages(
    config: RunConfig,
    layout: Layout,
    batch: Batch,
    placement: PipelinePlacement,
    parameters: list[ParameterShard],
    rank: int,
) -> MessageBytes:
    """Hidden states go to the next stage and gradients to the previous one, unless that stage is on the same rank. With
    tied weights, the gradient of the head goes to the first stage, and the updated weight comes back.
    """
    kind, ranks, pipeline_rank = config.pipeline.schedule, layout.pipeline, layout.coordinates(rank)["pipeline"]
    neighbours = [
        other for stage in placement.stages for other in (stage - 1, stage + 1) if 0 <= other < placement.stage_count
    ]
    sends = sum(rank_of_stage(kind, ranks, other) != pipeline_rank for other in neighbours)
    tokens = batch.micro * config.data.sequence // (layout.context * layout.tensor)
    message = batch.accumulation * sends * tokens * config.model.width * residual_bytes(config)
    if placement.has_first_stage != placement.has_last_stage:
        tied = sum(p.shard_numel for p in parameters if p.is_tied and p.trainable)
        sent_bytes = weight_bytes(config) if placement.has_first_stage else gradient_bytes(config, layout, batch)
        message += tied * sent_bytes
    return Counter({("pipeline", "send"): message})


def gradient_bytes(config: RunConfig, layout: Layout, batch: Batch) -> int:
    """Bytes per element of a gradient before the update: float32 if it was reduced by FSDP2 or accumulated, otherwise
    that of the weights.
    """
    is_float32 = not rounds_weights(config) or uses_fsdp(layout) or batch.accumulation > 1
    return parameter_bytes(config) if is_float32 else weight_bytes(config)


def multiply(count: int, messages: MessageBytes) -> MessageBytes:
    return Counter({key: count * message for key, message in messages.items()})
