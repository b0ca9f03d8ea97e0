"""Communication volume and state memory of a user's model under data parallelism: exact; torch-free.

Besides what a built-in model communicates, data-parallel ranks broadcast stateful buffers such as those of BatchNorm,
and sum metrics beside the loss. The volume of the other axes depends on the operators of the model: `simulate` counts
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.config import Batch, ModelConfig, RLConfig, RunConfig
from meshwright.config.dtypes import parameter_bytes
from meshwright.planner.exact.comm_volume import CollectiveVolume, comm_volume
from meshwright.planner.exact.state_memory import StateMemory, state_memory
from meshwright.planner.workload.traced_model import TracedModel
from meshwright.topology.collectives import wire_bytes
from meshwright.topology.layout import Layout
from meshwright.topology.parameter_shards import dense_shard_group, uses_ddp

DATA_PARALLEL = {"replicate", "shard"}


def has_exact_volume(layout: Layout) -> bool:
    return set(layout.active_axes) <= DATA_PARALLEL


def custom_comm_volume(
    model: TracedModel, config: RunConfig, layout: Layout, batch: Batch, rank: int = 0
) -> list[CollectiveVolume]:
    rows = [
        with_measured(row, model, config, layout) if row.axis == "control" else row
        for row in comm_volume(replace(config, model=ModelConfig(), rl=RLConfig()), layout, batch, rank, model.spec)
    ]
    return sorted((*rows, *broadcast_rows(model, layout, batch, rank)))


def with_measured(row: CollectiveVolume, model: TracedModel, config: RunConfig, layout: Layout) -> CollectiveVolume:
    """The sums and counts of metrics travel with the loss, all in float64."""
    if not model.measured:
        return row
    message = row.message_bytes - parameter_bytes(config) + 8 * (1 + 2 * model.measured)
    return replace(row, message_bytes=message, wire_bytes=wire_bytes(row.collective, message, layout.ranks))


def broadcast_rows(model: TracedModel, layout: Layout, batch: Batch, rank: int) -> Iterator[CollectiveVolume]:
    """DDP broadcasts buffers once per step; with FSDP2 they are broadcast in every micro-step, axis by axis."""
    if not model.buffer_bytes:
        return
    group = dense_shard_group(layout, rank)
    message = model.buffer_bytes * (1 if uses_ddp(layout) else batch.accumulation)
    for axis, ranks in ((group.replicate_axis, group.replicas), (group.shard_axis, group.shards)):
        if ranks > 1:
            yield CollectiveVolume(axis, "broadcast", message, wire_bytes("broadcast", message, ranks))


def custom_state_memory(
    model: TracedModel, config: RunConfig, layout: Layout, batch: Batch, rank: int = 0
) -> StateMemory | None:
    """None where it depends on the order in which backward computes gradients: with FSDP2."""
    if not uses_ddp(layout) and layout.ranks > 1:
        return None
    return state_memory(replace(config, model=ModelConfig()), layout, batch, rank, model.spec)
