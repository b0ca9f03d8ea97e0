"""Combinations of settings that are unsupported, each with its reason and an alternative. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, lcm

from meshwright.base.config import Batch, RunConfig, derive_batch
from meshwright.base.config.constraints import nearest_multiples, nearest_values
from meshwright.base.topology.layout import Layout, stages_per_rank
from meshwright.base.topology.schedules import UNSPLIT_BACKWARD, find_schedule, validate_schedule
from meshwright.errors import ConfigError

MAX_DEGREE = 4096
"""The largest degree that an error message suggests."""
MAX_MICRO_BATCH = 4096
"""Largest micro-batch that an error suggests."""
MAX_PIPELINE_PASSES = 1 << 20
"""Limit of forward passes per step over all pipeline stages: a schedule is a list of them."""


@dataclass(frozen=True)
class UnsupportedCombination:
    """One unsupported combination."""

    combination: str
    reason: str
    alternative: Callable[[Layout, RunConfig], str]
    """settings that are supported, or '' if the combination does not occur"""
    decoder_only: bool = False
    """whether it holds for the built-in decoder only; a user's model brings its own tensor-parallel plan"""


def divisors(number: int, limit: int = MAX_DEGREE) -> list[int]:
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]


def _tensor_must_divide(setting: Callable[[RunConfig], int]) -> Callable[[Layout, RunConfig], str]:
    def alternative(layout: Layout, config: RunConfig) -> str:
        size = setting(config)
        if size % layout.tensor == 0:
            return ""
        degrees = divisors(size, min(4 * layout.tensor, MAX_DEGREE))
        return f"layout.tensor = {nearest_values(degrees, layout.tensor)} (it must divide {size})"

    return alternative


def _needs_fsdp(layout: Layout) -> bool:
    return bool(set(layout.active_axes) - {"replicate", "context"})


def _sequence_chunks(layout: Layout, config: RunConfig) -> str:
    """A ring gives each rank two chunks, and sequence parallelism divides the chunks of a rank again."""
    chunks = layout.context * (lcm(2, layout.tensor) if config.context.method == "ring" else layout.tensor)
    if layout.context == 1 or config.data.sequence % chunks == 0:
        return ""
    return f"data.sequence = {nearest_multiples(config.data.sequence, chunks)}"


def _all_to_all_heads(layout: Layout, config: RunConfig) -> str:
    degree = layout.context * layout.tensor
    if layout.context == 1 or config.context.method != "all-to-all" or config.model.heads % degree == 0:
        return ""
    return f"context.method = ring, or model.heads = {nearest_multiples(config.model.heads, degree)}"


def _expert_count(layout: Layout, config: RunConfig) -> str:
    experts = config.model.experts
    if layout.expert == 1 or (experts and experts % layout.expert == 0):
        return ""
    degrees = nearest_values(divisors(experts) or [1], layout.expert)
    return f"layout.expert = {degrees}" + ("" if experts else ", or set model.experts")


def _expert_ranks(layout: Layout, _config: RunConfig) -> str:
    if layout.expert_axes_size % layout.expert == 0:
        return ""
    degrees = nearest_values(divisors(layout.expert_axes_size), layout.expert)
    return f"layout.expert = {degrees} (it must divide {' x '.join(layout.expert_axes)})"


def _stage_count(layout: Layout, config: RunConfig) -> str:
    if layout.pipeline == 1 or layout.pipeline * stages_per_rank(config) <= config.model.layers:
        return ""
    return f"layout.pipeline x pipeline.stages of at most {config.model.layers}"


def _splits_backward(layout: Layout, config: RunConfig) -> bool:
    return layout.pipeline > 1 and find_schedule(config.pipeline.schedule).splits_backward


def _ranks_after_forward(config: RunConfig) -> int:
    return config.fsdp.ranks_after_forward or 1


UNSPLIT_SCHEDULES = f"pipeline.schedule = {', '.join(UNSPLIT_BACKWARD[:-1])} or {UNSPLIT_BACKWARD[-1]}"

