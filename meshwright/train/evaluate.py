"""Loss on held-out samples, weighed by tokens exactly as training weighs it."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.config import Batch, DataConfig
from meshwright.data.loader import Decoder
from meshwright.data.source import Concatenated
from meshwright.data.stream import Stream
from meshwright.parallel.world import World
from meshwright.train.precision import Precision


class Evaluation:
    """The same held-out samples every time, split over ranks; shares need not be equal, since sums are summed."""

    def __init__(
        self, source: Concatenated, stream: Stream, samples: int, batch: Batch, coordinate: int, config: DataConfig
    ) -> None:
        ids = stream.evaluation(samples)
        own = ids[coordinate :: batch.replicas]
        self.samples = len(ids)
        self.cuts = [own[start : start + batch.micro] for start in range(0, len(own), batch.micro)]
        self.decoder = Decoder(source, quarantine=config.on_bad_sample == "quarantine")

    @torch.no_grad()
    def run(self, model: nn.Module, precision: Precision, world: World) -> tuple[float, int, str]:
        """(loss, valid tokens, what this rank could not decode) over all ranks' shares."""
        sums = torch.zeros(2, dtype=torch.float64, device=world.device)
        bad = ""
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        for ids in self.cuts:
            world.page.beat()
            batch = self.decoder[ids]
            if not batch.tensors:
                bad = bad or str(batch.bad[0])
                continue
            with precision.autocast():
                total, _ = model(*map(world.to_device, batch.tensors))
            sums += torch.stack([total.double(), torch.tensor(float(batch.valid), device=world.device)])
        for module, mode in modes:  # a user may have frozen some
            module.training = mode
        total_loss, tokens = world.sum(sums, "evaluation sum").wait().tolist()
        return total_loss / max(1.0, tokens), int(tokens), bad
