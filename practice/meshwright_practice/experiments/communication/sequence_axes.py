"""What sequence parallelism, context parallelism and data parallelism divide: tokens, heads, samples and weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.counted_training import CountedStep, RankTraining, run_trainings, small_config
from meshwright_practice.pictures import Bars

LAYOUTS = {
    "tensor": ("--layout.replicate=1", "--layout.tensor=2"),
    "ring": ("--layout.replicate=1", "--layout.context=2", "--context.method=ring"),
    "all_to_all": ("--layout.replicate=1", "--layout.context=2", "--context.method=all-to-all"),
    "data": ("--layout.replicate=2",),
}


@dataclass
class BlockShapes:
    """What the first block of a rank computed on in one step."""

    step: CountedStep | None = None
    norm_tokens: int = 0
    """tokens of each sequence that the norm sees"""
    attention_tokens: int = 0
    """queries of each sequence at the attention"""
    attention_heads: int = 0
    samples: list[int] = field(default_factory=list)
    """the first tokens of the samples that this rank reads"""


def record_shapes(training: RankTraining) -> BlockShapes:
    shapes = BlockShapes()
    block: Any = next(m for name, m in training.model.module.named_modules() if name.endswith("blocks.0"))

    def at_norm(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        shapes.norm_tokens = local(inputs[0]).shape[1]

    def at_attention(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        shapes.attention_heads, shapes.attention_tokens = local(inputs[0]).shape[1:3]

    block.attention_norm.register_forward_pre_hook(at_norm)
    block.attention.core.register_forward_pre_hook(at_attention)
    shapes.samples = [int(row.sum()) for row in training.loader.first().tensors[0]]
    shapes.step = training.count()
    return shapes


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divide(knobs: Knobs) -> Observation:
    """One step of each layout on two ranks, of which the shapes in the first block are recorded."""
    sequence, heads = int(knobs["sequence"]), 4
    shape = [f"--data.sequence={sequence}", f"--model.kv_heads={knobs['kv_heads']}", "--model.layers=2"]
    configs = []
    for name, options in LAYOUTS.items():
        micro = 1 if name == "data" else 2
        configs.append(small_config(2, *shape, *options, "--batch.global=2", f"--batch.micro={micro}"))
    recorded = dict(zip(LAYOUTS, run_trainings(configs, record_shapes), strict=True))
    values: dict[str, float] = {"sequence": sequence, "heads": heads}
    steps = {}
    for name, ranks in recorded.items():
        first = ranks[0]
        assert first.step is not None
        steps[name] = first.step
        values[f"norm_tokens_{name}"] = first.norm_tokens
        values[f"attention_tokens_{name}"] = first.attention_tokens
        values[f"attention_heads_{name}"] = first.attention_heads
        values[f"same_samples_{name}"] = int(first.samples == ranks[1].samples)
        values[f"parameter_{name}"] = first.step.peak["parameter"] / first.step.model_bytes
    for name, step in steps.items():
        samples = 1 if name == "data" else 2
        values[f"activation_{name}"] = step.peak["activation"] / samples / steps["data"].peak["activation"]
    unit = sequence // 2 * 2 * 32 // heads * 8 * 2  # two samples, half of a sequence, one head, float64, two blocks
    values["ring_bytes"] = steps["ring"].wire(axis="context")
    values["all_to_all_bytes"] = steps["all_to_all"].wire(axis="context")
    values["ring_formula"] = 3 * 2 * int(knobs["kv_heads"]) * unit
    values["tensor_bytes"] = steps["tensor"].wire(axis="tensor")
    values["loss_difference"] = max(abs(step.loss - steps["data"].loss) for step in steps.values())
    labels = ("tensor", "ring", "all_to_all", "data")
    parts: dict[str, tuple[float, ...]] = {
        "tokens at the norm": tuple(values[f"norm_tokens_{name}"] / sequence for name in labels),
        "queries at the attention": tuple(values[f"attention_tokens_{name}"] / sequence for name in labels),
        "heads at the attention": tuple(values[f"attention_heads_{name}"] / heads for name in labels),
        "parameters": tuple(values[f"parameter_{name}"] for name in labels),
    }
    names = ("sequence parallel with TP", "context, ring", "context, all-to-all", "data parallel")
    picture = Bars("what one of two ranks has", "share of one sequence and of the model", names, parts)
    note = "Data-parallel ranks read different samples; the ranks of the other layouts read the same ones."
    return Observation(values, picture, (note,))
