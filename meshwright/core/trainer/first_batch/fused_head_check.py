"""Before the first step: the fused loss of a custom model is that of its logits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.core.data.loader import MicroBatch
from meshwright.core.parallel.parallel_model import Autocast, ParallelModel, unchanged_module
from meshwright.core.parallel.world import World
from meshwright.core.trainer.first_batch.fused_head import FusedHead
from meshwright.core.trainer.objective import find_objective


@torch.no_grad()
def verify_fused_head(
    parallel_model: ParallelModel, world: World, first: Callable[[], MicroBatch], autocast: Autocast
) -> FusedHead | None:
    """Runs a custom model on the first sample with its fused loss, which steps use if every rank finds it right."""
    objective = find_objective(parallel_model.module)
    head = objective.fused_head if objective is not None else None
    if head is None:
        return None
    batch = first()
    if all(row[0] for row in world.all_gather_ints(bool(batch.tensors), name="fused loss: samples")):
        inputs = parallel_model.shard_inputs(tuple(tensor[:1] for tensor in batch.tensors))
        head.verifying = True
        with torch.compiler.set_stance("force_eager"), unchanged_module(parallel_model.module), autocast():
            parallel_model.forward_loss(*map(world.to_device, inputs))
        head.verifying = False
        parallel_model.reshard()
    wrong = world.all_gather_ints(bool(head.problem), name="fused loss: result")
    head.enabled = not any(row[0] for row in wrong)
    return head
