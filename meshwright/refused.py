"""Which layouts are refused, why, and what would be possible instead; torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, lcm

from meshwright import schedule
from meshwright.config import Batch, RunConfig, batch_algebra
from meshwright.config.derive import multiples
from meshwright.config.kinds import nearest
from meshwright.errors import ConfigError
from meshwright.layout import Layout, stages_each


@dataclass(frozen=True)
class Refused:
    """A combination that is not possible, or not right, and why."""

    what: str
    why: str
    applies: Callable[[Layout, RunConfig], str]
    """'' where it does not, else what would be possible instead"""
    of_decoder: bool = False
    """whether it is a rule of our own decoder: a user's model brings its own cuts"""


def _divides(number: Callable[[RunConfig], int]) -> Callable[[Layout, RunConfig], str]:
    def applies(layout: Layout, config: RunConfig) -> str:
        whole = number(config)
        if whole % layout.tensor == 0:
            return ""
        fits = [n for n in range(1, min(whole, 4 * layout.tensor, 4096) + 1) if whole % n == 0]
        return f"layout.tensor = {nearest(fits, layout.tensor)} (it must divide {whole})"

    return applies


def _spread(layout: Layout) -> bool:
    """Whether something beyond whole copies by DDP is asked for."""
    return bool(set(layout.axes) - {"replicate", "context"})


def _pieces(layout: Layout, config: RunConfig) -> str:
    """A ring gives each rank two chunks, an early one and a late one, and tensor divides what a rank has again."""
    chunks = layout.context * (lcm(2, layout.tensor) if config.context.method == "ring" else layout.tensor)
    if layout.context == 1 or config.data.sequence % chunks == 0:
        return ""
    return f"data.sequence = {multiples(config.data.sequence, chunks)}"


def _heads(layout: Layout, config: RunConfig) -> str:
    parts = layout.context * layout.tensor
    if layout.context == 1 or config.context.method != "all-to-all" or config.model.heads % parts == 0:
        return ""
    return f"context.method = ring, or model.heads = {multiples(config.model.heads, parts)}"


def _expert_count(layout: Layout, config: RunConfig) -> str:
    experts = config.model.experts
    if layout.expert == 1 or (experts and experts % layout.expert == 0):
        return ""
    fits = [n for n in range(1, min(experts, 4096) + 1) if experts % n == 0]
    return f"layout.expert = {nearest(fits or [1], layout.expert)}" + ("" if experts else ", or model.experts")


def _expert_fold(layout: Layout, config: RunConfig) -> str:  # noqa: ARG001
    if layout.fold % layout.expert == 0:
        return ""
    fits = [n for n in range(1, min(layout.fold, 4096) + 1) if layout.fold % n == 0]
    return f"layout.expert = {nearest(fits, layout.expert)} (it must divide {' x '.join(layout.folded)})"


def _blocks(layout: Layout, config: RunConfig) -> str:
    stages = layout.pipeline * stages_each(config)
    if layout.pipeline == 1 or stages <= config.model.layers:
        return ""
    return f"layout.pipeline x pipeline.stages of at most {config.model.layers}"


def _deferred(layout: Layout, config: RunConfig) -> bool:
    return layout.pipeline > 1 and config.pipeline.schedule in schedule.SPLIT


