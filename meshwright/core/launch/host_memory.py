"""Refuses a run on CPU whose model state cannot fit into the memory of the host, before ranks start."""

from __future__ import annotations

import os

from meshwright.base.config import RunConfig
from meshwright.base.dtypes import parameter_bytes, rounds_weights, weight_bytes
from meshwright.base.io import format_bytes
from meshwright.base.models.registry import run_spec
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.optimizer_state import rank_state_bytes
from meshwright.base.topology.parameter_shards import parameter_shards, uses_fsdp
from meshwright.core.parallel.world import device_type
from meshwright.errors import ConfigError


def require_host_memory(config: RunConfig, layout: Layout) -> None:
    """Raises a ConfigError if the parameters and optimizer state of this host's ranks exceed its physical memory."""
    if device_type(config.launch) != "cpu":
        return
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", layout.ranks // config.launch.hosts))
    first_rank = int(os.environ.get("GROUP_RANK", 0)) * local_ranks
    needed = sum(
        state_bytes(config, layout, rank % layout.ranks) for rank in range(first_rank, first_rank + local_ranks)
    )
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        ranks = f"{local_ranks} ranks" if local_ranks > 1 else "1 rank"
        raise ConfigError(
            f"parameters and optimizer state of {ranks} need at least {format_bytes(needed)} on this host, which has "
            f"{format_bytes(available)} of memory",
            "try a smaller model (model.experts, model.layers, model.width), layout.shard = parameters, or more hosts",
        )


def state_bytes(config: RunConfig, layout: Layout, rank: int) -> int:
    """Bytes of one rank's parameters and optimizer state: a lower bound, without gradients and activations."""
    sharded = uses_fsdp(layout)
    parameters = parameter_shards(run_spec(config), config, layout, rank)
    elements = sum(p.shard_numel if sharded else p.numel for p in parameters)
    size, masters = parameter_bytes(config), rounds_weights(config)
    return elements * weight_bytes(config) + rank_state_bytes(config.optimizer, parameters, sharded, size, masters)
