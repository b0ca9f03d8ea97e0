"""The sizes of a proof run: a config on a small layout, with the same structure and sizes that its axes divide.

Rows of the matrices do not divide evenly among shards where the layout allows it, so that padding is proven too.
Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from math import lcm

from meshwright.base.config import (
    BatchConfig,
    CheckpointConfig,
    DDPConfig,
    EvalConfig,
    FSDPConfig,
    LaunchConfig,
    LayoutConfig,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    derive_batch,
)
from meshwright.base.dtypes import COMPUTE_BYTES
from meshwright.base.models.registry import model_spec
from meshwright.base.topology.layout import Layout, stages_per_rank
from meshwright.base.topology.parameter_shards import uses_ddp
from meshwright.base.topology.schedules import find_schedule
from meshwright.base.topology.unsupported import min_shard_group_size

HANG_TIMEOUT = 60.0
"""Seconds after which a proof run without progress has failed."""
WARMUP = 2
"""Steps of warm-up; of a proof run of four steps, half."""
CADENCE = 2
"""Steps between checkpoints, evaluations and comparisons of replicas."""
KEPT_CHECKPOINTS = 3
"""Enough to keep the first checkpoint of a proof run."""
MAX_WORKERS = 2
FULL_ACCUMULATION = 8
"""Up to this number, a proof run has as many micro-batches per step as the user's."""
MAX_BLOCK_PASSES = 16_384
"""Beyond `FULL_ACCUMULATION`, the most passes of a micro-batch through a block that all ranks make per step."""
ALIGNED_ROWS = 8
"""Elements of a low precision in the 16 bytes to which the grouped kernel of experts needs rows aligned."""
FLOAT8_ROWS = 16
"""The dimensions of a layer in float8 are multiples of this."""
BUCKETS = 6
"""The gradients of a proof run fill about this many buckets of DDP."""


@dataclass(frozen=True)
class Limits:
    """The largest sizes of a proof run."""

    vocab: int = 250
    ffn: int = 90
    kv_heads: int = 2
    heads: int = 32
    width: int = 64
    """with more than `width` / 4 heads, a head of four still has two rotary frequencies"""
    head_size: int = 16
    experts: int = 4
    """or twice as many as are active, if that is more"""
    experts_active: int = 8
    sequence: int = 24
    micro: int = 2
    steps: int = 4


SMALL = Limits()
UNLIMITED = replace(SMALL, **{name: 1 << 62 for name in Limits.__dataclass_fields__ if name != "steps"})
"""Limits that shrink nothing; sizes that a smaller layout does not divide are still rounded up."""


def shrink(config: RunConfig, layout_config: LayoutConfig, limits: Limits = SMALL) -> RunConfig:
    """The config on this layout: sizes and cadences shrink, every other setting stays."""
    layout = Layout.from_config(layout_config)
    model = small_model(config, layout, limits)
    return replace(
        config,
        steps=min(config.steps or limits.steps, limits.steps),
        init_from="",
        model=model,
        layout=layout_config,
        data=replace(
            config.data,
            sequence=small_sequence(config, layout, limits.sequence),
            workers=min(config.data.workers, MAX_WORKERS),
        ),
        batch=small_batch(config, layout, proof_accumulation(config, layout, limits), limits.micro),
        schedule=small_schedule(config.schedule, limits.steps),
        numerics=replace(config.numerics, compare_every=min(config.numerics.compare_every, CADENCE)),
        eval=small_eval(config.eval, layout),
        checkpoint=small_checkpoint(config.checkpoint),
        fsdp=fit_reshard_degree(config.fsdp, layout),
        ddp=small_buckets(config, model, layout),
        count_bytes_every=limits.steps,
        launch=small_launch(config),
    )


def small_launch(config: RunConfig) -> LaunchConfig:
    """A failed proof run is not restarted. Compilation may take as long as the user's timeout allows."""
    hang_timeout = config.launch.hang_timeout
    return replace(
        config.launch,
        restarts=0,
        hang_timeout=hang_timeout if config.compile.enabled else min(hang_timeout, HANG_TIMEOUT),
    )


