"""The one order in which the axes are applied to a model. Read from top to bottom; there is no other.

1. pipeline   a rank lets go of all blocks but those of its own stages
2. tensor     matrices become DTensors: whatever comes later sees a rank's own part of them
3. expert     a rank keeps its own experts, and tokens travel to theirs
4. context    attention and positions are those of a piece of each sequence
5. recompute  wraps each block's own forward: its collectives over tensor and context are inside, those of shard outside
6. compile    each block's forward, recomputation included: one graph serves all blocks
7. weights    on the meta device until here: memory comes unit by unit, content once a rank has its own rows alone
8. shard      FSDP2 over those that see other tokens: gathers around what 2 to 6 made, each stage by itself
   replicate  or, where copies are all there is, DDP
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from meshwright.config import RunConfig, batch_algebra
from meshwright.errors import ConfigError
from meshwright.layout import Layout, stages_each
from meshwright.model.decoder import LanguageModel
from meshwright.parallel.context import divide_sequences, piece_of
from meshwright.parallel.expert import divide_experts
from meshwright.parallel.mesh import Meshes, meshes_of
from meshwright.parallel.parts import Parts, blocks_of
from meshwright.parallel.pipeline import Piped, Plan
from meshwright.parallel.recompute import recompute
from meshwright.parallel.replicate import Replicated
from meshwright.parallel.shard import Sharded
from meshwright.parallel.spread import Spread
from meshwright.parallel.stages import Stage, Tie, keep_stages, parts_of
from meshwright.parallel.tensor import cut
from meshwright.parallel.weights import Fill, Weights
from meshwright.parallel.world import World
from meshwright.plan.stages import spans
from meshwright.schedule import holder, stages_of


def apply(
    model: nn.Module, config: RunConfig, layout: Layout, world: World, parts: Parts | None, fill: Fill | None = None
) -> Spread:
    """The model spread over the layout's mesh. `fill` gives weights to a model that comes on the meta device; `parts`
    may be missing where nothing asks for them.
    """
    meshes = meshes_of(layout, world.device.type, experts=bool(config.model.experts) and fill is not None)
    parts = needed(parts, layout, config)
    pipe = Pipe(config, layout, world.rank) if layout.pipeline > 1 else None
    if pipe is not None:
        assert isinstance(model, LanguageModel)
        keep_stages(model, [pipe.spans[stage] for stage in pipe.mine], pipe.first in pipe.mine, pipe.last in pipe.mine)
        parts = parts.within(model)
    if tensor := meshes.axis("tensor"):
        cut(model, parts, tensor)
    divide_experts(model, meshes)
    pieces = divide_sequences(model, meshes.context, config.context.method) if meshes.context is not None else None
    recompute(model, parts, config.compute)
    if config.compute.compile:
        for block in blocks_of(model, parts):
            block.forward = torch.compile(block.forward)
    weights = Weights(model, fill, world.device)
    if pipe is not None and config.model.tie:
        weights.copies["head.weight"] = "decoder.embedding.weight"
    if pipe is None:
        spread = over_tokens(model, parts, config, layout, world, meshes, weights)
    else:
        assert isinstance(model, LanguageModel)
        spread = in_stages(model, pipe, config, layout, world, meshes, weights)
    spread.meshes = meshes
    if pieces is not None or layout.pipeline > 1:
        spread.take = partial(piece_of, pieces=pieces, separator=config.model.separator)
    return spread


def over_tokens(
    module: nn.Module,
    parts: Parts,
    config: RunConfig,
    layout: Layout,
    world: World,
    meshes: Meshes,
    weights: Weights,
) -> Spread:
    """A module, or a stage, whose copies see other tokens."""
    others = layout.data_degree * layout.context > 1
    if others and meshes.dense is not None:
        spread = Sharded(module, parts, config, meshes, weights.ready)
        weights.fill(module)
        return spread
    weights.ready(module)
    weights.fill(module)
    return Replicated(module, config.replicate, world) if others else Spread(module)


class Pipe:
    """Which stages this rank holds, and which blocks each of them has."""

    def __init__(self, config: RunConfig, layout: Layout, rank: int) -> None:
        self.kind, self.ranks = config.pipeline.schedule, layout.pipeline
        self.rank = layout.coordinates(rank)["pipeline"]
        each = stages_each(config)
        self.mine = stages_of(self.kind, self.ranks, self.rank, each)
        self.first, self.last = 0, each * self.ranks - 1
        self.spans = spans(config.model, config.data.sequence, each * self.ranks)

    def holder(self, stage: int) -> int:
        return holder(self.kind, self.ranks, stage)


def in_stages(
    model: LanguageModel,
    pipe: Pipe,
    config: RunConfig,
    layout: Layout,
    world: World,
    meshes: Meshes,
    weights: Weights,
) -> Spread:
    assert meshes.dense is not None
    stages = {}
    for index in pipe.mine:
        stage = Stage(model, pipe.spans[index], first=index == pipe.first, last=index == pipe.last)
        stages[index] = over_tokens(stage, parts_of(stage), config, layout, world, meshes, weights)
    batch = batch_algebra(config.batch, layout.data_degree)
    group = meshes.dense.get_group("pipeline")
    pieces = layout.context * layout.tensor
    plan = Plan(
        pipe.kind,
        pipe.ranks,
        pipe.rank,
        pipe.last + 1,
        batch.accumulation,
        (batch.micro, config.data.sequence // pieces, config.model.width),
        torch.float64 if config.precision.compute == "fp64" else torch.float32,
    )
    tie = Tie(model, pipe.holder(pipe.first), pipe.holder(pipe.last), group) if config.model.tie else None
    return Piped(model, stages, plan, group, tie, world.device)


def needed(parts: Parts | None, layout: Layout, config: RunConfig) -> Parts:
    """Refuses to guess the blocks of a model, where a guess could gather the whole of it at once."""
    if layout.tensor > 1 and parts is not None and not parts.cuts():
        raise ConfigError("layout.tensor > 1 and Parts.cuts says nothing of how to cut", "allowed: layout.tensor = 1")
    if parts is not None:
        return parts
    asked = {
        f"layout.shard = {config.layout.shard}": layout.shard > 1,
        f"layout.tensor = {layout.tensor}": layout.tensor > 1,
        f"compute.recompute = {config.compute.recompute}": config.compute.recompute != "none",
        "compute.compile = true": config.compute.compile,
    }
    for what, yes in asked.items():
        if yes:
            raise ConfigError(
                f"{what} works block by block, and nothing says which the blocks of your model are",
                'allowed: train(config, model=..., loss=..., parts=Parts(blocks="layers.*"))',
            )
    return Parts(blocks="")
