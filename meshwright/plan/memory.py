"""What one rank holds of parameters, gradients and optimizer state at their peaks, in bytes; exact on CPU.

S is a rank's shards (rows filled up), U one unit once it is gathered, u the same without the filling, P all of them.

| | parameter | gradient | optimizer |
|---|---|---|---|
| none (DDP) | P | P | 2 P |
| optimizer | S + all U | P | 2 S |
| gradients | S + all U | S + the largest u | 2 S |
| parameters | S + the largest U | S + the largest u | 2 S |

On a device FSDP2 gathers units ahead: `shard.prefetch` more of them are held at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from meshwright.config import Batch, RunConfig
from meshwright.layout import Layout
from meshwright.plan.shapes import Shape, decoder_shapes, units_of
from meshwright.plan.traffic import gathered_bytes, kept, weight_bytes


@dataclass(frozen=True)
class Held:
    """Peak bytes of each class by itself, of one rank."""

    parameter: int
    gradient: int
    optimizer: int


def held(config: RunConfig, layout: Layout, batch: Batch, rank: int = 0) -> Held:
    shapes, size = decoder_shapes(config.model), weight_bytes(config)
    own = sum(shape.own(layout.tensor, layout.shard, layout.coordinates(rank)["shard"]) for shape in shapes)
    optimizer = (3 if config.compute.offload else 2) * own * size + 4 * len(shapes)  # and AdamW's count of steps
    if layout.data_degree == 1 or layout.used == ("replicate",):
        whole = sum(shape.elements(layout.tensor) for shape in shapes) * size
        return Held(whole, whole, optimizer)
    units = units_of(shapes)
    shards = sum(shape.padded(layout.tensor, layout.shard) for shape in shapes) // layout.shard * size
    gathered = gathered_units(config, layout, units)
    return Held(shards + gathered, gradients(config, layout, batch, units), optimizer)


def gathered_units(config: RunConfig, layout: Layout, units: dict[str, list[Shape]]) -> int:
    sizes = gathered_bytes(config, layout, units)
    keep = kept(config, layout)
    if config.layout.shard in ("optimizer", "gradients") or keep == 1:
        return sum(sizes.values())
    whole = sizes.pop("whole", 0)  # in use from the first to the last
    if keep:  # backward gathers a unit while its own part, and those of all units before it, are still held
        before = accumulate(sizes.values())
        return whole + max(held // keep + size for held, size in zip(before, sizes.values(), strict=True))
    together = config.compute.segment if config.compute.recompute == "full" else 1
    blocks = [size for unit, size in sizes.items() if unit.startswith("decoder.blocks.")]
    return whole + max(sum(blocks[:together]), *sizes.values())  # blocks that are recomputed together are held together


def gradients(config: RunConfig, layout: Layout, batch: Batch, units: dict[str, list[Shape]]) -> int:
    """The last micro-step, unit by unit from the last to the first: a unit's gradient comes whole and leaves as shards.
    What earlier micro-steps left is whole where gradients meet once a step, and shards where they meet each time.
    """
    size = weight_bytes(config)
    each_time = config.layout.shard in ("gradients", "parameters")
    plain = {unit: sum(s.elements(layout.tensor) for s in members) * size for unit, members in units.items()}
    shards = {
        unit: sum(s.padded(layout.tensor, layout.shard) for s in members) // layout.shard * size
        for unit, members in units.items()
    }
    before = batch.accumulation > 1
    whole = dict(plain) if before and not each_time else dict.fromkeys(units, 0)
    scattered = dict(shards) if before and each_time else dict.fromkeys(units, 0)
    if "whole" in units:  # the final norm's gradient waits there from the beginning; a tied one is only then summed
        norm = sum(s.elements(layout.tensor) for s in units["whole"][1:]) * size
        whole["whole"] = max(whole["whole"], norm)
    peak = sum(whole.values()) + sum(scattered.values())
    for unit in sorted(units, key=lambda unit: (unit == "whole", -list(units).index(unit))):
        whole[unit] = plain[unit]
        peak = max(peak, sum(whole.values()) + sum(scattered.values()))
        # While a unit is scattered FSDP2 still holds the gradient of its last parameter.
        whole[unit] = units[unit][-1].elements(layout.tensor) * size if layout.shard > 1 else 0
        scattered[unit] = shards[unit]
        peak = max(peak, sum(whole.values()) + sum(scattered.values()))
        whole[unit] = 0
    return peak
