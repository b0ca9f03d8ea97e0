"""The profile of Meshwright's own trainer, from the settings of a run that change its memory and its speed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.base.config import RunConfig
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import uses_ddp, uses_fsdp
from meshwright.planner.workload.optimizer_bytes import TrainedShares
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.planner.workload.trainer_profiles import FUSED_LOSS, MESHWRIGHT, MESHWRIGHT_COMPILED

BF16_RESIDUAL_TRAFFIC, FP32_RESIDUAL_TRAFFIC = 8, 19
"""`residual_traffic_bytes` of compiled blocks with bf16 weights, by the dtype of the residual stream. One in
float32 took 4.4 ms more per step of a Llama of 1.2B parameters on one H200, in turns with bf16 (docs/speed.md)."""

FROZEN_RECAST_TRAFFIC = 2
"""`recast_traffic_bytes` of frozen weights beside bf16 ones: they are float32, and forward alone casts them. Forward
and backward together count the field three times."""


def own_trainer(config: RunConfig, layout: Layout, micro_steps: int, trained: TrainedShares) -> TrainerProfile:
    """Returns the profile of a run whose settings have their values for the device (`with_device_defaults`), and which
    trains this part of its model.
    """
    fields: dict[str, Any] = {}
    if config.precision.weights == "bf16":
        # Gradients have the dtype of the weights unless they are summed over micro-batches, or over ranks by FSDP2.
        gradient_bytes = 4 if uses_fsdp(layout) or micro_steps > 1 else 2
        recast = 0.0 if uses_fsdp(layout) else FROZEN_RECAST_TRAFFIC * (1 - trained.block)
        fields |= {"parameter_bytes": 2, "master_bytes": 4, "gradient_bytes": gradient_bytes}
        fields |= {"recast_traffic_bytes": recast}
    if config.precision.residual == "bf16":
        fields |= {"residual_bytes": 0, "stage_output_bytes": 2}
        if config.compile.enabled:
            fields |= {"residual_traffic_bytes": BF16_RESIDUAL_TRAFFIC}
    elif config.precision.weights == "bf16" and config.compile.enabled:
        fields |= {"residual_traffic_bytes": FP32_RESIDUAL_TRAFFIC}
    if config.optimizer.cpu_offload:
        fields |= {"offloads_optimizer": True}
    if config.precision.float8:
        fields |= {"saves_quantized_inputs": True}
    if config.ddp.comm_hook == "bf16_compress" and uses_ddp(layout):
        fields |= {"compresses_gradients": True}
    if config.kernels.loss == "fused" and not config.rl.enabled:
        fields |= FUSED_LOSS
    return replace(MESHWRIGHT_COMPILED if config.compile.enabled else MESHWRIGHT, **fields)
