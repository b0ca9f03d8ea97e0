"""Which layouts are refused, why, and what would be possible instead; torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, lcm

from meshwright.config import Batch, RunConfig, derive_batch
from meshwright.config.constraints import nearest_multiples, nearest_values
from meshwright.errors import ConfigError
from meshwright.topology import schedules
from meshwright.topology.layout import Layout, stages_per_rank


@dataclass(frozen=True)
class UnsupportedCombination:
    """A combination that is not possible, or not right, and why."""

    combination: str
    reason: str
    alternative: Callable[[Layout, RunConfig], str]
    """'' where it does not, else what would be possible instead"""
    decoder_only: bool = False
    """whether it is a rule of our own decoder: a user's model brings its own cuts"""


def _divides(number: Callable[[RunConfig], int]) -> Callable[[Layout, RunConfig], str]:
    def applies(layout: Layout, config: RunConfig) -> str:
        whole = number(config)
        if whole % layout.tensor == 0:
            return ""
        fits = [n for n in range(1, min(whole, 4 * layout.tensor, 4096) + 1) if whole % n == 0]
        return f"layout.tensor = {nearest_values(fits, layout.tensor)} (it must divide {whole})"

    return applies


def _spread(layout: Layout) -> bool:
    """Whether something beyond whole copies by DDP is asked for."""
    return bool(set(layout.active_axes) - {"replicate", "context"})


def _pieces(layout: Layout, config: RunConfig) -> str:
    """A ring gives each rank two chunks, an early one and a late one, and tensor divides what a rank has again."""
    chunks = layout.context * (lcm(2, layout.tensor) if config.context.method == "ring" else layout.tensor)
    if layout.context == 1 or config.data.sequence % chunks == 0:
        return ""
    return f"data.sequence = {nearest_multiples(config.data.sequence, chunks)}"


def _heads(layout: Layout, config: RunConfig) -> str:
    parts = layout.context * layout.tensor
    if layout.context == 1 or config.context.method != "all-to-all" or config.model.heads % parts == 0:
        return ""
    return f"context.method = ring, or model.heads = {nearest_multiples(config.model.heads, parts)}"


def _expert_count(layout: Layout, config: RunConfig) -> str:
    experts = config.model.experts
    if layout.expert == 1 or (experts and experts % layout.expert == 0):
        return ""
    fits = [n for n in range(1, min(experts, 4096) + 1) if experts % n == 0]
    return f"layout.expert = {nearest_values(fits or [1], layout.expert)}" + ("" if experts else ", or model.experts")


def _expert_fold(layout: Layout, config: RunConfig) -> str:  # noqa: ARG001
    if layout.expert_axes_size % layout.expert == 0:
        return ""
    fits = [n for n in range(1, min(layout.expert_axes_size, 4096) + 1) if layout.expert_axes_size % n == 0]
    return f"layout.expert = {nearest_values(fits, layout.expert)} (it must divide {' x '.join(layout.expert_axes)})"


def _blocks(layout: Layout, config: RunConfig) -> str:
    stages = layout.pipeline * stages_per_rank(config)
    if layout.pipeline == 1 or stages <= config.model.layers:
        return ""
    return f"layout.pipeline x pipeline.stages of at most {config.model.layers}"


def _deferred(layout: Layout, config: RunConfig) -> bool:
    return layout.pipeline > 1 and config.pipeline.schedule in schedules.SPLIT


