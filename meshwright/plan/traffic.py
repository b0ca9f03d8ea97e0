"""What one rank sends in one optimizer step, by axis and collective: exact, and held against counted bytes by `prove`.

Messages are whole tensors; wire bytes follow by the ring count. P is what a rank of the tensor axis holds of the
parameters, filled up where rows do not divide; M micro-steps; n ranks on the axis.

| layout | message bytes |
|---|---|
| replicate (DDP) | all-reduce P |
| shard optimizer | all-gather P, reduce-scatter P |
| shard gradients | all-gather P, reduce-scatter M P |
| shard parameters | all-gather 2 M P, reduce-scatter M P |
| copies beside shards | all-reduce P / n, over the copies |
| tensor, per micro-step | all-gather and reduce-scatter (4 layers + 2) activations each; three sums over tokens |
| tensor, norm weights | all-reduce of their gradients, wherever gradients meet |

By the ring count an all-reduce sends twice its message, so DDP and the first two kinds of sharding send 2 P (n - 1) / n
where M = 1, and sharded parameters 3 P (n - 1) / n.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshwright.config import Batch, RunConfig
from meshwright.layout import Layout
from meshwright.plan.shapes import BYTES, Shape, decoder_shapes, units_of
from meshwright.record.wire import wire_bytes

CONTROL_SUM = 9 * 8
"""Tokens, bad samples, their ranks, two signals, two words on saving, two on the parameters that were used."""


@dataclass(frozen=True, order=True)
class Sent:
    axis: str
    collective: str
    message_bytes: int
    wire_bytes: int


def traffic(config: RunConfig, layout: Layout, batch: Batch) -> list[Sent]:
    """Of a step on a layout, the same for every rank."""
    shapes = decoder_shapes(config.model)
    messages: Counter[tuple[str, str]] = Counter()
    if layout.ranks > 1:
        messages["control", "all_reduce"] += control(config, layout)
    if layout.data_degree > 1 and layout.used == ("replicate",):
        compressed = 2 if config.replicate.compress == "bf16" else weight_bytes(config)
        messages["replicate", "all_reduce"] += sum(shape.elements() for shape in shapes) * compressed
    elif layout.data_degree > 1:
        messages += sharded(config, layout, batch, shapes)
    if layout.tensor > 1:
        messages += cut(config, layout, batch, shapes)
    rows = [
        Sent(axis, collective, message, wire_bytes(collective, message, ranks_on(config, layout, axis)))
        for (axis, collective), message in messages.items()
        if message
    ]
    return sorted(rows)


def ranks_on(config: RunConfig, layout: Layout, axis: str) -> int:
    """`control` is all ranks; `other` those that keep a unit together between forward and backward."""
    return {"control": layout.ranks, "other": kept(config, layout)}.get(axis) or getattr(layout, axis)


def kept(config: RunConfig, layout: Layout) -> int:
    """Ranks that hold a unit together between forward and backward, where fewer do than share it; else 0."""
    keep = config.shard.keep
    return keep if config.layout.shard == "parameters" and keep is not None and keep < layout.shard else 0


def weight_bytes(config: RunConfig) -> int:
    return 8 if config.precision.compute == "fp64" else 4


def control(config: RunConfig, layout: Layout) -> int:
    """The sums that ranks agree by: what the step is made of, its loss, and the norm where parameters are cut."""
    norm = 8 if layout.shard > 1 or layout.tensor > 1 else 0
    return CONTROL_SUM + weight_bytes(config) + norm


def gathers(config: RunConfig, layout: Layout, accumulation: int) -> int:
    """How often a unit is gathered in a step. Recomputation finds it gathered: backward needs it, too."""
    if config.layout.shard != "parameters":
        return 1
    return accumulation * (1 if kept(config, layout) else 2)


def gathered_bytes(config: RunConfig, layout: Layout, units: dict[str, list[Shape]]) -> dict[str, int]:
    """Each unit once it is gathered: in the precision of compute, but for the one with the embedding, which comes
    first.
    """
    first = next(iter(units))
    each = {unit: weight_bytes(config) if unit == first else BYTES[config.precision.compute] for unit in units}
    return {unit: sum(s.padded(layout.tensor, layout.shard) for s in units[unit]) * each[unit] for unit in units}


def sharded(config: RunConfig, layout: Layout, batch: Batch, shapes: list[Shape]) -> Counter[tuple[str, str]]:
    messages: Counter[tuple[str, str]] = Counter()
    summed = weight_bytes(config)
    scatters = batch.accumulation if config.layout.shard in ("gradients", "parameters") else 1
    padded = sum(shape.padded(layout.tensor, layout.shard) for shape in shapes)
    gathered = sum(gathered_bytes(config, layout, units_of(shapes)).values())
    if layout.shard > 1:
        messages["shard", "all_gather"] += gathers(config, layout, batch.accumulation) * gathered
        if kept(config, layout) > 1:
            messages["other", "all_gather"] += batch.accumulation * gathered
        messages["shard", "reduce_scatter"] += scatters * padded * summed
    if layout.replicate > 1:
        messages["replicate", "all_reduce"] += padded // layout.shard * summed
    return messages


def recomputed(config: RunConfig) -> tuple[int, int]:
    """Gathers and scatters of activations that are made again. A block's last scatter gives nothing that its backward
    needs, and of blocks that are recomputed together only the last one's can be left out.
    """
    layers, compute = config.model.layers, config.compute
    if compute.recompute == "none":
        return 0, 0
    return 2 * layers, 2 * layers + -layers // compute.segment if compute.recompute == "full" else 0


def cut(config: RunConfig, layout: Layout, batch: Batch, shapes: list[Shape]) -> Counter[tuple[str, str]]:
    tokens, layers = batch.micro * config.data.sequence, config.model.layers
    activation = tokens * config.model.width * BYTES[config.precision.compute]
    embedded = tokens * config.model.width * weight_bytes(config)  # the embedding's sum, and its gradient coming back
    norms = sum(shape.elements() for shape in shapes if shape.cut is None) * weight_bytes(config)
    meetings = (
        batch.accumulation if layout.data_degree > 1 and config.layout.shard in ("gradients", "parameters") else 1
    )
    # Maximum, sum of exponentials and the label's logit, each one number a token, in float32 at least.
    loss = 3 * tokens * weight_bytes(config)
    gathers, scatters = recomputed(config)
    return Counter(
        {
            ("tensor", "all_gather"): batch.accumulation * ((4 * layers + 1 + gathers) * activation + embedded),
            ("tensor", "reduce_scatter"): batch.accumulation * ((4 * layers + 1 + scatters) * activation + embedded),
            ("tensor", "all_reduce"): batch.accumulation * loss + meetings * norms,
        }
    )
