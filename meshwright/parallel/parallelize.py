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

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from meshwright.config import DDPConfig, RunConfig
from meshwright.errors import ConfigError
from meshwright.parallel.activation_checkpoint import apply_activation_checkpointing
from meshwright.parallel.context_parallel.sequence_chunks import apply_context_parallel, local_chunk
from meshwright.parallel.data_parallel.ddp import DDPModel
from meshwright.parallel.data_parallel.fsdp import FSDPModel
from meshwright.parallel.expert_parallel import apply_expert_parallel
from meshwright.parallel.materialize import Fill, Materializer
from meshwright.parallel.mesh import Meshes, build_meshes
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.parallel.parallel_spec import ParallelSpec, find_blocks
from meshwright.parallel.pipeline_parallel.pipeline_model import PipelineModel
from meshwright.parallel.pipeline_parallel.stages import (
    TIED_COPIES,
    StagePlan,
    build_stages,
    prune_to_stages,
    stage_parallel_spec,
    stage_plan,
)
from meshwright.parallel.tensor_parallel import apply_tensor_parallel
from meshwright.parallel.world import World
from meshwright.topology.layout import Layout

DDPFactory = Callable[[nn.Module, DDPConfig, World], ParallelModel]


def parallelize(
    model: nn.Module,
    config: RunConfig,
    layout: Layout,
    world: World,
    parts: ParallelSpec | None,
    fill: Fill | None = None,
    *,
    plan: StagePlan | None = None,
    copies: DDPFactory = DDPModel,
) -> ParallelModel:
    """The model spread over the layout's mesh. `fill` gives weights to a model that comes on the meta device; `parts`
    may be missing where nothing asks for them. `plan` is a pipeline's where the model has other blocks than the config
    says, and `copies` what takes the place of DDP where nothing is computed.
    """
    meshes = build_meshes(layout, world.device.type, experts=bool(config.model.experts) and fill is not None)
    parts = require_spec(parts, layout, config)
    if plan is None and layout.pipeline > 1:
        plan = stage_plan(config, layout, world.rank)
    if plan is not None:
        prune_to_stages(model, plan)
        parts = parts.restricted_to(model)
    if tensor := meshes.submesh("tensor"):
        apply_tensor_parallel(model, parts, tensor)
    apply_expert_parallel(model, meshes)
    pieces = (
        apply_context_parallel(model, meshes.context_group, config.context.method)
        if meshes.context_group is not None
        else None
    )
    apply_activation_checkpointing(model, parts, config.activation_checkpoint)
    if config.compile.enabled:
        for block in find_blocks(model, parts):
            block.forward = torch.compile(block.forward)
    weights = Materializer(model, fill, world.device)
    among = partial(
        apply_data_parallel, config=config, layout=layout, world=world, meshes=meshes, weights=weights, copies=copies
    )
    if plan is None:
        spread = among(model, parts)
    else:
        weights.copied_from |= TIED_COPIES if config.model.tie else {}
        stages = {index: among(stage, stage_parallel_spec(stage)) for index, stage in build_stages(model, plan).items()}
        spread = PipelineModel(model, stages, plan, meshes, world.device, tied=config.model.tie)
    spread.meshes = meshes
    if pieces is not None or plan is not None:
        spread.shard_inputs = partial(local_chunk, pieces=pieces, separator=config.model.separator)
    return spread


def apply_data_parallel(
    module: nn.Module,
    parts: ParallelSpec,
    config: RunConfig,
    layout: Layout,
    world: World,
    meshes: Meshes,
    weights: Materializer,
    copies: DDPFactory,
) -> ParallelModel:
    """A module, or a stage, whose copies see other tokens."""
    others = layout.data_degree * layout.context > 1
    if others and meshes.dense_mesh is not None:
        spread = FSDPModel(module, parts, config, meshes, weights.allocate)
        weights.initialize(module)
        return spread
    weights.allocate(module)
    weights.initialize(module)
    return copies(module, config.ddp, world) if others else ParallelModel(module)


def require_spec(parts: ParallelSpec | None, layout: Layout, config: RunConfig) -> ParallelSpec:
    """Refuses to guess the blocks of a model, where a guess could gather the whole of it at once."""
    if layout.tensor > 1 and parts is not None and not parts.tp_plan():
        raise ConfigError(
            "layout.tensor > 1 and ParallelSpec.cuts says nothing of how to cut", "allowed: layout.tensor = 1"
        )
    if parts is not None:
        return parts
    asked = {
        f"layout.shard = {config.layout.shard}": layout.shard > 1,
        f"layout.tensor = {layout.tensor}": layout.tensor > 1,
        f"activation_checkpoint.mode = {config.activation_checkpoint.mode}": config.activation_checkpoint.mode
        != "none",
        "compile.enabled = true": config.compile.enabled,
    }
    for what, yes in asked.items():
        if yes:
            raise ConfigError(
                f"{what} works block by block, and nothing says which the blocks of your model are",
                'allowed: train(config, model=..., loss=..., parallel_spec=ParallelSpec(blocks="layers.*"))',
            )
    return ParallelSpec(blocks="")
