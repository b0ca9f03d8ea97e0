"""The one order in which the axes of parallelism are applied to a model.

1. pipeline              divide the model into this rank's stages; all later steps are applied to each stage
2. float8                change the class of linear layers in blocks; the styles of tensor parallelism call its forward
3. tensor                shard weight matrices as DTensors; all later steps see local shards
4. expert                keep this rank's experts; tokens travel to theirs by all-to-all
5. context               attention and positions of sequence chunks
6. activation checkpoint wrap each block's forward: tensor and context collectives are recomputed, FSDP2's are not
7. compile               each block's forward, recomputation included; offload of block inputs goes around it
8. materialize           the model is on the meta device until here: allocate unit by unit, initialize local shards only
9. data parallel         FSDP2 over the ranks that process different tokens, for each stage separately;
                         DDP if every rank has a full replica
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.base.config import DDPConfig, RunConfig
from meshwright.base.dtypes import rounds_weights
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import PipelinePlacement, pipeline_placement, uses_fsdp
from meshwright.core.models.layers.loss import use_fused_loss
from meshwright.core.parallel.activation_memory.activation_checkpoint import apply_activation_checkpointing
from meshwright.core.parallel.activation_memory.activation_offload import apply_activation_offload
from meshwright.core.parallel.compile import apply_compile
from meshwright.core.parallel.context_parallel.context_attention import ContextAttention
from meshwright.core.parallel.context_parallel.context_parallel import apply_context_parallel
from meshwright.core.parallel.context_parallel.sequence_chunks import local_chunk
from meshwright.core.parallel.data_parallel.ddp import DDPModel
from meshwright.core.parallel.data_parallel.fsdp import FSDPModel
from meshwright.core.parallel.expert_parallel import apply_expert_parallel
from meshwright.core.parallel.float8 import apply_float8, require_float8
from meshwright.core.parallel.materialize import Fill, Materializer
from meshwright.core.parallel.mesh import Meshes, build_meshes, new_group
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.parallel.parallel_spec import ParallelSpec, find_blocks, require_modules
from meshwright.core.parallel.pipeline_parallel.model_trace import shown
from meshwright.core.parallel.pipeline_parallel.pipeline_model import PipelineModel
from meshwright.core.parallel.pipeline_parallel.stages import StagePlan, divide_into_stages
from meshwright.core.parallel.sync_batch_norm import synchronize_batch_norm
from meshwright.core.parallel.tensor_parallel import apply_tensor_parallel, require_tp_plan, shards_sequence
from meshwright.core.parallel.world import World
from meshwright.errors import ConfigError

DDPFactory = Callable[[nn.Module, DDPConfig, World], ParallelModel]


def parallelize(
    model: nn.Module,
    config: RunConfig,
    layout: Layout,
    world: World,
    spec: ParallelSpec,
    fill: Fill | None = None,
    *,
    placement: PipelinePlacement | None = None,
    ddp: DDPFactory = DDPModel,
) -> ParallelModel:
    """Applies every axis of the layout to a model.

    `fill` initializes a model that is on the meta device. `placement` has the pipeline stages of this rank; by default
    all blocks of the model cost the same. The simulator passes `ddp` to replace DDP.
    """
    meshes = build_meshes(layout, world.device.type, experts=bool(config.model.experts) and fill is not None)
    synchronize_batch_norm(model, partial(new_group, layout, "replicate", "shard"))
    require_spec(model, spec, layout)
    weights = torch.bfloat16 if rounds_weights(config) else torch.float32
    materializer = Materializer(model, fill, world.device, weights)
    context = ContextAttention(meshes.context_group, config.context.method) if meshes.context_group else None
    apply = AxisOrder(config, layout, world, meshes, context, materializer, ddp)
    if layout.pipeline == 1:
        parallel_model = apply(model, spec)
    else:
        if placement is None:
            placement = pipeline_placement(config, layout, world.rank, (1.0,) * len(find_blocks(model, spec)))
        coordinate = layout.coordinates(world.rank)["pipeline"]
        plan = StagePlan(config.pipeline.schedule, layout.pipeline, coordinate, placement)
        divided = divide_into_stages(model, spec, plan, world.device, materializer.weights)
        materializer.copied_from |= {tied.copy_name: tied.owner_name for tied in divided.tied}
        stages = {
            index: apply(stage, spec.under_objective().restricted_to(stage)) for index, stage in divided.stages.items()
        }
        sequence_shards = layout.tensor if shards_sequence(spec) else 1
        parallel_model = PipelineModel(model, stages, divided, plan, meshes, world.device, sequence_shards)
    parallel_model.meshes = meshes
    parallel_model.masters = materializer.masters
    parallel_model.broadcast_masters()
    parallel_model.block_patterns = spec.block_patterns
    parallel_model.context = context
    if context is not None:
        parallel_model.shard_inputs = partial(shard_batch, context, model)
    return parallel_model


def shard_batch(context: ContextAttention, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    chunks = context.chunks if context.enabled else None
    return local_chunk(batch, chunks, getattr(model, "separator", None), built_in=hasattr(model, "separator"))


@dataclass(frozen=True)
class AxisOrder:
    """Applies every axis but the pipeline to a model, or to one pipeline stage."""

    config: RunConfig
    layout: Layout
    world: World
    meshes: Meshes
    context: ContextAttention | None
    materializer: Materializer
    ddp: DDPFactory

    def __call__(self, model: nn.Module, spec: ParallelSpec) -> ParallelModel:
        config, meshes = self.config, self.meshes
        if config.kernels.loss == "fused":
            use_fused_loss(model, saves_memory=config.activation_checkpoint.mode != "none")
        if config.precision.float8:
            require_float8(self.world.device)
            apply_float8(model, spec, self.layout.tensor)
        if tensor_mesh := meshes.submesh("tensor"):
            apply_tensor_parallel(model, spec, tensor_mesh)
        apply_expert_parallel(model, spec, meshes)
        if self.context is not None:
            apply_context_parallel(model, spec, self.context)
            if self.context.is_custom and config.compile.enabled:
                raise ConfigError(
                    "compile.enabled = true is unsupported with context parallelism of a user's model, whose attention "
                    "is replaced where it is called",
                    "try compile.enabled = false, or layout.context = 1",
                )
        apply_activation_checkpointing(model, spec, config.activation_checkpoint)
        if config.compile.enabled:
            apply_compile(model, spec, config.compile.scope, config.activation_checkpoint.memory_budget)
        if config.activation_checkpoint.offload:
            apply_activation_offload(model, spec)
        return self.data_parallel(model, spec)

    def data_parallel(self, module: nn.Module, spec: ParallelSpec) -> ParallelModel:
        """Wraps a module by FSDP2 or DDP, or by neither if no other rank processes different tokens."""
        wraps = wraps_data_parallel(self.layout)
        if wraps and self.meshes.dense_mesh is not None:
            parallel_model = FSDPModel(module, spec, self.config, self.meshes, self.materializer.allocate)
            self.materializer.initialize(module)
            parallel_model.keep_float32_gradients()
            return parallel_model
        self.materializer.allocate(module)
        self.materializer.initialize(module)
        return self.ddp(module, self.config.ddp, self.world) if wraps else ParallelModel(module)


def wraps_data_parallel(layout: Layout) -> bool:
    """Whether ranks process different tokens, so that FSDP2 or DDP sums their gradients."""
    return layout.data_degree * layout.context > 1


def require_spec(model: nn.Module, spec: ParallelSpec, layout: Layout) -> None:
    """Raises a ConfigError if the spec names what the model does not have, or an axis cannot divide the model."""
    if uses_fsdp(layout):
        for name, parameter in model.named_parameters():
            if not parameter.numel() and parameter.requires_grad:
                raise ConfigError(
                    f"FSDP2 cannot shard {shown(name)}, an empty parameter of shape {tuple(parameter.shape)}",
                    "try to leave it out of the model, requires_grad_(False), or a layout of layout.replicate alone",
                )
    find_blocks(model, spec)
    require_modules(model, (*spec.before, *spec.after))
    if layout.expert > 1 and not spec.experts:
        raise ConfigError(
            f"layout.expert = {layout.expert} divides the experts of a model, and ParallelSpec.experts names none",
            'try layout.expert = 1, or ParallelSpec(..., experts="layers.*.mlp.experts")',
        )
    if layout.tensor == 1:
        return
    if not spec.tp_plan():
        raise ConfigError(
            f"layout.tensor = {layout.tensor} needs a tensor-parallel plan, and ParallelSpec.tp_plan is empty",
            "try layout.tensor = 1, or ParallelSpec(..., tp_plan=lambda: {...})",
        )
    require_tp_plan(model, spec, layout.tensor)
