"""Trains a Llama of transformers on four processes: ZeRO-3 over two ranks, tensor parallelism over two.

python examples/transformers_llama.py
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright import RunConfig, train
from meshwright.base.config import BatchConfig, EvalConfig, LayoutConfig


def build() -> nn.Module:
    """The blocks and the tensor-parallel plan are those that transformers declares for the model."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


class Counting:
    """Token sequences that count upwards from their index. The model shifts the labels itself."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (index + torch.arange(16)) % 64
        return {"input_ids": tokens, "labels": tokens}


CONFIG = RunConfig(
    steps=40,
    batch=BatchConfig(global_=16, micro=4),
    layout=LayoutConfig(replicate=2, shard="parameters", tensor=2),
    eval=EvalConfig(holdout=0.1, every=20, samples=96),
)

if __name__ == "__main__":
    result = train(CONFIG, model=build(), source=Counting(), run="runs/llama")
    print(f"loss {result.loss:.3f} after {result.steps} steps")
