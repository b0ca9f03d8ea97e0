"""Loss on held-out samples, weighed by tokens exactly as training weighs it."""

from __future__ import annotations

import torch

from meshwright.config import Batch
from meshwright.data.loader import MicroBatchDataset
from meshwright.data.source import ConcatenatedSource
from meshwright.data.stream import Stream
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.parallel.world import World
from meshwright.trainer.precision import Precision


class Evaluation:
    """The same held-out samples every time, split over ranks; shares need not be equal, since sums are summed. Every
    rank makes as many passes, though: where the model is spread over ranks, they make each pass together.
    """

    def __init__(self, source: ConcatenatedSource, stream: Stream, samples: int, batch: Batch, coordinate: int) -> None:
        ids = stream.held_out_samples(samples)
        own = ids[coordinate :: batch.replicas]
        self.samples = len(ids)
        self.cuts = [own[start : start + batch.micro] for start in range(0, len(own), batch.micro)]
        self.passes = -(-len(ids[:: batch.replicas]) // batch.micro)  # of the first coordinate, whose share is largest
        self.filler = ids[:1]
        self.decoder = MicroBatchDataset(source, quarantine=True)

    @torch.no_grad()
    def run(
        self, spread: ParallelModel, precision: Precision, world: World, counts_tokens: bool, reports_loss: bool
    ) -> tuple[float, int, str]:
        """(loss, valid tokens, what this rank could not decode) over all ranks' shares. Of the ranks that share samples
        one `speaks` for their number, and of those that come to the same loss one `weighs`.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=world.device)
        bad, model = "", spread.module
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        spread.broadcast_buffers()
        for index in range(self.passes):
            world.heartbeat.beat()
            batch = self.decoder[self.cuts[index] if index < len(self.cuts) else self.filler]
            if batch.bad_samples and index < len(self.cuts):
                bad = bad or str(batch.bad_samples[0])
            with precision.autocast(), spread.micro_step(last=True):
                total = spread.forward_loss(*map(world.to_device, spread.shard_inputs(batch.tensors)))
            if index < len(self.cuts):
                own = [total.double() if reports_loss else torch.zeros((), device=world.device, dtype=torch.float64)]
                sums += torch.stack(
                    [*own, torch.tensor(float(batch.valid_targets) * counts_tokens, device=world.device)]
                )
        spread.reshard()
        for module, mode in modes:  # a user may have frozen some
            module.training = mode
        total_loss, tokens = world.all_reduce(sums, "evaluation sum").wait().tolist()
        return total_loss / max(1.0, tokens), int(tokens), bad