def small_model(config: RunConfig, layout: Layout, limits: Limits) -> ModelConfig:
    """The model with the same structure: the ratio of query heads to key-value heads, more experts than active ones,
    and fewer key-value heads than attention ranks stay if they are the user's.
    """
    model, tensor = config.model, layout.tensor
    heads, kv_heads = small_heads(config, layout, limits)
    head_size = model.width // model.heads
    even_size = min(head_size, limits.head_size, max(4, limits.width // heads)) // 2 * 2
    if config.precision.float8 and head_size % FLOAT8_ROWS == 0:
        even_size = FLOAT8_ROWS
    shards = layout.shard * layout.context if layout.shard > 1 else 1
    vocab = uneven_size(model.vocab, limits.vocab, tensor, shards)
    experts, active = small_experts(model, layout.expert, limits)
    return replace(
        model,
        vocab=vocab,
        width=heads * even_size,
        heads=heads,
        kv_heads=kv_heads,
        ffn=small_ffn(config, layout, limits, shards),
        experts=experts,
        experts_active=active,
        separator=None if model.separator is None else model.separator % vocab,
        capacity_factor=0.0 if layout.context * layout.tensor > 1 else model.capacity_factor,
    )


def small_ffn(config: RunConfig, layout: Layout, limits: Limits, shards: int) -> int:
    """The inner width. Experts of aligned rows run in one grouped kernel, so their rows stay aligned; so do the rows of
    layers in float8.
    """
    model, aligned = config.model, ALIGNED_ROWS * layout.tensor
    if config.precision.float8 and model.ffn % FLOAT8_ROWS == 0:
        return round_up(min(model.ffn, limits.ffn), FLOAT8_ROWS * layout.tensor)
    if model.experts and model.ffn % (ALIGNED_ROWS * config.layout.tensor) == 0 and model.ffn > limits.ffn:
        return round_up(limits.ffn, aligned)
    return uneven_size(model.ffn, limits.ffn, layout.tensor, shards)


def min_blocks(config: RunConfig, layout: Layout) -> int:
    """The number of blocks that gives every pipeline stage one."""
    return layout.pipeline * stages_per_rank(config) if layout.pipeline > 1 else 1


def small_heads(config: RunConfig, layout: Layout, limits: Limits) -> tuple[int, int]:
    """Query heads and key-value heads."""
    model, ranks = config.model, attention_ranks(config, layout)
    divided = model.kv_heads % attention_ranks(config, Layout.from_config(config.layout)) == 0
    kv_heads = round_up(min(model.kv_heads, limits.kv_heads), ranks if divided else layout.tensor)
    if not divided and ranks > layout.tensor and kv_heads % ranks == 0:
        kv_heads += layout.tensor
    ratio = model.heads // model.kv_heads
    ratio = min(ratio, max(2, limits.heads // kv_heads))
    return lcm(kv_heads * ratio, ranks), kv_heads


def attention_ranks(config: RunConfig, layout: Layout) -> int:
    """The ranks that divide the query heads among themselves."""
    return layout.tensor * (layout.context if config.context.method == "all-to-all" else 1)


def uneven_size(size: int, limit: int, unit: int, shards: int) -> int:
    """A size of at most about `limit` that `unit` divides; if it shrinks, `shards` does not divide its quotient."""
    if size <= limit:
        return round_up(size, unit)
    quotient = max(1, limit // unit)
    return unit * (quotient - 1 if quotient > 2 and shards > 1 and quotient % shards == 0 else quotient)


def small_experts(model: ModelConfig, degree: int, limits: Limits) -> tuple[int, int]:
    """Experts and active experts: twice as many as active ones if the user's model has as many, else the same ratio."""
    active = min(model.experts_active, limits.experts_active)
    if not model.experts:
        return 0, model.experts_active
    if model.experts == model.experts_active:
        experts = round_up(active, degree)
        return experts, experts
    if model.experts >= 2 * model.experts_active:
        return round_up(min(model.experts, max(limits.experts, 2 * active)), degree), active
    return round_up(min(model.experts, 2 * active - 1), degree), active


def small_sequence(config: RunConfig, layout: Layout, limit: int) -> int:
    """The shortest sequence from `limit` tokens on that divides into equal chunks; a ring has two chunks per rank."""
    chunks = 2 * layout.context if layout.context > 1 and config.context.method == "ring" else layout.context
    return round_up(min(config.data.sequence, limit), lcm(chunks, layout.context * layout.tensor))


def proof_accumulation(config: RunConfig, layout: Layout, limits: Limits = SMALL) -> int:
    """The user's number of micro-batches per step, as far as `MAX_BLOCK_PASSES` allows it."""
    accumulation = user_accumulation(config)
    passes = config.model.layers * layout.ranks // layout.pipeline
    limit = accumulation if limits is UNLIMITED else max(FULL_ACCUMULATION, MAX_BLOCK_PASSES // passes)
    return fit_accumulation(config, layout, min(accumulation, limit))


def user_accumulation(config: RunConfig) -> int:
    return derive_batch(config.batch, Layout.from_config(config.layout).data_degree).accumulation


def fit_accumulation(config: RunConfig, layout: Layout, micro_batches: int) -> int:
    """The smallest number of at least `micro_batches` that the pipeline schedule supports. DDP with static_graph cannot
    accumulate.
    """
    if layout.pipeline == 1:
        return 1 if config.ddp.static_graph else micro_batches
    schedule, ranks = find_schedule(config.pipeline.schedule), layout.pipeline
    minimum = max(micro_batches, schedule.min_micro_batches(ranks))
    return next(m for m in count(minimum) if not schedule.even_rounds or m % max(1, m // ranks) == 0)


def small_batch(config: RunConfig, layout: Layout, accumulation: int, limit: int) -> BatchConfig:
    """The batch with this number of micro-batches of at most `limit` samples."""
    micro = min(derive_batch(config.batch, Layout.from_config(config.layout).data_degree).micro, limit)
    keeps_unset = config.batch.micro is None and accumulation == 1
    return BatchConfig(layout.data_degree * accumulation * micro, None if keeps_unset else micro)


def small_schedule(schedule: ScheduleConfig, steps: int) -> ScheduleConfig:
    """The schedule with a short warm-up. The final decay of wsd takes two steps, of which the second is lower."""
    decays = schedule.kind == "wsd" and schedule.decay > 0
    decay = max(schedule.decay, min(1.0, 2 / steps)) if decays else schedule.decay
    return replace(schedule, warmup=min(schedule.warmup, WARMUP), decay=decay)


def small_eval(config: EvalConfig, layout: Layout) -> EvalConfig:
    """A number of held-out samples that neither the data-parallel degree nor the micro-batch divides."""
    return replace(config, every=min(config.every, CADENCE), samples=2 * layout.data_degree + 1)


def small_checkpoint(config: CheckpointConfig) -> CheckpointConfig:
    """Checkpoints by steps, since time is no part of a proof."""
    return replace(config, seconds=0.0, every=CADENCE, keep=max(config.keep, KEPT_CHECKPOINTS))


def fit_reshard_degree(fsdp: FSDPConfig, layout: Layout) -> FSDPConfig:
    """`fsdp.reshard_after_forward` for a smaller shard group: unchanged if it divides the group, else half of it."""
    shards = min_shard_group_size(layout)
    if shards % (fsdp.ranks_after_forward or 1) == 0:
        return fsdp
    return replace(fsdp, reshard_after_forward=shards // 2 if shards > 3 else False)


def small_buckets(config: RunConfig, model: ModelConfig, layout: Layout) -> DDPConfig:
    """Buckets so small that DDP has several of them."""
    if not uses_ddp(layout):
        return config.ddp
    elements = sum(parameter.local_numel() for parameter in model_spec(model).parameters)
    element_bytes = max(4, COMPUTE_BYTES[config.precision.compute])
    megabytes = round(elements * element_bytes / BUCKETS / 2**20, 4)
    return replace(config.ddp, bucket_cap_mb=min(config.ddp.bucket_cap_mb, megabytes))


def round_up(number: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `number`."""
    return -(-number // unit) * unit
