"""Peak bytes of parameters, gradients and optimizer state on one rank; exact on CPU.

S is the bytes of a rank's padded shards, U one unsharded unit, u the same without padding, P all parameters. The
optimizer state is that of the local shards, as `topology/optimizer_state.py` declares it for each optimizer.

| shard | parameters | gradients |
|---|---|---|
| none (DDP) | P | P |
| optimizer | S + all U | P |
| gradients | S + all U | S + the largest u |
| parameters | S + the largest U | S + the largest u |
| parameters, with a pipeline | S + all U that the schedule unshards | P |

With bf16 weights, P, S and U are those of the weights, the optimizer state has the float32 master weights, and
gradients are float32 where they are reduced by FSDP2 or accumulated over micro-batches.

The weights of a block's experts, if experts are divided over ranks, are a unit of their own that is unsharded together
with the block. A pipeline schedule accumulates unsharded gradients. The last stage's copy of a tied weight has a
gradient and no optimizer state. On a GPU, FSDP2 prefetches: `fsdp.prefetch` more units are unsharded at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config import Batch, RunConfig
from meshwright.config.dtypes import parameter_bytes, rounds_weights, weight_bytes
from meshwright.models.registry import run_spec
from meshwright.models.spec import AFTER, AROUND_BLOCKS, BEFORE, ModelSpec
from meshwright.planner.exact.activation_messages import gradient_bytes
from meshwright.planner.exact.comm_volume import ranks_after_forward, run_unshard_timeline, unsharded_bytes
from meshwright.planner.exact.unshard_timeline import last_backward, nest_units, rank_actions
from meshwright.topology.layout import Layout
from meshwright.topology.optimizer_state import rank_state_bytes
from meshwright.topology.parameter_shards import (
    ParameterShard,
    Units,
    dense_shard_group,
    group_by_unit,
    parameter_shards,
    uses_ddp,
    uses_fsdp,
)


@dataclass(frozen=True)
class StateMemory:
    """Peak bytes of each memory class of one rank, each class on its own."""

    parameter: int
    gradient: int
    optimizer: int


def state_memory(
    config: RunConfig, layout: Layout, batch: Batch, rank: int = 0, spec: ModelSpec | None = None
) -> StateMemory:
    """The memory of one rank for a model: that of the config, or the one that `spec` describes."""
    spec = spec or run_spec(config)
    parameters = parameter_shards(spec, config, layout, rank)
    size, masters = parameter_bytes(config), rounds_weights(config)
    optimizer = rank_state_bytes(config.optimizer, parameters, uses_fsdp(layout), size, masters)
    if not uses_fsdp(layout):
        total = sum(p.numel * element_bytes(config, p) for p in parameters)
        gradients = sum(p.numel for p in trainable(parameters)) * gradient_element_bytes(config, layout, batch)
        return StateMemory(total, gradients, optimizer)
    units = group_by_unit(parameters)
    shards = sum(parameter.padded_shard_numel * element_bytes(config, parameter) for parameter in parameters)
    if layout.pipeline > 1:
        unsharded = run_unshard_timeline(config, layout, batch, units, rank).peak
        return StateMemory(shards + unsharded, pipeline_gradients(config, layout, batch, units, rank), optimizer)
    gradients = peak_gradients(config, batch, units, spec.before)
    return StateMemory(shards + peak_unsharded(config, layout, units), gradients, optimizer)


def element_bytes(config: RunConfig, parameter: ParameterShard) -> int:
    """Bytes per element of a parameter of the model; frozen ones are not rounded."""
    return weight_bytes(config) if parameter.trainable else parameter_bytes(config)


def gradient_element_bytes(config: RunConfig, layout: Layout, batch: Batch) -> int:
    """Bytes per element of the gradients of a rank without FSDP2. DDP accumulates the gradients of rounded weights
    beside its buckets.
    """
    beside = weight_bytes(config) if rounds_weights(config) and uses_ddp(layout) and batch.accumulation > 1 else 0
    return gradient_bytes(config, layout, batch) + beside


def trainable(parameters: list[ParameterShard]) -> list[ParameterShard]:
    """The parameters that have a gradient."""
    return [parameter for parameter in parameters if parameter.trainable]


def peak_unsharded(config: RunConfig, layout: Layout, units: Units) -> int:
    """Peak bytes of unsharded units without a pipeline."""
    sizes = unsharded_bytes(config, units)
    ranks = ranks_after_forward(config, dense_shard_group(layout, 0))
    if config.layout.shard in ("optimizer", "gradients") or ranks == 1:
        return sum(sizes.values())
    root = sizes.pop("root", 0)  # the root unit is unsharded throughout the step
    if ranks:
        return root + peak_resharded(config, units, sizes)
    segment = config.activation_checkpoint.segment if config.activation_checkpoint.mode == "full" else 1
    nests = {nest[0]: sum(sizes[unit] for unit in nest) for nest in nest_units(sizes)}
    blocks = [size for unit, size in nests.items() if unit not in AROUND_BLOCKS]
    return root + max(sum(blocks[:segment]), *nests.values())  # the blocks of a segment are unsharded together


def peak_resharded(config: RunConfig, units: Units, sizes: dict[str, int]) -> int:
    """Peak bytes if units stay sharded over fewer ranks after forward: backward unshards a unit while the resharded
    copies of this unit and of all units before it still exist.
    """
    ranks = {unit: ranks_after_forward(config, units[unit][0].shard_group) for unit in sizes}
    resharded = {unit: size // ranks[unit] if ranks[unit] else 0 for unit, size in sizes.items()}
    resident, peak = sum(resharded.values()), 0
    for nest in reversed(nest_units(sizes)):
        for unit in nest:
            peak = max(peak, resident := resident + sizes[unit])
            resident -= resharded[unit]
        resident -= sum(sizes[unit] for unit in nest)
    return peak


class GradientTimeline:
    """Bytes of the gradients of FSDP units, unsharded and as shards, and their peak."""

    def __init__(self, config: RunConfig, units: Units) -> None:
        size = parameter_bytes(config)
        units = {unit: trainable(members) for unit, members in units.items()}
        self.unsharded_bytes = {unit: sum(p.numel for p in members) * size for unit, members in units.items()}
        self.shard_bytes = {unit: sum(p.padded_shard_numel for p in members) * size for unit, members in units.items()}
        # While a unit is reduce-scattered, FSDP2 still holds the gradient of its last parameter.
        self.last_bytes = {
            unit: sum(p.numel * size for p in members[-1:] if p.shard_group.shards > 1)
            for unit, members in units.items()
        }
        self.unsharded, self.shards = dict.fromkeys(units, 0), dict.fromkeys(units, 0)
        self.peak = 0

    def update_peak(self) -> None:
        self.peak = max(self.peak, sum(self.unsharded.values()) + sum(self.shards.values()))

    def compute(self, unit: str) -> None:
        """Backward computes the gradients of a unit."""
        self.unsharded[unit] = self.unsharded_bytes[unit]
        self.update_peak()

    def reduce(self, unit: str) -> None:
        """The gradients of a unit are reduce-scattered."""
        self.unsharded[unit] = self.last_bytes[unit]
        self.shards[unit] = self.shard_bytes[unit]
        self.update_peak()
        self.unsharded[unit] = 0


def peak_gradients(config: RunConfig, batch: Batch, units: Units, before: tuple[str, ...]) -> int:
    """Peak bytes in the last micro-step, which computes and reduces the gradients of one unit after the other, from the
    last to the first. Earlier micro-steps leave unsharded gradients if gradients are reduced once per step, and shards
    if they are reduced in every micro-step. `before` names the modules before the blocks.
    """
    timeline = GradientTimeline(config, units)
    if batch.accumulation > 1:
        if config.layout.shard in ("gradients", "parameters"):
            timeline.shards = dict(timeline.shard_bytes)
        else:
            timeline.unsharded = dict(timeline.unsharded_bytes)
    if "root" in units:  # backward begins with the final norm, in the root unit; the weights before blocks come last
        last = tuple(f"{name}." for name in before)
        norm = sum(p.numel for p in trainable(units["root"][1:]) if not p.name.startswith(last))
        timeline.unsharded["root"] = max(timeline.unsharded["root"], norm * parameter_bytes(config))
    timeline.update_peak()
    for nest in reversed(nest_units(unit for unit in units if unit != "root")):
        if len(nest) > 1:  # shared experts run last in the block, so their gradients come first
            shared = sum(p.numel for p in trainable(units[nest[0]]) if ".shared." in p.name) * parameter_bytes(config)
            timeline.unsharded[nest[0]] = max(timeline.unsharded[nest[0]], shared)
        for unit in reversed(nest):
            timeline.compute(unit)
            timeline.reduce(unit)
    if "root" in units:
        timeline.compute("root")
        timeline.reduce("root")
    return timeline.peak


def pipeline_gradients(config: RunConfig, layout: Layout, batch: Batch, units: Units, rank: int) -> int:
    """Peak bytes with a pipeline: the first backward pass of a stage allocates its gradients, and the last one reduces
    them.
    """
    actions, timeline = rank_actions(config, layout, batch, rank), GradientTimeline(config, units)
    last = last_backward(actions)
    for index, action in enumerate(actions):
        stage_units = [unit for unit, members in units.items() if members[0].stage == action.stage]
        if action.op in ("B", "W"):
            for unit in stage_units:
                timeline.compute(unit)
        if last[action.stage] == index:
            for unit in sorted(stage_units, key=lambda unit: (unit != BEFORE) + (unit == AFTER)):  # in module order
                timeline.reduce(unit)
    return timeline.peak
