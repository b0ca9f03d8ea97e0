"""Bytes of the optimizer state of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.base.dtypes import parameter_bytes, rounds_weights
from meshwright.base.topology.optimizer_state import rank_state_bytes
from meshwright.base.topology.parameter_shards import parameter_shards, uses_fsdp

if TYPE_CHECKING:
    from meshwright.planner.cost.trace.cost_trace import CostTrace


def optimizer_state_bytes(trace: CostTrace) -> float:
    """Exact for a Meshwright run; 0 if the state is in host memory, and the device is not the host."""
    job, config, spec = trace.job, trace.config, trace.spec
    if job.trainer.offloads_optimizer and not trace.settings.on_cpu:
        return 0
    if config is not None and spec is not None:
        shards = parameter_shards(spec, config, job.layout, trace.rank)
        masters = rounds_weights(config)
        return rank_state_bytes(config.optimizer, shards, uses_fsdp(job.layout), parameter_bytes(config), masters)
    sharded = job.sharding != "none" or job.trainer.torch_native
    elements = trace.updated if sharded else trace.numel
    per_element = job.optimizer_bytes + (job.trainer.parameter_bytes if job.trainer.offloads_optimizer else 0)
    return elements * per_element * (2 if job.precision == "fp64" else 1)
