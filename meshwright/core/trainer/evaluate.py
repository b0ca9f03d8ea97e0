"""The loss on given samples, averaged over tokens exactly as in training."""

from __future__ import annotations

import torch

from meshwright.base.config import Batch
from meshwright.core.data.batch_structure import BatchStructure
from meshwright.core.data.loader import MicroBatchDataset
from meshwright.core.data.permutation import Positions
from meshwright.core.data.source import Collate, ConcatenatedSource
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.parallel.world import World
from meshwright.core.trainer.objective import find_objective
from meshwright.core.trainer.precision import Precision


class Evaluation:
    """Evaluates the same samples every time, split over the data-parallel ranks. The shares may differ, since
    losses and counts are summed, but every rank runs the same number of passes, because a pass may be collective.
    """

    def __init__(
        self,
        source: ConcatenatedSource,
        ids: Positions,
        batch: Batch,
        coordinate: int,
        structure: BatchStructure | None = None,
        collate: Collate | None = None,
    ) -> None:
        local_ids = ids[coordinate :: batch.replicas]
        self.samples = len(ids)
        self.micro_batches = [local_ids[i : i + batch.micro] for i in range(0, len(local_ids), batch.micro)]
        self.passes = -(
            -len(ids[:: batch.replicas]) // batch.micro
        )  # as many as the first coordinate needs, whose share is largest
        self.padding = ids[:1]
        self.dataset = MicroBatchDataset(source, True, structure, collate)

    @torch.no_grad()
    def run(
        self, parallel_model: ParallelModel, precision: Precision, world: World, counts_tokens: bool, reports_loss: bool
    ) -> tuple[float, int, str, dict[str, float]]:
        """Returns the loss and the number of valid tokens over all ranks, the first sample that this rank could not
        decode, and the metrics. For `counts_tokens` and `reports_loss` see `StepContext`.
        """
        objective = find_objective(parallel_model.module)
        length = objective.measured_length if objective is not None else 0
        sums = torch.zeros(2 + length, dtype=torch.float64, device=world.device)
        bad, module = "", parallel_model.module
        modes = [(child, child.training) for child in module.modules()]
        module.eval()
        parallel_model.broadcast_buffers()
        for index in range(self.passes):
            world.heartbeat.beat()
            batch = self.dataset[self.micro_batches[index] if index < len(self.micro_batches) else self.padding]
            if batch.bad_samples and index < len(self.micro_batches):
                bad = bad or str(batch.bad_samples[0])
            with precision.autocast(), parallel_model.micro_step(last=True):
                total = parallel_model.forward_loss(*map(world.to_device, parallel_model.shard_inputs(batch.tensors)))
            measured = objective.pop_measured(world.device) if objective is not None else sums[2:]
            if index < len(self.micro_batches):
                loss = total.double() if reports_loss else torch.zeros((), device=world.device, dtype=torch.float64)
                tokens = torch.tensor(float(batch.valid_targets) * counts_tokens, device=world.device)
                sums[:2] += torch.stack([loss, tokens])
                if reports_loss and length:
                    sums[2:] += measured
        parallel_model.reshard()
        for child, mode in modes:  # a user may have put some modules into eval mode
            child.training = mode
        loss_sum, token_count, *measured_sums = world.all_reduce(sums, "evaluation sum").wait().tolist()
        metrics = (
            objective.measured_values(measured_sums, int(token_count), "evaluation") if objective is not None else {}
        )
        return loss_sum / max(1.0, token_count), int(token_count), bad, metrics
