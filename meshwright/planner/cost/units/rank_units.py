"""What one pipeline rank has of the model: its stages, and their FSDP units with the bytes that each stores and moves.

The units of a Meshwright run are those of its parameters, padding included, so that what follows from them is exact. Of
other jobs, and of candidates of a search, the sizes follow from the architecture and the trainer's bytes per parameter.
Equal blocks in a row are one `BlockRun`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from meshwright.base.config import RunConfig
from meshwright.base.dtypes import COMPUTE_BYTES, parameter_bytes, weight_bytes
from meshwright.base.hardware.links import GroupPlacement, group_placement
from meshwright.base.models.spec import AFTER, BEFORE, ROOT, ModelSpec
from meshwright.base.topology.parameter_shards import (
    ParameterShard,
    ShardGroup,
    group_by_unit,
    parameter_shards,
    pipeline_placement,
)
from meshwright.planner.cost.units.data_sharding import ShardRanks, data_sharding
from meshwright.planner.cost.units.stage_parameters import StageLayers
from meshwright.planner.workload.optimizer_bytes import TrainedShares, shares_of_spec
from meshwright.planner.workload.planned_job import PlannedJob

OWN_DTYPE = (BEFORE, ROOT)
"""The units of the modules before the blocks: their unsharded parameters have the dtype of the weights, so that the
residual stream begins in it.
"""


@dataclass(frozen=True)
class UnitGroup:
    """The process groups of a unit: that of its shards, and that of its replicas."""

    shard_axis: str
    shards: GroupPlacement
    replicate_axis: str
    replicas: GroupPlacement


@dataclass(frozen=True)
class Unit:
    """An FSDP unit on one rank."""

    group: UnitGroup
    stored: float
    """bytes of the parameters that the rank stores throughout the step"""
    unsharded: float
    """bytes of the unsharded parameters"""
    gathered: float
    """message bytes of an all-gather"""
    resharded: float
    """bytes that remain after forward if the unit stays sharded over fewer ranks; 0 if nothing but the shard does"""
    numel: float
    """elements of its gradients, unsharded"""
    padded: float
    """the same with padding: the elements of a reduction"""
    shard: float
    """elements of the local shard of its gradients"""
    last: float = 0
    """elements of the last gradient, which FSDP2 still has while it reduces the unit"""
    first: float = 0
    """elements of the gradients that exist at the peak of the unit's backward pass"""
    early: float = 0
    """elements of gradients that backward computes long before the others of the unit"""
    partial: float = 0
    """elements of gradients that are partial sums over the tensor axis"""
    computed: float = 0
    """bytes per element of a gradient that backward has just computed, if that is not the compute dtype's"""

    def __add__(self, other: Unit) -> Unit:
        """Both units as one, with the groups of the first."""
        return replace(
            self,
            **{
                name: getattr(self, name) + getattr(other, name)
                for name in ("stored", "unsharded", "gathered", "resharded", "numel", "padded", "shard", "partial")
            },
        )


@dataclass(frozen=True)
class TensorModules:
    """The tensor-parallel modules of a block that communicate less, or more, than others."""

    gathers_frozen: int = 0
    """modules whose output has no gradient"""
    scatters_frozen: int = 0
    """modules whose input has no gradient"""
    repeats_last_scatter: bool = False
    """whether full activation checkpointing repeats the reduce-scatter at the end of the block"""


@dataclass(frozen=True)
class BlockRun:
    """Equal blocks in a row."""

    count: int
    moe: bool
    unit: Unit
    experts: Unit | None
    """the unit of expert weights that are divided over ranks"""
    tensor: TensorModules
    trained: TrainedShares | None = None
    """which part of the blocks is trained; None for that of the job"""


@dataclass(frozen=True)
class RankStage:
    """One pipeline stage of a rank."""

    layers: StageLayers
    before: Unit | None
    runs: tuple[BlockRun, ...]
    after: Unit | None
    root: Unit | None = None
    """the unit that stays unsharded throughout a pass: tied weights, and parameters of no block"""
    embedding_frozen: bool = False

    @property
    def units(self) -> list[tuple[int, Unit]]:
        """All units, each with the number of equal ones."""
        rows = [(run.count, unit) for run in self.runs for unit in (run.unit, run.experts) if unit is not None]
        return [*rows, *((1, unit) for unit in (self.before, self.after, self.root) if unit is not None)]


def unit_groups(job: PlannedJob) -> tuple[UnitGroup, UnitGroup]:
    """The groups of dense parameters, and of experts that are divided over ranks."""
    sharding, per_node = data_sharding(job), job.cluster.devices_per_node
    return unit_group(sharding.dense, per_node), unit_group(sharding.experts, per_node)


def unit_group(ranks: ShardRanks, devices_per_node: int) -> UnitGroup:
    shard_axis, replicate_axis = ranks.names
    shards = group_placement(devices_per_node, ranks.shards, ranks.stride)
    replicas = group_placement(devices_per_node, ranks.replicas, ranks.stride * ranks.shards)
    return UnitGroup(shard_axis, shards, replicate_axis, replicas)


