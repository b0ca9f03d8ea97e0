"""Time of the optimizer update: elementwise on the device or on the host, and the products of whole matrices."""

from __future__ import annotations

from collections import Counter

from meshwright.base.hardware.links import collective_seconds, group_placement
from meshwright.base.models.registry import run_spec
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology.optimizer_state import OUTSIDE_BLOCKS, rule_declaration, update_rule
from meshwright.planner.cost.terms.kernel_time import kernel_rate, matmul_time
from meshwright.planner.cost.terms.offload_time import offload_seconds
from meshwright.planner.workload.planned_job import PlannedJob


def optimizer_time(job: PlannedJob, parameters: float) -> float:
    """Seconds of the update of this many local parameters. It reads gradient, parameter and optimizer state, and writes
    parameter and state. Before it, the gradient norm reads gradients, and clipping reads and writes them.
    """
    rate = kernel_rate(job.cluster.device, "bf16", job.trainer)
    trainer = job.trainer
    moved_bytes = 2 * (job.optimizer_bytes + trainer.parameter_bytes) + 4 * trainer.gradient_bytes
    if trainer.master_bytes:  # one kernel clips, updates the master weights and writes the weights
        moved_bytes = 2 * job.optimizer_bytes + trainer.parameter_bytes + 2 * trainer.gradient_bytes
    elementwise = moved_bytes * parameters / rate.bandwidth
    if trainer.offloads_optimizer:
        host_link = job.cluster.device.host_bandwidth
        elementwise = offload_seconds(parameters, trainer.gradient_bytes, trainer.parameter_bytes, host_link)
    return elementwise + matrix_time(job)


def matrix_time(job: PlannedJob) -> float:
    """Seconds of a rule that needs whole matrices beyond an elementwise update: a rank's share of its products in
    float32, and the exchange of its shards with the owners of the matrices.
    """
    config, layout = job.run_config, job.layout
    if config is None or not (declared := rule_declaration(config.optimizer.kind)).whole_matrices:
        return 0.0
    rate = kernel_rate(job.cluster.device, "fp32", job.trainer)
    spec = job.model.spec if isinstance(job.model, TracedModel) else run_spec(config)
    seconds, elements = 0.0, 0
    for parameter in spec.parameters:
        in_block = parameter.unit not in OUTSIDE_BLOCKS
        rule = update_rule(config.optimizer, parameter.name, parameter.shape, in_block)
        if rule == config.optimizer.kind and parameter.trainable:
            short, long = sorted(parameter.shape[-2:])
            products = Counter(declared.matmuls(config.optimizer, short, long))
            matrices = parameter.local_numel() // (short * long)
            seconds += matrices * sum(times * matmul_time(rate, *product) for product, times in products.items())
            elements += parameter.local_numel()
    ranks = layout.ranks // layout.pipeline
    seconds /= layout.ranks
    shards = layout.tensor * (layout.shard * layout.context if job.sharding != "none" else 1)
    exchanged = 4.0 * elements / layout.pipeline * (1 / shards + (1 / ranks if shards > 1 else 0.0))
    placement = group_placement(job.cluster.devices_per_node, ranks, 1)
    return seconds + (collective_seconds(job.cluster, "all_to_all", exchanged, placement) if ranks > 1 else 0.0)