UNSUPPORTED = (
    UnsupportedCombination(
        "tensor does not divide model.kv_heads",
        "each rank attends with whole heads, keys and values included",
        _divides(lambda config: config.model.kv_heads),
        decoder_only=True,
    ),
    UnsupportedCombination(
        "tensor does not divide model.ffn",
        "each rank holds an equal part of the feed-forward",
        _divides(lambda config: config.model.ffn),
        decoder_only=True,
    ),
    UnsupportedCombination(
        "tensor does not divide model.vocab",
        "each rank holds an equal part of the vocabulary: pad it",
        _divides(lambda config: config.model.vocab),
        decoder_only=True,
    ),
    UnsupportedCombination(
        "tensor does not divide data.sequence",
        "between the matrices each rank holds an equal part of the sequence",
        _divides(lambda config: config.data.sequence),
        decoder_only=True,
    ),
    UnsupportedCombination(
        "context does not divide data.sequence",
        "each rank has equal pieces of every sequence: by ring two, an early and a late one",
        _pieces,
        decoder_only=True,
    ),
    UnsupportedCombination(
        "context by all-to-all does not divide model.heads",
        "each rank attends with whole heads",
        _heads,
        decoder_only=True,
    ),
    UnsupportedCombination(
        "expert does not divide model.experts",
        "each rank holds equally many experts",
        _expert_count,
        decoder_only=True,
    ),
    UnsupportedCombination(
        "more stages of a pipeline than blocks",
        "each stage has at least one",
        _blocks,
        decoder_only=True,
    ),
    UnsupportedCombination(
        "expert does not divide the ranks that it folds over",
        "experts are spread over neighbours among shards (copies, where nothing is sharded) and pieces of sequences",
        _expert_fold,
    ),
    UnsupportedCombination(
        "pipeline with shard = gradients",
        "a schedule adds up whole gradients over its micro-batches: nothing more is divided than by optimizer",
        lambda layout, config: (
            "layout.shard = optimizer or parameters"
            if layout.pipeline > 1 and layout.shard > 1 and config.layout.shard == "gradients"
            else ""
        ),
    ),
    UnsupportedCombination(
        "compile.enabled with schedules that defer weight gradients",
        "a compiled block computes all of its gradients at once, and nothing would be deferred",
        lambda layout, config: (
            "compile.enabled = false, or pipeline.schedule = 1f1b or interleaved"
            if _deferred(layout, config) and config.compile.enabled
            else ""
        ),
    ),
    UnsupportedCombination(
        "activation_checkpoint.mode with schedules that defer weight gradients",
        "a block would be computed again for its input's gradient, and again for every group of its weights",
        lambda layout, config: (
            "activation_checkpoint.mode = none, or pipeline.schedule = 1f1b or interleaved"
            if _deferred(layout, config) and config.activation_checkpoint.mode != "none"
            else ""
        ),
    ),
    UnsupportedCombination(
        "activation_checkpoint.mode = selective with expert",
        "experts are gathered inside their block, which would not find this kept when it is computed again",
        lambda layout, config: (
            "activation_checkpoint.mode = none or full"
            if layout.expert > 1 and config.activation_checkpoint.mode == "selective"
            else ""
        ),
    ),
    UnsupportedCombination(
        "shard = parameters with schedules that defer weight gradients",
        "they look for a stage's weights after forward has let go of them, and would find none to compute",
        lambda layout, config: (
            "layout.shard = optimizer, fsdp.reshard_after_forward = false, or pipeline.schedule = 1f1b or interleaved"
            if _deferred(layout, config)
            and config.layout.shard == "parameters"
            and config.fsdp.ranks_after_forward != 1
            else ""
        ),
    ),
    UnsupportedCombination(
        "ddp.static_graph with more than copies",
        "it is a promise to DDP, which such a layout does not use",
        lambda layout, config: "ddp.static_graph = false" if _spread(layout) and config.ddp.static_graph else "",
    ),
    UnsupportedCombination(
        "ddp.comm_hook with more than copies",
        "FSDP2 would round at every micro-step what DDP rounds once",
        lambda layout, config: "ddp.comm_hook = none" if _spread(layout) and config.ddp.comm_hook != "none" else "",
    ),
    UnsupportedCombination(
        "fsdp.reshard_after_forward does not divide the shard degree",
        "after the forward pass a part of the shard group holds the parameters",
        lambda layout, config: (
            "fsdp.reshard_after_forward = true, false, "
            f"{nearest_values([n for n in range(2, kept + 1) if kept % n == 0], _keep(config))}"
            if config.layout.shard == "parameters" and (kept := min_shard_group_size(layout)) % _keep(config)
            else ""
        ),
    ),
    UnsupportedCombination(
        "fsdp.reshard_after_forward of several ranks with pipeline or tensor",
        "FSDP2 makes groups for it, and every shard group would wait for ranks of the others to do the same",
        lambda layout, config: (
            "fsdp.reshard_after_forward = true or false"
            if config.layout.shard == "parameters" and _keep(config) > 1 and (layout.pipeline > 1 or layout.tensor > 1)
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
)
"""The table of what is refused."""

DECODER_ONLY_AXES = ("pipeline", "context", "expert")
"""Axes that must know more of a model than the parts that a user's own brings."""


def min_shard_group_size(layout: Layout) -> int:
    """The ranks that a unit is divided among, at least: experts that are divided have fewer."""
    return gcd(layout.shard, layout.expert_axes_size // layout.expert) if layout.expert > 1 else layout.shard


def _keep(config: RunConfig) -> int:
    return config.fsdp.ranks_after_forward or 1


def validate(config: RunConfig, own_model: bool = False) -> tuple[Layout, Batch]:
    """The layout and the batch algebra of a config, or a refusal that names what would be possible."""
    layout = Layout.from_config(config.layout)
    for rule in UNSUPPORTED:
        if own_model and rule.decoder_only:
            continue
        if instead := rule.alternative(layout, config):
            raise ConfigError(f"layout {layout}: {rule.combination}: {rule.reason}", f"allowed: {instead}")
    if own_model and (asked := [axis for axis in DECODER_ONLY_AXES if getattr(layout, axis) > 1]):
        raise ConfigError(
            f"layout {layout}: {asked[0]} with a model of your own: it must know its inside",
            f"allowed: layout.{asked[0]} = 1, or the decoder of a run file",
        )
    batch = derive_batch(config.batch, layout.data_degree)
    if layout.pipeline > 1:
        try:
            schedules.validate_schedule(
                config.pipeline.schedule, layout.pipeline, batch.accumulation, stages_per_rank(config)
            )
        except ConfigError as refused:
            how = f"a rank has {batch.local} samples a step, and batch.micro = {batch.micro} divides them"
            raise ConfigError(f"layout {layout}: {refused.message}", f"{refused.hint} ({how})") from None
    if config.ddp.static_graph and batch.accumulation > 1:
        raise ConfigError(
            f"ddp.static_graph = true with accumulation {batch.accumulation}: DDP fails on a first pass unsynced",
            f"allowed: ddp.static_graph = false, or batch.micro = {batch.local}",
        )
    return layout, batch