UNSUPPORTED = (
    UnsupportedCombination(
        "layout.tensor does not divide model.kv_heads",
        "every tensor-parallel rank computes whole attention heads, including key and value heads",
        _tensor_must_divide(lambda config: config.model.kv_heads),
        decoder_only=True,
    ),
    UnsupportedCombination(
        "layout.tensor does not divide model.ffn",
        "the feed-forward matrices are sharded evenly",
        _tensor_must_divide(lambda config: config.model.ffn),
        decoder_only=True,
    ),
    UnsupportedCombination(
        "layout.tensor does not divide model.vocab",
        "the embedding and the head are sharded evenly; pad the vocabulary",
        _tensor_must_divide(lambda config: config.model.vocab),
        decoder_only=True,
    ),
    UnsupportedCombination(
        "layout.tensor does not divide data.sequence",
        "sequence parallelism shards activations evenly between the matrices",
        _tensor_must_divide(lambda config: config.data.sequence),
        decoder_only=True,
    ),
    UnsupportedCombination(
        "layout.context does not divide data.sequence",
        "every rank has sequence chunks of equal size: two with context.method = ring, one with all-to-all",
        _sequence_chunks,
        decoder_only=True,
    ),
    UnsupportedCombination(
        "layout.context with context.method = all-to-all does not divide model.heads",
        "every rank computes whole attention heads",
        _all_to_all_heads,
        decoder_only=True,
    ),
    UnsupportedCombination(
        "layout.expert does not divide model.experts",
        "every expert-parallel rank has the same number of experts",
        _expert_count,
        decoder_only=True,
    ),
    UnsupportedCombination(
        "more pipeline stages than blocks",
        "every stage has at least one block",
        _stage_count,
        decoder_only=True,
    ),
    UnsupportedCombination(
        "layout.expert does not divide the ranks that it reuses",
        "the expert axis reuses consecutive ranks of shard (replicate if nothing is sharded) and context",
        _expert_ranks,
    ),
    UnsupportedCombination(
        "pipeline with layout.shard = gradients",
        "torch's schedules accumulate unsharded gradients over all micro-batches, so gradients cannot stay sharded",
        lambda layout, config: (
            "layout.shard = optimizer or parameters"
            if layout.pipeline > 1 and layout.shard > 1 and config.layout.shard == "gradients"
            else ""
        ),
    ),
    UnsupportedCombination(
        "compile.enabled with schedules that split backward",
        "a compiled block computes input and weight gradients together, so nothing is deferred",
        lambda layout, config: (
            f"compile.enabled = false, or {UNSPLIT_SCHEDULES}"
            if _splits_backward(layout, config) and config.compile.enabled
            else ""
        ),
    ),
    UnsupportedCombination(
        "compile.scope = model with an axis other than layout.replicate",
        "the other axes communicate between blocks, and one graph of the whole model leaves no room for it",
        lambda layout, config: (
            "compile.scope = block"
            if config.compile.scope == "model" and set(layout.active_axes) - {"replicate"}
            else ""
        ),
    ),
    UnsupportedCombination(
        "activation_checkpoint.mode with schedules that split backward",
        "a block would be recomputed for its input gradient and again for every group of weight gradients",
        lambda layout, config: (
            f"activation_checkpoint.mode = none, or {UNSPLIT_SCHEDULES}"
            if _splits_backward(layout, config) and config.activation_checkpoint.mode != "none"
            else ""
        ),
    ),
    UnsupportedCombination(
        "activation_checkpoint.mode = selective with layout.expert",
        "the unshard of expert weights runs inside the block, and recomputation does not find its saved result",
        lambda layout, config: (
            "activation_checkpoint.mode = none or full"
            if layout.expert > 1 and config.activation_checkpoint.mode == "selective"
            else ""
        ),
    ),
    UnsupportedCombination(
        "activation_checkpoint.memory_budget with activation_checkpoint.mode",
        "both say what a block keeps for backward",
        lambda _layout, config: (
            "activation_checkpoint.mode = none, or memory_budget unset"
            if config.activation_checkpoint.memory_budget is not None and config.activation_checkpoint.mode != "none"
            else ""
        ),
    ),
    UnsupportedCombination(
        "activation_checkpoint.offload without activation_checkpoint.mode = full",
        "it offloads the inputs of blocks that are recomputed",
        lambda _layout, config: (
            "activation_checkpoint.mode = full, or activation_checkpoint.offload = false"
            if config.activation_checkpoint.offload and config.activation_checkpoint.mode != "full"
            else ""
        ),
    ),
    UnsupportedCombination(
        "activation_checkpoint.offload with compile.scope = model",
        "a compiled graph of the whole model has no block inputs that could leave the device",
        lambda _layout, config: (
            "compile.scope = block" if config.activation_checkpoint.offload and config.compile.scope == "model" else ""
        ),
    ),
    UnsupportedCombination(
        "layout.shard = parameters with schedules that split backward",
        "torch collects the weights of a stage after forward, when FSDP2 has resharded them, and would find none",
        lambda layout, config: (
            f"layout.shard = optimizer, fsdp.reshard_after_forward = false, or {UNSPLIT_SCHEDULES}"
            if _splits_backward(layout, config)
            and config.layout.shard == "parameters"
            and config.fsdp.ranks_after_forward != 1
            else ""
        ),
    ),
    UnsupportedCombination(
        "ddp.static_graph with FSDP2",
        "static_graph is an option of DDP, and this layout uses FSDP2",
        lambda layout, config: "ddp.static_graph = false" if _needs_fsdp(layout) and config.ddp.static_graph else "",
    ),
    UnsupportedCombination(
        "ddp.comm_hook with FSDP2",
        "FSDP2 would round gradients in every micro-step, where DDP rounds once per step",
        lambda layout, config: "ddp.comm_hook = none" if _needs_fsdp(layout) and config.ddp.comm_hook != "none" else "",
    ),
    UnsupportedCombination(
        "fsdp.reshard_after_forward does not divide the shard degree",
        "after forward, subgroups of the shard group hold the parameters",
        lambda layout, config: (
            "fsdp.reshard_after_forward = true, false, "
            f"{nearest_values(divisors(ranks, ranks)[1:], _ranks_after_forward(config))}"
            if config.layout.shard == "parameters"
            and (ranks := min_shard_group_size(layout)) % _ranks_after_forward(config)
            else ""
        ),
    ),
    UnsupportedCombination(
        "fsdp.reshard_after_forward = N with pipeline or tensor",
        "FSDP2 creates process groups for it, and shard groups would wait for each other to create theirs",
        lambda layout, config: (
            "fsdp.reshard_after_forward = true or false"
            if config.layout.shard == "parameters"
            and _ranks_after_forward(config) > 1
            and (layout.pipeline > 1 or layout.tensor > 1)
            else ""
        ),
    ),
    UnsupportedCombination(
        "activation_checkpoint.segment without activation_checkpoint.mode = full",
        "only whole blocks are recomputed together",
        lambda _layout, config: (
            "activation_checkpoint.segment = 1, or activation_checkpoint.mode = full"
            if config.activation_checkpoint.segment > 1 and config.activation_checkpoint.mode != "full"
            else ""
        ),
    ),
    UnsupportedCombination(
        "precision.float8 without precision.compute = bf16",
        "the linear layers of blocks take and return bf16",
        lambda _layout, config: (
            "precision.compute = bf16, or precision.float8 = false"
            if config.precision.float8 and config.precision.compute not in ("auto", "bf16")
            else ""
        ),
    ),
)
"""All unsupported combinations; docs/layouts.md has the same table."""


