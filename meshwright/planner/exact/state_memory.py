"""What one rank holds of parameters, gradients and optimizer state at their peaks, in bytes; exact on CPU.

S is a rank's shards (rows filled up), U one unit once it is gathered, u the same without the filling, P all of them.

| | parameter | gradient | optimizer |
|---|---|---|---|
| none (DDP) | P | P | 2 P |
| optimizer | S + all U | P | 2 S |
| gradients | S + all U | S + the largest u | 2 S |
| parameters | S + the largest U | S + the largest u | 2 S |
| parameters, of a stage | S + all U that its order of passes holds | P | 2 S |

A block's bank of experts that are divided is a unit of its own, held together with the block. A pipeline's schedule
adds up whole gradients; the last stage's copy of a tied weight has a gradient and no optimizer state. On a device FSDP2
gathers units ahead: `fsdp.prefetch` more of them are held at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config import Batch, RunConfig
from meshwright.planner.exact.activation_messages import weight_bytes
from meshwright.planner.exact.comm_volume import gathered_bytes, kept, walked
from meshwright.planner.exact.unshard_timeline import last_of, nests_of, order_of
from meshwright.topology.layout import Layout
from meshwright.topology.parameter_shards import Units, dense_shard_group, group_by_unit, parameter_shards, uses_fsdp


@dataclass(frozen=True)
class StateMemory:
    """Peak bytes of each class by itself, of one rank."""

    parameter: int
    gradient: int
    optimizer: int


def state_memory(config: RunConfig, layout: Layout, batch: Batch, rank: int = 0) -> StateMemory:
    pieces, size = parameter_shards(config, layout, rank), weight_bytes(config)
    owned = [piece.shard_numel if uses_fsdp(layout) else piece.numel for piece in pieces if not piece.is_tied_copy]
    optimizer = (3 if config.optimizer.cpu_offload else 2) * sum(owned) * size + 4 * len(
        owned
    )  # and AdamW's count of steps
    if not uses_fsdp(layout):
        whole = sum(piece.numel for piece in pieces) * size
        return StateMemory(whole, whole, optimizer)
    units = group_by_unit(pieces)
    shards = sum(piece.padded_shard_numel for piece in pieces) * size
    if layout.pipeline > 1:
        gathered = walked(config, layout, batch, units, rank).peak
        return StateMemory(shards + gathered, stage_gradients(config, layout, batch, units, rank), optimizer)
    return StateMemory(shards + gathered_units(config, layout, units), gradients(config, batch, units), optimizer)


def gathered_units(config: RunConfig, layout: Layout, units: Units) -> int:
    sizes = gathered_bytes(config, units)
    keep = kept(config, dense_shard_group(layout, 0))
    if config.layout.shard in ("optimizer", "gradients") or keep == 1:
        return sum(sizes.values())
    whole = sizes.pop("whole", 0)  # in use from the first to the last
    if keep:
        return whole + kept_units(config, units, sizes)
    together = config.activation_checkpoint.segment if config.activation_checkpoint.mode == "full" else 1
    nests = {nest[0]: sum(sizes[unit] for unit in nest) for nest in nests_of(sizes)}
    blocks = [size for unit, size in nests.items() if unit.startswith("decoder.blocks.")]
    return whole + max(sum(blocks[:together]), *nests.values())  # blocks that are recomputed together are held together


def kept_units(config: RunConfig, units: Units, sizes: dict[str, int]) -> int:
    """Backward gathers a unit while its own part, and those of all units before it, are still held."""
    keep = {unit: kept(config, units[unit][0].shard_group) for unit in sizes}
    part = {unit: size // keep[unit] if keep[unit] else 0 for unit, size in sizes.items()}
    held, peak = sum(part.values()), 0
    for nest in reversed(nests_of(sizes)):
        for unit in nest:
            peak = max(peak, held := held + sizes[unit])
            held -= part[unit]
        held -= sum(sizes[unit] for unit in nest)
    return peak


class Gradients:
    """Bytes of units' gradients, whole and as shards, and the most of all at once."""

    def __init__(self, config: RunConfig, units: Units) -> None:
        self.units, size = units, weight_bytes(config)
        self.plain = {unit: sum(piece.numel for piece in members) * size for unit, members in units.items()}
        self.shard = {
            unit: sum(piece.padded_shard_numel for piece in members) * size for unit, members in units.items()
        }
        # While a unit is scattered FSDP2 still holds the gradient of its last parameter.
        self.last = {
            unit: members[-1].numel * size if members[-1].shard_group.shards > 1 else 0
            for unit, members in units.items()
        }
        self.whole, self.scattered = dict.fromkeys(units, 0), dict.fromkeys(units, 0)
        self.peak = 0

    def mark(self) -> None:
        self.peak = max(self.peak, sum(self.whole.values()) + sum(self.scattered.values()))

    def comes(self, unit: str) -> None:
        self.whole[unit] = self.plain[unit]
        self.mark()

    def meets(self, unit: str) -> None:
        self.whole[unit] = self.last[unit]
        self.scattered[unit] = self.shard[unit]
        self.mark()
        self.whole[unit] = 0


def gradients(config: RunConfig, batch: Batch, units: Units) -> int:
    """The last micro-step, unit by unit from the last to the first: a unit's gradient comes whole and leaves as shards.
    What earlier micro-steps left is whole where gradients meet once a step, and shards where they meet each time.
    """
    each_time = config.layout.shard in ("gradients", "parameters")
    state = Gradients(config, units)
    if batch.accumulation > 1:
        if each_time:
            state.scattered = dict(state.shard)
        else:
            state.whole = dict(state.plain)
    if "whole" in units:  # the final norm's gradient waits there from the beginning; a tied one is only then summed
        norm = sum(piece.numel for piece in units["whole"][1:]) * weight_bytes(config)
        state.whole["whole"] = max(state.whole["whole"], norm)
    state.mark()
    for nest in reversed(nests_of(unit for unit in units if unit != "whole")):
        if len(nest) > 1:  # what every token visits is computed last in the block, and its gradients come first
            shared = sum(p.numel for p in units[nest[0]] if ".shared." in p.name) * weight_bytes(config)
            state.whole[nest[0]] = max(state.whole[nest[0]], shared)
        for unit in reversed(nest):
            state.comes(unit)
            state.meets(unit)
    if "whole" in units:
        state.comes("whole")
        state.meets("whole")
    return state.peak


def stage_gradients(config: RunConfig, layout: Layout, batch: Batch, units: Units, rank: int) -> int:
    """Every stage's gradients come with its first backward pass and meet after its last."""
    order, state = order_of(config, layout, batch, rank), Gradients(config, units)
    last = last_of(order)
    for place, action in enumerate(order):
        mine = [unit for unit, members in units.items() if members[0].stage == action.stage]
        if action.op in ("B", "W"):
            for unit in mine:
                state.comes(unit)
        if last[action.stage] == place:
            for unit in sorted(mine, key=lambda unit: not unit.startswith("decoder.blocks.")):  # blocks come first
                state.meets(unit)
    return state.peak