def exact_stages(job: PlannedJob, config: RunConfig, spec: ModelSpec, rank: int) -> tuple[RankStage, ...]:
    """The stages of a global rank of a Meshwright run."""
    shards = parameter_shards(spec, config, job.layout, rank)
    placement = pipeline_placement(config, job.layout, rank, spec.block_costs(config.data.sequence))
    units, groups = group_by_unit(shards), unit_groups(job)
    by_name = {name: exact_unit(config, name, members, groups, spec.before) for name, members in units.items()}
    frozen = frozen_modules(spec) if job.layout.tensor > 1 else {}
    segment = config.activation_checkpoint.segment if config.activation_checkpoint.mode == "full" else 1
    own = list(placement.stages)
    stages = []
    for stage, blocks in placement.stages.items():
        first, last = stage == 0, stage == placement.stage_count - 1
        rows = []
        for position, block in enumerate(blocks):
            name = spec.block_names[block]
            experts = [unit for unit in by_name if unit.startswith(f"{name}.")]
            moe = spec.architecture is not None and spec.architecture.is_moe_layer(block)
            ends_segment = position % segment == segment - 1 or position == len(blocks) - 1
            unit, nested = by_name[name], by_name[experts[0]] if experts else None
            if nested is not None:  # shared experts run last in the block, so their gradients come first
                unit = replace(unit, first=unit.early)
                nested = replace(nested, first=0) if unit.early else nested
            rows.append(
                BlockRun(
                    1,
                    moe,
                    unit,
                    nested,
                    TensorModules(
                        *frozen.get(block, (0, 0)), not (ends_segment and ends_with_scatter(config, spec, moe))
                    ),
                    shares_of_spec(spec, [name]) if job.trained.frozen else None,
                )
            )
        runs = tuple(
            replace(run, count=len(list(equal))) for run, equal in groupby(rows)
        )  # fmt: skip
        moe_layers = sum(run.count for run in runs if run.moe)
        layers = StageLayers(len(blocks) - moe_layers, moe_layers, first, last, stage + 1 in own, stage - 1 in own)
        root = by_name.get(ROOT) if stage == 0 else None
        stages.append(
            RankStage(
                layers,
                by_name.get(BEFORE) if first else None,
                runs,
                by_name.get(AFTER) if last else None,
                root,
                embedding_frozen=not spec.parameters[0].trainable,
            )
        )
    return tuple(stages)


def exact_unit(
    config: RunConfig,
    name: str,
    members: Sequence[ParameterShard],
    groups: tuple[UnitGroup, UnitGroup],
    before: tuple[str, ...],
) -> Unit:
    group = members[0].shard_group
    trainable = [parameter for parameter in members if parameter.trainable]
    unsharded = unsharded_bytes(config, name, members)
    ranks = ranks_after_forward(config, group)
    if name == ROOT:  # backward begins with the final norm; the weights before the blocks come last
        last_names = tuple(f"{module}." for module in before)
        early = sum(p.numel for p in trainable[1:] if not p.name.startswith(last_names))
    else:
        early = sum(parameter.numel for parameter in trainable if ".shared." in parameter.name)
    return Unit(
        groups[1] if group.shard_axis.startswith("expert") else groups[0],
        sum(parameter.padded_shard_numel * stored_bytes(config, parameter) for parameter in members),
        unsharded,
        unsharded,
        unsharded // ranks if ranks > 1 else 0,
        sum(parameter.numel for parameter in trainable),
        sum(parameter.padded_numel for parameter in trainable),
        sum(parameter.padded_shard_numel for parameter in trainable),
        sum(parameter.numel for parameter in trainable[-1:]) if group.shards > 1 else 0,
        max((parameter.numel for parameter in trainable), default=0),
        early,
        sum(parameter.numel for parameter in members if parameter.grad_is_partial),
        weight_bytes(config) if name in OWN_DTYPE else 0,
    )


def stored_bytes(config: RunConfig, parameter: ParameterShard) -> int:
    """Bytes per element of a parameter of the model; frozen ones are not rounded."""
    return weight_bytes(config) if parameter.trainable else parameter_bytes(config)


def unsharded_bytes(config: RunConfig, name: str, members: Sequence[ParameterShard]) -> int:
    """Bytes of an unsharded unit: in the compute dtype, or in that of its weights."""
    compute = COMPUTE_BYTES[config.precision.compute]
    return sum(p.padded_numel * (stored_bytes(config, p) if name in OWN_DTYPE else compute) for p in members)


def ranks_after_forward(config: RunConfig, group: ShardGroup) -> int:
    """The ranks that a unit stays sharded over between forward and backward, if they are fewer than its shard group;
    otherwise 0 (FSDP2's `reshard_after_forward`).
    """
    ranks = config.fsdp.ranks_after_forward
    return ranks if config.layout.shard == "parameters" and ranks is not None and ranks < group.shards else 0


def ends_with_scatter(config: RunConfig, spec: ModelSpec, moe: bool) -> bool:
    """Whether the last collective of a tensor-parallel block is a reduce-scatter that its backward does not need. A
    norm at the end of the block needs it; a mixture of experts ends with one only if it has shared experts and no
    load-balancing loss.
    """
    if spec.architecture is not None and spec.architecture.post_norms:
        return False
    return not moe or (config.model.experts_shared > 0 and not config.model.router_aux_loss)


def frozen_modules(spec: ModelSpec) -> dict[int, tuple[int, int]]:
    """By block: the tensor-parallel modules whose output, and those whose input, has no gradient. Backward ends at the
    first trainable parameter of the model. Parameters are in the order of their use.
    """
    names = [parameter.name for parameter in spec.parameters]
    first = next((index for index, parameter in enumerate(spec.parameters) if parameter.trainable), len(names))
    if first == 0:
        return {}
    frozen = {}
    for index, block in enumerate(spec.block_names):
        moe = spec.architecture is not None and spec.architecture.is_moe_layer(index)
        shared = spec.architecture is not None and spec.architecture.shared_ffn > 0
        modules: list[tuple[str, ...]] = [(f"{block}.attention.",)]
        if not moe or shared:
            modules.append((f"{block}.ffn.", f"{block}.dense_ffn."))
        spans = [[place for place, name in enumerate(names) if name.startswith(module)] for module in modules]
        frozen[index] = (sum(first > span[-1] for span in spans), sum(first >= span[0] for span in spans))
    return frozen
