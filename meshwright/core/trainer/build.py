"""Builds the parallelized model of a rank: the configured decoder, or a custom model."""

from __future__ import annotations

from meshwright.base.config import RunConfig
from meshwright.base.models.registry import block_costs, run_spec
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import pipeline_placement
from meshwright.core.models.init import build_on_meta, init_shard, set_trainable
from meshwright.core.parallel.data_parallel.ddp import DDPModel
from meshwright.core.parallel.local_shard import LocalShard
from meshwright.core.parallel.materialize import Fill
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.parallel.parallelize import DDPFactory, parallelize
from meshwright.core.parallel.tensor_parallel import family_parallel_spec
from meshwright.core.parallel.world import World
from meshwright.core.trainer.custom_model import MODEL_PREFIX, CustomModel
from meshwright.core.trainer.objective import Objective
from meshwright.core.trainer.precision import Precision
from meshwright.core.weights.initial import InitialWeights, fill_from
from meshwright.rl.policy_head import use_policy_objective


def build_parallel_model(
    config: RunConfig,
    layout: Layout,
    custom: CustomModel | None,
    precision: Precision,
    world: World,
    weights: InitialWeights | None = None,
) -> ParallelModel:
    """Builds and parallelizes the configured decoder or the custom model."""
    if custom is None:
        return build_parallel_decoder(config, layout, precision, world, weights)
    fill = fill_shards(custom, config.seed) if custom.on_meta() else None
    fill = fill_from(weights, lambda name: name.removeprefix(MODEL_PREFIX), fill)
    objective = custom.build_objective(world.device, precision.parameters)
    if config.kernels.loss == "fused" and layout.tensor * layout.pipeline == 1:
        objective.fuse_head()
    return parallelize_objective(objective, custom, config, layout, world, fill)


def parallelize_objective(
    objective: Objective,
    custom: CustomModel,
    config: RunConfig,
    layout: Layout,
    world: World,
    fill: Fill | None = None,
    ddp: DDPFactory = DDPModel,
) -> ParallelModel:
    """Parallelizes a custom model and its loss. Under context parallelism, labels are shifted before they are cut."""
    if layout.context > 1:
        objective.take_shifted_labels()
    parallel_model = parallelize(objective, config, layout, world, custom.objective_spec(), fill, ddp=ddp)
    parallel_model.name_prefix = MODEL_PREFIX
    if objective.labels_shifted:
        shard_inputs = parallel_model.shard_inputs
        parallel_model.shard_inputs = lambda flat: shard_inputs(objective.shift_labels(flat))
    return parallel_model


def build_parallel_decoder(
    config: RunConfig, layout: Layout, precision: Precision, world: World, weights: InitialWeights | None = None
) -> ParallelModel:
    """Builds the configured decoder; each rank initializes its own shards, or reads them from a folder of weights."""
    spec = run_spec(config)

    def initialize(shard: LocalShard, name: str) -> None:
        init_shard(shard.local, name, shard.shape, shard.offset, spec, config.seed)

    model = set_trainable(build_on_meta(config.model, precision.parameters, config.lora, precision.residual), spec)
    if config.rl.enabled:
        use_policy_objective(model, config.rl)
    return parallelize(
        model,
        config,
        layout,
        world,
        family_parallel_spec(spec),
        fill_from(weights, lambda name: name, initialize),
        placement=pipeline_placement(config, layout, world.rank, block_costs(config)),
    )


def fill_shards(custom: CustomModel, seed: int) -> Fill:
    """Returns the function that initializes the shards of a custom model on the meta device by the user's `init`."""
    on_meta = custom.on_meta()

    def fill(shard: LocalShard, name: str) -> None:
        own_name = name.removeprefix(MODEL_PREFIX)
        if own_name in on_meta:
            full = custom.initial_values(own_name, shard.shape, shard.local.dtype, seed)
            ends = zip(shard.offset, shard.local.shape, strict=True)
            shard.local.copy_(full[tuple(slice(start, start + size) for start, size in ends)])

    return fill
