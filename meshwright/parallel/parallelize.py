"""The one order in which the axes of parallelism are applied to a model.

1. pipeline              keep only the blocks of this rank's stages
2. tensor                shard weight matrices as DTensors; all later steps see local shards
3. expert                keep this rank's experts; tokens travel to theirs by all-to-all
4. context               attention and positions of sequence chunks
5. activation checkpoint wrap each block's forward: tensor and context collectives are recomputed, FSDP2's are not
6. compile               each block's forward, recomputation included
7. materialize           the model is on the meta device until here: allocate unit by unit, initialize local shards only
8. data parallel         FSDP2 over the ranks that process different tokens, for each stage separately;
                         DDP if every rank has a full replica
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from meshwright.config import DDPConfig, RunConfig
from meshwright.errors import ConfigError
from meshwright.parallel.activation_checkpoint import apply_activation_checkpointing
from meshwright.parallel.compile import apply_compile
from meshwright.parallel.context_parallel.context_attention import ContextAttention
from meshwright.parallel.context_parallel.context_parallel import apply_context_parallel
from meshwright.parallel.context_parallel.sequence_chunks import local_chunk
from meshwright.parallel.data_parallel.ddp import DDPModel
from meshwright.parallel.data_parallel.fsdp import FSDPModel
from meshwright.parallel.expert_parallel import apply_expert_parallel
from meshwright.parallel.materialize import Fill, Materializer
from meshwright.parallel.mesh import Meshes, build_meshes, new_group
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.parallel.parallel_spec import ParallelSpec, find_blocks, require_modules
from meshwright.parallel.pipeline_parallel.pipeline_model import PipelineModel
from meshwright.parallel.pipeline_parallel.stages import (
    TIED_COPIES,
    StagePlan,
    build_stages,
    prune_to_stages,
    stage_parallel_spec,
    stage_plan,
)
from meshwright.parallel.sync_batch_norm import synchronize_batch_norm
from meshwright.parallel.tensor_parallel import apply_tensor_parallel, require_tp_plan
from meshwright.parallel.world import World
from meshwright.topology.layout import Layout

DDPFactory = Callable[[nn.Module, DDPConfig, World], ParallelModel]


def parallelize(
    model: nn.Module,
    config: RunConfig,
    layout: Layout,
    world: World,
    spec: ParallelSpec,
    fill: Fill | None = None,
    *,
    plan: StagePlan | None = None,
    ddp: DDPFactory = DDPModel,
) -> ParallelModel:
    """Applies every axis of the layout to a model.

    `fill` initializes a model that is on the meta device. The simulator
    passes `plan` for a model with fewer blocks than the config has, and `ddp` to replace DDP.
    """
    meshes = build_meshes(layout, world.device.type, experts=bool(config.model.experts) and fill is not None)
    synchronize_batch_norm(model, partial(new_group, layout, "replicate", "shard"))
    require_spec(model, spec, layout)
    if plan is None and layout.pipeline > 1:
        plan = stage_plan(config, layout, world.rank)
    if plan is not None:
        prune_to_stages(model, plan)
        spec = spec.restricted_to(model)
    if tensor_mesh := meshes.submesh("tensor"):
        apply_tensor_parallel(model, spec, tensor_mesh)
    apply_expert_parallel(model, spec, meshes)
    context = None
    if meshes.context_group is not None:
        context = apply_context_parallel(model, spec, meshes.context_group, config.context.method)
        if context.is_custom and config.compile.enabled:
            raise ConfigError(
                "compile.enabled = true is unsupported with context parallelism of a user's model, whose attention is "
                "replaced where it is called",
                "try compile.enabled = false, or layout.context = 1",
            )
    apply_activation_checkpointing(model, spec, config.activation_checkpoint)
    if config.compile.enabled:
        apply_compile(model, spec)
    materializer = Materializer(model, fill, world.device)
    data_parallel = partial(
        apply_data_parallel,
        config=config,
        layout=layout,
        world=world,
        meshes=meshes,
        materializer=materializer,
        ddp=ddp,
    )
    if plan is None:
        parallel_model = data_parallel(model, spec)
    else:
        materializer.copied_from |= TIED_COPIES if config.model.tie else {}
        stages = {i: data_parallel(stage, stage_parallel_spec(stage)) for i, stage in build_stages(model, plan).items()}
        parallel_model = PipelineModel(model, stages, plan, meshes, world.device, tied=config.model.tie)
    parallel_model.meshes = meshes
    parallel_model.context = context
    if context is not None or plan is not None:
        parallel_model.shard_inputs = partial(shard_batch, context, getattr(model, "separator", None))
    return parallel_model


def shard_batch(
    context: ContextAttention | None, separator: int | None, batch: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    chunks = context.chunks if context is not None and context.enabled else None
    return local_chunk(batch, chunks=chunks, separator=separator)


def apply_data_parallel(
    module: nn.Module,
    spec: ParallelSpec,
    config: RunConfig,
    layout: Layout,
    world: World,
    meshes: Meshes,
    materializer: Materializer,
    ddp: DDPFactory,
) -> ParallelModel:
    """Wraps a model or a pipeline stage by FSDP2 or DDP, or by neither if no other rank processes different tokens."""
    different_tokens = layout.data_degree * layout.context > 1
    if different_tokens and meshes.dense_mesh is not None:
        parallel_model = FSDPModel(module, spec, config, meshes, materializer.allocate)
        materializer.initialize(module)
        return parallel_model
    materializer.allocate(module)
    materializer.initialize(module)
    return ddp(module, config.ddp, world) if different_tokens else ParallelModel(module)


def require_spec(model: nn.Module, spec: ParallelSpec, layout: Layout) -> None:
    """Raises a ConfigError if the spec names what the model does not have, or lacks what an axis needs."""
    find_blocks(model, spec)
    require_modules(model, (*spec.before, *spec.after))
    if layout.tensor == 1:
        return
    if not spec.tp_plan():
        raise ConfigError(
            f"layout.tensor = {layout.tensor} needs a tensor-parallel plan, and ParallelSpec.tp_plan is empty",
            "try layout.tensor = 1, or ParallelSpec(..., tp_plan=lambda: {...})",
        )
    require_tp_plan(model, spec, layout.tensor)
