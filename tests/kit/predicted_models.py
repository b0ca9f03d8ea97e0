"""Small random models of transformers and a CNN, each with its loss and data, and the counters of their real steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.base.config import BatchConfig, EvalConfig, LaunchConfig, LayoutConfig, RunConfig
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.topology.unsupported import validate
from meshwright.core.data.loader import Loader
from meshwright.core.data.sample_lookup import build_stream
from meshwright.core.data.source import ConcatenatedSource, IndexableSource
from meshwright.core.optim.build import build_optimizer
from meshwright.core.parallel.infer_spec import infer_parallel_spec
from meshwright.core.trainer.build import build_parallel_model
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.job import Job
from meshwright.core.trainer.precision import Precision
from meshwright.core.trainer.records.step_counters import count_step
from meshwright.core.trainer.step import Step, StepContext
from tests.kit.gloo_threads import release_messages_at_once

SEQUENCE, VOCAB, CLASSES = 32, 512, 10
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


class Tokens:
    """Sequences of tokens with the next token, or a class, as the target."""

    def __init__(self, classify: bool = False) -> None:
        self.classify = classify

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        tokens = (np.arange(SEQUENCE) * (index + 1)) % VOCAB
        return tokens, np.int64(index % CLASSES) if self.classify else np.roll(tokens, -1)


class Images:
    """Images with their class."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return np.full((3, 32, 32), index / 64, np.float32), np.int64(index % CLASSES)


def summed_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


class ConvBlock(nn.Module):
    """Two convolutions with BatchNorm around a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.layers(x))


class ConvNet(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(16) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def build_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False))


def build_qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, use_cache=False))


def build_mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=16, use_cache=False))


def build_gemma2() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16, use_cache=False))


def build_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=4, n_head=4, n_positions=64, use_cache=False)
    )


def build_mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, use_cache=False))


def build_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=CLASSES))


def build_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: size for name, size in SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=4, num_labels=CLASSES))


@dataclass(frozen=True)
class Model:
    """A model that is predicted."""

    build: Any
    source: Any


MODELS = {
    "Llama": Model(build_llama, Tokens()),
    "Qwen3": Model(build_qwen3, Tokens()),
    "Mistral": Model(build_mistral, Tokens()),
    "Gemma 2": Model(build_gemma2, Tokens()),
    "GPT-2": Model(build_gpt2, Tokens()),
    "Mixtral": Model(build_mixtral, Tokens()),
    "BERT": Model(build_bert, Tokens(classify=True)),
    "ViT": Model(build_vit, Images()),
    "CNN": Model(ConvNet, Images()),
}


def custom_model(name: str) -> CustomModel:
    torch.manual_seed(0)
    module = MODELS[name].build()
    return CustomModel(module, summed_loss, infer_parallel_spec(module))


def sources(name: str) -> list[Any]:
    return [IndexableSource(MODELS[name].source)]


def config_for(ranks: int = 2, micro: int = 4, accumulation: int = 1, **layout: Any) -> RunConfig:
    layout_config = LayoutConfig(**({"replicate": ranks} | layout))
    others = layout_config.tensor * layout_config.pipeline * layout_config.context
    config = RunConfig(
        steps=4,
        batch=BatchConfig(global_=micro * accumulation * ranks // others, micro=micro),
        eval=EvalConfig(holdout=0.0),
        layout=layout_config,
        launch=LaunchConfig(device="cpu"),
    )
    return with_device_defaults(config, "cpu")


def count_real_step(world: Any, config: RunConfig, name: str) -> Any:
    """The counters of the third step of a real run."""
    release_messages_at_once()
    layout, batch = validate(config, own_model=True)
    data = sources(name)
    job = Job(config, batch, layout, data, folder=None, custom=custom_model(name))  # type: ignore[arg-type]
    precision = Precision(config.precision, world.device)
    model = build_parallel_model(job.config, job.layout, job.custom, precision, world)
    optimizer = build_optimizer(model.parameters(), config.optimizer, layout, world, model.block_patterns)
    step = Step(StepContext.for_rank(config, layout, world, model, optimizer, precision))
    stream = build_stream(config, data)
    loader = Loader(
        ConcatenatedSource(data), stream, batch, layout.data_coordinate(world.rank), replace(config.data, workers=0)
    )
    step.warmup_backward(loader.first)
    batches = loader.steps(0, 3)
    for number in range(2):
        step.run(number, 0.01, batches)
    with count_step(model, optimizer) as counters:
        step.run(2, 0.01, batches, counters.enter)
    return counters.rows(), counters.memory.peak, counters.memory.at_peak, counters.memory.peak_total
