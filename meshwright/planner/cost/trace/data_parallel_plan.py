"""Derives how a job gathers parameters and reduces gradients, and the bytes per element of each, from its settings."""

from __future__ import annotations

from meshwright.base.config import Batch, RunConfig
from meshwright.base.dtypes import COMPUTE_BYTES, parameter_bytes, rounds_weights, weight_bytes
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import dense_shard_group, uses_ddp, uses_fsdp
from meshwright.planner.cost.trace.data_parallel import DataParallelPlan, GradientBytes
from meshwright.planner.cost.trace.schedule_passes import Resharding
from meshwright.planner.cost.units.data_sharding import data_sharding
from meshwright.planner.cost.units.rank_units import ranks_after_forward
from meshwright.planner.workload.planned_job import PlannedJob


def data_parallel_plan(job: PlannedJob) -> DataParallelPlan:
    sharding, trainer, pipelined = data_sharding(job), job.trainer, job.layout.pipeline > 1
    unshards = trainer.torch_native and sharding.fsdp
    config = job.run_config
    by_unit = job.sharding == "parameters" and not (trainer.keeps_stages_unsharded and pipelined)
    return DataParallelPlan(
        unshards,
        "buffers"
        if sharding.ddp or not (trainer.torch_native or (pipelined and job.sharding == "gradients"))
        else ("units" if sharding.fsdp and not pipelined else "local"),
        job.sharding in ("gradients", "parameters"),
        pipelined,
        overlaps=by_unit or not trainer.unoverlapped_data_comm,
        all_reduces=trainer.all_reduces_gradients and not by_unit,
        ranks_after_forward=ranks_after_forward(config, dense_shard_group(job.layout, 0)) if config else 0,
        one_adapter=trainer.single_adapter_gathers and by_unit,
    )


def resharding(job: PlannedJob, plan: DataParallelPlan) -> Resharding:
    """When the parameters of a job are resharded; see `schedule_passes`."""
    if not plan.unshards and (job.sharding == "none" or job.trainer.torch_native):
        return "local"
    if job.sharding == "none" and not plan.pipelined:
        return "reshards"
    if job.sharding != "parameters" and not plan.unshards:
        return "once"
    if job.sharding != "parameters" or (job.trainer.keeps_stages_unsharded and plan.pipelined):
        return "stays"
    if job.run_config is not None and job.run_config.fsdp.ranks_after_forward == 1:
        return "stays" if plan.pipelined else "micro_step"
    return "reshards"


def gradient_sizes(job: PlannedJob, compute_bytes: float) -> GradientBytes:
    config, trainer = job.run_config, job.trainer
    if config is not None:
        layout, batch, full = job.layout, job.batch, parameter_bytes(config)
        own = full if uses_fsdp(layout) else gradient_element_bytes(config, layout, batch)
        compressed = uses_ddp(layout) and config.ddp.comm_hook == "bf16_compress"
        computed = COMPUTE_BYTES[config.precision.compute]
        return GradientBytes(own, computed, 2 if compressed else full, partial_gradient_bytes(config, layout, batch))
    kept = trainer.gradient_bytes * (2 if job.precision == "fp64" else 1)
    if uses_ddp(job.layout) and trainer.master_bytes and job.batch.accumulation > 1:
        kept += trainer.parameter_bytes
    reduced = reduce_bytes(job)
    not_accumulated = job.batch.accumulation == 1 or job.sharding in ("gradients", "parameters")
    by_unit = trainer.torch_native and data_sharding(job).fsdp and job.layout.pipeline == 1
    return GradientBytes(kept, compute_bytes, reduced, compute_bytes if by_unit and not_accumulated else reduced)


def reduce_bytes(job: PlannedJob) -> float:
    """Bytes per element of a gradient reduction."""
    trainer = job.trainer
    if trainer.compresses_gradients:
        return 2.0
    in_float32 = trainer.reduces_bf16_in_float32 and job.precision == "bf16" and job.sharding != "parameters"
    return 4.0 if in_float32 else trainer.reduce_bytes


def gradient_element_bytes(config: RunConfig, layout: Layout, batch: Batch) -> int:
    """Bytes per element of the gradients of a rank without FSDP2. DDP accumulates the gradients of rounded weights
    beside its buckets.
    """
    beside = weight_bytes(config) if rounds_weights(config) and uses_ddp(layout) and batch.accumulation > 1 else 0
    return gradient_bytes(config, layout, batch) + beside


def gradient_bytes(config: RunConfig, layout: Layout, batch: Batch) -> int:
    """Bytes per element of a gradient before the update: float32 if it was reduced by FSDP2 or accumulated, otherwise
    that of the weights.
    """
    is_float32 = not rounds_weights(config) or uses_fsdp(layout) or batch.accumulation > 1
    return parameter_bytes(config) if is_float32 else weight_bytes(config)


def partial_gradient_bytes(config: RunConfig, layout: Layout, batch: Batch) -> int:
    """Bytes per element of a gradient that is reduced over the tensor axis: FSDP2 keeps it in the compute dtype until
    it accumulates it into the gradient of an earlier micro-step.
    """
    not_accumulated = batch.accumulation == 1 or config.layout.shard in ("gradients", "parameters")
    in_compute_dtype = uses_fsdp(layout) and layout.pipeline == 1 and not_accumulated
    return COMPUTE_BYTES[config.precision.compute] if in_compute_dtype else parameter_bytes(config)
