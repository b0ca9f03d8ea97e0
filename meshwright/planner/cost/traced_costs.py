"""Memory and time of a user's model, from what was traced of it; torch-free.

The costs of a block are those of the mean block. Context parallelism divides what grows with the samples. Tensor
parallelism divides activations as it divides the weights of the blocks, except for the inputs, the normalized inputs
and the outputs of two norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from meshwright.base.models.spec import AFTER, BEFORE, ROOT, Cost, ModuleCost
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology.schedules import partition_blocks
from meshwright.planner.cost.step_flops import StepFlops, step_flops
from meshwright.planner.cost.terms.activations import (
    ActivationSettings,
    BlockActivations,
    block_activations,
    hidden_state_bytes,
    input_bytes,
    outer_activations,
)
from meshwright.planner.cost.terms.head_activations import HeadActivations, head_activations
from meshwright.planner.cost.terms.kernel_time import memory_bound_time
from meshwright.planner.cost.terms.layer_time import (
    BACKWARD_LAUNCHES,
    REFERENCE_LAUNCH,
    LayerShape,
    LayerTime,
    block_time,
    first_time,
    last_time,
    with_launches,
)
from meshwright.planner.cost.units.stage_parameters import StageLayers, StageParameters, divide_layers, stage_parameters
from meshwright.planner.workload.planned_job import PlannedJob


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit for one micro-batch on one rank."""

    saved: float
    hidden: float
    matmul_outputs: float
    forward_peak: float
    backward_peak: float


def costs_of(model: TracedModel, settings: ActivationSettings) -> tuple[ModuleCost, list[ModuleCost], ModuleCost]:
    """The costs before the blocks, of the blocks, and after them."""
    spec = model.autocast_spec if settings.autocast else model.spec
    return spec.before_cost, [block.cost for block in spec.blocks], spec.after_cost


def unit_bytes(cost: ModuleCost, settings: ActivationSettings, hidden: float, tensor_share: float = 1.0) -> UnitBytes:
    tensor = 1 / (1 - tensor_share + tensor_share / settings.layout.tensor)

    def of(part: Cost, replicated: float = 0.0) -> float:
        total = part.constant + part.per_sample * settings.micro_batch / settings.layout.context
        return total if tensor == 1 else min(total, replicated) + max(0.0, total - replicated) / tensor

    return UnitBytes(
        of(cost.activations, 6 * hidden),
        hidden,
        of(cost.matmul_outputs, 2 * hidden),
        of(cost.forward_peak, hidden),
        of(cost.backward_peak, 2 * hidden),
    )


@hidden_state_bytes.register
def _(model: TracedModel, settings: ActivationSettings) -> float:
    _, blocks, _ = costs_of(model, settings)
    output = max((cost.output.of(settings.micro_batch) for cost in blocks), default=0.0)
    return output / settings.layout.context


@input_bytes.register
def _(model: TracedModel, settings: ActivationSettings) -> float:
    return model.sample_bytes * settings.micro_batch / settings.layout.context


@cache
def mean_block(model: TracedModel, settings: ActivationSettings) -> UnitBytes:
    """The mean block. Its peak of backward, on top of all blocks, is that of the block with the largest peak."""
    hidden = hidden_state_bytes(model, settings)
    units = [unit_bytes(cost, settings, hidden, model.tensor_share) for cost in costs_of(model, settings)[1]]
    if not units:
        return UnitBytes(0.0, 0.0, 0.0, 0.0, 0.0)
    saved = peak = forward = 0.0
    for unit in units:
        forward = max(forward, saved + unit.saved + unit.forward_peak)
        saved += unit.saved
        peak = max(peak, saved + unit.backward_peak)
    return UnitBytes(
        saved / len(units),
        hidden,
        sum(unit.matmul_outputs for unit in units) / len(units),
        max(0.0, forward - saved),
        max(0.0, peak - saved),
    )


@block_activations.register
@cache
def _(model: TracedModel, settings: ActivationSettings, moe: bool) -> BlockActivations:  # noqa: ARG001
    block = mean_block(model, settings)
    hidden, total = block.hidden, block.saved
    deferred = block.matmul_outputs + 2 * hidden
    cast = model.unit_parameters(settings.layout.tensor)
    blocks = sum(numel for unit, numel in cast.items() if unit not in (BEFORE, AFTER, ROOT))
    weights = settings.compute_bytes * blocks / model.layers if settings.autocast else 0.0
    if settings.activation_checkpoint == "none":
        return BlockActivations(total, block.forward_peak, block.backward_peak, block.backward_peak, deferred, weights)
    saved = hidden / settings.segment
    if settings.activation_checkpoint == "selective":
        # The output of attention, which is as large as the hidden states, and half of the products.
        saved = min(total, hidden + (block.matmul_outputs + hidden) / 2)
    recomputed = settings.segment * total - saved
    peak = recomputed + block.backward_peak
    return BlockActivations(saved, total - saved + block.forward_peak, peak, peak, deferred + total - saved, weights)