REFUSED = (
    Refused(
        "tensor does not divide model.kv_heads",
        "each rank attends with whole heads, keys and values included",
        _divides(lambda config: config.model.kv_heads),
        of_decoder=True,
    ),
    Refused(
        "tensor does not divide model.ffn",
        "each rank holds an equal part of the feed-forward",
        _divides(lambda config: config.model.ffn),
        of_decoder=True,
    ),
    Refused(
        "tensor does not divide model.vocab",
        "each rank holds an equal part of the vocabulary: pad it",
        _divides(lambda config: config.model.vocab),
        of_decoder=True,
    ),
    Refused(
        "tensor does not divide data.sequence",
        "between the matrices each rank holds an equal part of the sequence",
        _divides(lambda config: config.data.sequence),
        of_decoder=True,
    ),
    Refused(
        "context does not divide data.sequence",
        "each rank has equal pieces of every sequence: by ring two, an early and a late one",
        _pieces,
        of_decoder=True,
    ),
    Refused(
        "context by all-to-all does not divide model.heads",
        "each rank attends with whole heads",
        _heads,
        of_decoder=True,
    ),
    Refused(
        "expert does not divide model.experts",
        "each rank holds equally many experts",
        _expert_count,
        of_decoder=True,
    ),
    Refused(
        "more stages of a pipeline than blocks",
        "each stage has at least one",
        _blocks,
        of_decoder=True,
    ),
    Refused(
        "expert does not divide the ranks that it folds over",
        "experts are spread over neighbours among shards (copies, where nothing is sharded) and pieces of sequences",
        _expert_fold,
    ),
    Refused(
        "pipeline with shard = gradients",
        "a schedule adds up whole gradients over its micro-batches: nothing more is divided than by optimizer",
        lambda layout, config: (
            "layout.shard = optimizer or parameters"
            if layout.pipeline > 1 and layout.shard > 1 and config.layout.shard == "gradients"
            else ""
        ),
    ),
    Refused(
        "compute.compile with schedules that defer weight gradients",
        "a compiled block computes all of its gradients at once, and nothing would be deferred",
        lambda layout, config: (
            "compute.compile = false, or pipeline.schedule = 1f1b or interleaved"
            if _deferred(layout, config) and config.compute.compile
            else ""
        ),
    ),
    Refused(
        "compute.recompute with schedules that defer weight gradients",
        "a block would be computed again for its input's gradient, and again for every group of its weights",
        lambda layout, config: (
            "compute.recompute = none, or pipeline.schedule = 1f1b or interleaved"
            if _deferred(layout, config) and config.compute.recompute != "none"
            else ""
        ),
    ),
    Refused(
        "compute.recompute = selective with expert",
        "experts are gathered inside their block, which would not find this kept when it is computed again",
        lambda layout, config: (
            "compute.recompute = none or full" if layout.expert > 1 and config.compute.recompute == "selective" else ""
        ),
    ),
    Refused(
        "shard = parameters with schedules that defer weight gradients",
        "they look for a stage's weights after forward has let go of them, and would find none to compute",
        lambda layout, config: (
            "layout.shard = optimizer, shard.keep = 1, or pipeline.schedule = 1f1b or interleaved"
            if _deferred(layout, config) and config.layout.shard == "parameters" and config.shard.keep != 1
            else ""
        ),
    ),
    Refused(
        "replicate.static_graph with more than copies",
        "it is a promise to DDP, which such a layout does not use",
        lambda layout, config: (
            "replicate.static_graph = false" if _spread(layout) and config.replicate.static_graph else ""
        ),
    ),
    Refused(
        "replicate.compress with more than copies",
        "FSDP2 would round at every micro-step what DDP rounds once",
        lambda layout, config: (
            "replicate.compress = none" if _spread(layout) and config.replicate.compress != "none" else ""
        ),
    ),
    Refused(
        "shard.keep does not divide the shard degree",
        "after the forward pass a part of the shard group holds the parameters",
        lambda layout, config: (
            f"shard.keep = {nearest([n for n in range(1, kept + 1) if kept % n == 0], _keep(config))}"
            if config.layout.shard == "parameters" and (kept := sharers(layout)) % _keep(config)
            else ""
        ),
    ),
    Refused(
        "shard.keep of several ranks with pipeline or tensor",
        "FSDP2 makes groups for it, and every shard group would wait for ranks of the others to do the same",
        lambda layout, config: (
            "shard.keep = 1, or unset"
            if config.layout.shard == "parameters" and _keep(config) > 1 and (layout.pipeline > 1 or layout.tensor > 1)
            else ""
        ),
    ),
    Refused(
        "compute.segment without compute.recompute = full",
        "only whole blocks are recomputed together",
        lambda _layout, config: (
            "compute.segment = 1, or compute.recompute = full"
            if config.compute.segment > 1 and config.compute.recompute != "full"
            else ""
        ),
    ),
)
"""The table of what is refused."""

OF_THE_DECODER_ALONE = ("pipeline", "context", "expert")
"""Axes that must know more of a model than the parts that a user's own brings."""


def sharers(layout: Layout) -> int:
    """The ranks that a unit is divided among, at least: experts that are divided have fewer."""
    return gcd(layout.shard, layout.fold // layout.expert) if layout.expert > 1 else layout.shard


def _keep(config: RunConfig) -> int:
    return config.shard.keep or 1


def checked(config: RunConfig, own_model: bool = False) -> tuple[Layout, Batch]:
    """The layout and the batch algebra of a config, or a refusal that names what would be possible."""
    layout = Layout.of(config.layout)
    for rule in REFUSED:
        if own_model and rule.of_decoder:
            continue
        if instead := rule.applies(layout, config):
            raise ConfigError(f"layout {layout}: {rule.what}: {rule.why}", f"allowed: {instead}")
    if own_model and (asked := [axis for axis in OF_THE_DECODER_ALONE if getattr(layout, axis) > 1]):
        raise ConfigError(
            f"layout {layout}: {asked[0]} with a model of your own: it must know its inside",
            f"allowed: layout.{asked[0]} = 1, or the decoder of a run file",
        )
    batch = batch_algebra(config.batch, layout.data_degree)
    if layout.pipeline > 1:
        try:
            schedule.check(config.pipeline.schedule, layout.pipeline, batch.accumulation, stages_each(config))
        except ConfigError as refused:
            how = f"a rank has {batch.local} samples a step, and batch.micro = {batch.micro} divides them"
            raise ConfigError(f"layout {layout}: {refused.what}", f"{refused.next_move} ({how})") from None
    if config.replicate.static_graph and batch.accumulation > 1:
        raise ConfigError(
            f"replicate.static_graph = true with accumulation {batch.accumulation}: DDP fails on a first pass unsynced",
            f"allowed: replicate.static_graph = false, or batch.micro = {batch.local}",
        )
    return layout, batch