def min_shard_group_size(layout: Layout) -> int:
    """The size of the smallest shard group: expert parallelism makes that of expert weights smaller."""
    if layout.expert == 1:
        return layout.shard
    return gcd(layout.shard, layout.expert_axes_size // layout.expert)


def nearest_micro_batch(config: RunConfig, layout: Layout, batch: Batch) -> int | None:
    """Returns the size of a micro-batch nearest to the present one with which the pipeline schedule runs, if any."""
    sizes = [size for size in range(1, min(batch.local, MAX_MICRO_BATCH) + 1) if batch.local % size == 0]
    for size in sorted(sizes, key=lambda size: abs(size - batch.micro)):
        try:
            validate_schedule(config.pipeline.schedule, layout.pipeline, batch.local // size, stages_per_rank(config))
        except ConfigError:
            continue
        return size
    return None


def validate(config: RunConfig, own_model: bool = False) -> tuple[Layout, Batch]:
    """The layout and the batch of a config. Raises a ConfigError for an unsupported combination."""
    if not own_model:
        config.require_built_in_model()
    layout = Layout.from_config(config.layout)
    for rule in UNSUPPORTED:
        if own_model and rule.decoder_only:
            continue
        if alternative := rule.alternative(layout, config):
            raise ConfigError(
                f"layout {layout} is unsupported: {rule.combination}: {rule.reason}", f"try {alternative}"
            )
    batch = derive_batch(config.batch, layout.data_degree)
    if layout.pipeline > 1:
        passes = layout.pipeline * stages_per_rank(config) * batch.accumulation
        if passes > MAX_PIPELINE_PASSES:
            raise ConfigError(
                f"layout {layout} with {batch.accumulation:,} micro-batches per step has {passes:,} forward passes per "
                f"step over all stages",
                f"expected at most {MAX_PIPELINE_PASSES:,}: try a larger batch.micro",
            )
        try:
            validate_schedule(config.pipeline.schedule, layout.pipeline, batch.accumulation, stages_per_rank(config))
        except ConfigError as error:
            origin = f"a rank has {batch.local} samples per step, divided by batch.micro = {batch.micro}"
            size = nearest_micro_batch(config, layout, batch)
            raise ConfigError(
                f"layout {layout} is unsupported: {error.message}",
                f"{error.hint} ({origin}{f'; try --batch.micro={size}' if size else ''})",
            ) from None
    if config.ddp.static_graph and batch.accumulation > 1:
        raise ConfigError(
            f"ddp.static_graph = true is unsupported with {batch.accumulation} accumulation steps: DDP fails if its "
            "first backward pass does not synchronize",
            f"try ddp.static_graph = false, or batch.micro = {batch.local}",
        )
    return layout, batch
