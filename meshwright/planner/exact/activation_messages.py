"""What one rank sends of activations and their gradients in one step: between matrices, pieces, experts and stages.

B samples a micro-step, S tokens of a sequence that a rank of context has, W width, e bytes of an element; of every
block and micro-step, and once more where forward is recomputed:

| axis | forward | backward |
|---|---|---|
| tensor | gather B S W e, scatter the same, before and after attention and what every token visits | the same |
| tensor, embedding and head | scatter and gather | gather and scatter; and of the loss three sums, one number a token |
| context by ring | C - 1 sends of 2 B K S D e: K heads of size D, keys and values | those, and gradients in float32 |
| context by all-to-all | B (H + 2 K') S D e and B H S D e, K' = lcm(K, C) | the same |
| expert | 8 E counts; rows there and back | rows there and back |
| context+tensor | 8 B E: choices of whole sequences, where the balance loss has a weight | |
| pipeline | one send of B S W a stage | the same |

Rows that go to experts are B S active / tensor of W e on every rank, and as many come back. How many a rank has of
others' depends on the data: on the rows that it sends back the formula is that of an even load, and it is exact for the
sum over the ranks that share the experts.
"""

from __future__ import annotations

from collections import Counter
from math import lcm

from meshwright.config import Batch, RunConfig
from meshwright.config.dtypes import COMPUTE_BYTES
from meshwright.topology.layout import Layout
from meshwright.topology.parameter_shards import ParameterShard, PipelinePlacement
from meshwright.topology.schedules import rank_of_stage

Messages = Counter[tuple[str, str]]
"""By axis and collective, in bytes."""


def data_dependent_axes(config: RunConfig, layout: Layout) -> dict[str, str]:
    """Axes of which nobody can say beforehand what they carry, and why."""
    if config.model.capacity_factor and layout.expert > 1:
        return {"expert": "how many rows exceed capacity_factor depends on the data"}
    return {}


def weight_bytes(config: RunConfig) -> int:
    return 8 if config.precision.compute == "fp64" else 4


def passes(config: RunConfig) -> int:
    """Forward passes through a block for one backward."""
    return 1 if config.activation_checkpoint.mode == "none" else 2


def matrices(config: RunConfig, layout: Layout, batch: Batch, hold: PipelinePlacement) -> Messages:
    """Of the tensor axis."""
    tokens = batch.micro * config.data.sequence // layout.context
    activation = tokens * config.model.width * COMPUTE_BYTES[config.precision.compute]
    embedded = tokens * config.model.width * weight_bytes(config)  # the embedding's sum, and its gradient coming back
    gathered, scattered = recomputed(config, hold)
    each = 2 * cut_parts(config)
    messages: Messages = Counter()
    messages["tensor", "all_gather"] = (
        each * hold.layers + gathered + hold.has_last_stage
    ) * activation + hold.has_first_stage * embedded
    messages["tensor", "reduce_scatter"] = (
        each * hold.layers + scattered + hold.has_last_stage
    ) * activation + hold.has_first_stage * embedded
    # Maximum, sum of exponentials and the label's logit, each one number a token, in float32 at least.
    messages["tensor", "all_reduce"] = hold.has_last_stage * 3 * tokens * weight_bytes(config)
    return times(batch.accumulation, messages)


def cut_parts(config: RunConfig) -> int:
    """ParallelSpec of a block that are cut: attention, and a feed-forward that every token visits."""
    return 1 if config.model.experts and not config.model.experts_shared else 2


def recomputed(config: RunConfig, hold: PipelinePlacement) -> tuple[int, int]:
    """Gathers and scatters of activations that are made again. A scatter at a block's end gives nothing that its
    backward needs, and of blocks that are recomputed together only the last one's can be left out. Experts end in one
    only where all tokens visit some, and where no balance loss comes after it.
    """
    checkpointing, model, parts = config.activation_checkpoint, config.model, cut_parts(config)
    if checkpointing.mode == "none":
        return 0, 0
    if checkpointing.mode == "selective":
        return parts * hold.layers, 0
    ends = not model.experts or (model.experts_shared > 0 and not model.router_aux_loss)
    segments = sum(-(-len(blocks) // checkpointing.segment) for blocks in hold.stages.values())
    return parts * hold.layers, parts * hold.layers - segments * ends


def attention(config: RunConfig, layout: Layout, batch: Batch, hold: PipelinePlacement) -> Messages:
    """Of the context axis."""
    model, ranks = config.model, layout.context
    heads, keys = model.heads // layout.tensor, model.kv_heads // layout.tensor
    numbers = batch.micro * (config.data.sequence // ranks) * (model.width // model.heads)  # of one head
    size, summed = COMPUTE_BYTES[config.precision.compute], weight_bytes(config)
    if config.context.method == "ring":
        forward = (ranks - 1) * 2 * keys * numbers * size
        backward = forward + (ranks - 1) * 2 * keys * numbers * summed
        collective = "send"
    else:
        forward = backward = (2 * heads + 2 * lcm(keys, ranks)) * numbers * size
        collective = "all_to_all"
    each = passes(config) * forward + backward
    return Counter({("context", collective): batch.accumulation * hold.layers * each})


def experts(config: RunConfig, layout: Layout, batch: Batch, hold: PipelinePlacement) -> Messages:
    model = config.model
    tokens = batch.micro * config.data.sequence // (layout.context * layout.tensor)
    there_and_back = 2 * tokens * model.experts_active * model.width * COMPUTE_BYTES[config.precision.compute]
    messages: Messages = Counter()
    if layout.expert > 1:
        forward = 8 * model.experts + there_and_back
        messages["expert", "all_to_all"] = passes(config) * forward + there_and_back
    if layout.context * layout.tensor > 1 and model.router_aux_loss:
        messages["context+tensor", "all_reduce"] = passes(config) * 8 * batch.micro * model.experts
    return times(batch.accumulation * hold.layers, messages)


def stages(
    config: RunConfig, layout: Layout, batch: Batch, hold: PipelinePlacement, pieces: list[ParameterShard], rank: int
) -> Messages:
    """Of the pipeline axis: hidden states to the next stage and gradients to the one before, unless that is on the same
    rank; of a tied weight the head's gradient to the first stage, and its new value back.
    """
    kind, ranks, place = config.pipeline.schedule, layout.pipeline, layout.coordinates(rank)["pipeline"]
    neighbours = [other for stage in hold.stages for other in (stage - 1, stage + 1) if 0 <= other < hold.stage_count]
    sends = sum(rank_of_stage(kind, ranks, other) != place for other in neighbours)
    tokens = batch.micro * config.data.sequence // (layout.context * layout.tensor)
    message = batch.accumulation * sends * tokens * config.model.width
    if config.model.tie and hold.has_first_stage != hold.has_last_stage:
        ends = ("decoder.embedding.weight", "head.weight")
        message += sum(piece.shard_numel for piece in pieces if piece.name in ends)
    return Counter({("pipeline", "send"): message * weight_bytes(config)})


def times(count: int, messages: Messages) -> Messages:
    return Counter({key: count * message for key, message in messages.items()})
