"""Trains a vision transformer of transformers through a pipeline of two stages.

python examples/vision_transformer.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from meshwright import RunConfig, train
from meshwright.base.config import BatchConfig, EvalConfig, LayoutConfig


def build() -> nn.Module:
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=4,
            num_channels=1,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_labels=2,
        )
    )


class Stripes:
    """Noisy images of horizontal (0) or vertical (1) stripes. A sample depends only on its index."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, object]:
        noise = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(index))
        stripes = (torch.arange(16) // 2 % 2).float().expand(1, 16, 16)
        return {"pixel_values": noise + (stripes if index % 2 else stripes.mT), "labels": index % 2}


def loss(outputs: object, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.logits, batch["labels"], reduction="sum")  # type: ignore[attr-defined]


CONFIG = RunConfig(
    steps=40,
    batch=BatchConfig(global_=16, micro=4),
    layout=LayoutConfig(replicate=1, pipeline=2),
    eval=EvalConfig(holdout=0.1, every=20, samples=96),
)

if __name__ == "__main__":
    result = train(CONFIG, model=build(), loss=loss, source=Stripes(), run="runs/vision")
    print(f"loss {result.loss:.3f} after {result.steps} steps")