@outer_activations.register
def _(model: TracedModel, settings: ActivationSettings) -> float:
    before, _, _ = costs_of(model, settings)
    return unit_bytes(before, settings, hidden_state_bytes(model, settings)).saved


@head_activations.register
@cache
def _(model: TracedModel, settings: ActivationSettings) -> HeadActivations:
    _, _, after = costs_of(model, settings)
    hidden = hidden_state_bytes(model, settings)
    unit = unit_bytes(after, settings, hidden, tensor_share=0.0)  # the loss has all logits
    return HeadActivations(
        unit.saved, 0.0, unit.forward_peak, unit.backward_peak, 0.0, unit.matmul_outputs + 2 * hidden
    )


@divide_layers.register
@cache
def _(model: TracedModel, stages: int, costs: tuple[float, ...] | None) -> tuple[StageLayers, ...]:  # noqa: ARG001
    ranges = partition_blocks((1.0,) * model.layers, stages)
    return tuple(StageLayers(len(blocks), 0, i == 0, i == stages - 1) for i, blocks in enumerate(ranges))


@stage_parameters.register
@cache
def _(
    model: TracedModel, stage: StageLayers, tensor: int, expert: int, no_pipeline: bool, _experts_apart: bool
) -> StageParameters:
    """Parameters that belong to no unit are in the first stage; a tied weight is in the last one, too."""
    units = model.unit_parameters(tensor, expert)
    before, after, root = (float(units.pop(unit, 0)) for unit in (BEFORE, AFTER, ROOT))
    block_experts = model.all_expert_parameters / model.layers / expert
    embedding = before + root if stage.is_first else 0.0
    tied = 0.0 if no_pipeline else sum(model.spec.by_name[copy].local_numel(tensor) for copy in model.spec.tied)
    head = after + tied if stage.is_last else 0.0
    at_peak = max((block.cost.gradients_at_peak.of(1) for block in model.spec.blocks), default=0.0)
    return StageParameters(
        max(units.values(), default=0),
        block_experts if expert > 1 else 0.0,
        at_peak / 4 / tensor,
        embedding,
        head,
        block_experts if expert == 1 else 0.0,
    )


RECOMPUTED_FORWARD = {"none": 0.0, "selective": 0.5, "full": 1.0}
"""The fraction of the forward pass of the blocks that activation checkpointing repeats."""
MATMUL_EFFICIENCY = 0.8
"""The rate of the matrix products of a model of one's own, as a fraction of that of large ones."""


def unit_time(cost: ModuleCost, shape: LayerShape, share: float = 1.0) -> LayerTime:
    """Seconds of a unit, or of this share of it: matrix products and attention by their FLOPs, other operators by the
    bytes that they move, and the host's launches.
    """

    def of(part: Cost) -> float:
        return share * (part.constant + part.per_sample * shape.micro_batch / shape.context) / shape.tensor

    def seconds(flops: Cost, traffic: Cost, launches: float) -> float:
        operators = share * cost.operators * launches
        compute = of(flops) / (shape.linear_rate.flops * MATMUL_EFFICIENCY)
        compute += memory_bound_time(shape.rate, of(traffic), operators)
        return with_launches(shape, compute, operators * (shape.launch_seconds or REFERENCE_LAUNCH))

    forward = seconds(cost.flops, cost.traffic, 1.0)
    backward = seconds(cost.backward_flops, cost.backward_traffic, BACKWARD_LAUNCHES)
    weight_gradient = of(cost.backward_flops) / 2 / (shape.linear_rate.flops * MATMUL_EFFICIENCY)
    return LayerTime(forward, backward, weight_gradient)


def sum_times(times: list[LayerTime], recomputed: float) -> LayerTime:
    """The time of units together, of whose forward pass activation checkpointing repeats a fraction."""
    forward = sum(time.forward for time in times)
    return LayerTime(
        forward,
        sum(time.backward for time in times),
        sum(time.weight_gradient for time in times),
        recomputed * forward,
    )


@block_time.register
@cache
def _(model: TracedModel, shape: LayerShape, moe: bool) -> LayerTime:  # noqa: ARG001
    recomputed = RECOMPUTED_FORWARD[shape.activation_checkpoint]
    return sum_times([unit_time(b.cost, shape, 1 / model.layers) for b in model.spec.blocks], recomputed)


@first_time.register
@cache
def _(model: TracedModel, shape: LayerShape) -> LayerTime:
    return unit_time(model.spec.before_cost, shape)


@last_time.register
@cache
def _(model: TracedModel, shape: LayerShape) -> LayerTime:
    return unit_time(model.spec.after_cost, shape)


@step_flops.register
def _(model: TracedModel, job: PlannedJob) -> StepFlops:
    spec, samples = model.spec, job.batch.global_
    costs = [spec.before_cost, *(block.cost for block in spec.blocks), spec.after_cost]
    total = sum(cost.flops.of(samples) + cost.backward_flops.of(samples) for cost in costs)
    blocks = sum(block.cost.flops.of(samples) for block in spec.blocks)
    return StepFlops(total, RECOMPUTED_FORWARD[job.activation_checkpoint] * blocks, total)
