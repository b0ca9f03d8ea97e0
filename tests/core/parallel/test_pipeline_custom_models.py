"""Pipelines of models that nobody wrote for them: losses and gradients of one process, or a refusal that says why."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from meshwright.base.topology.unsupported import validate
from meshwright.core.data.batch_structure import BatchStructure
from meshwright.core.parallel.infer_spec import infer_parallel_spec
from meshwright.core.parallel.parallel_model import PassHooks
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.parallel.pipeline_parallel.model_trace import ModelTracer
from meshwright.core.parallel.pipeline_parallel.pipeline_model import require_equal_shapes
from meshwright.core.parallel.pipeline_parallel.stages import find_stage_modules
from meshwright.core.parallel.pipeline_parallel.tied_weights import separate_tied_weights
from meshwright.core.trainer.build import build_parallel_model
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.precision import Precision
from meshwright.errors import ConfigError
from meshwright.testing import run_ranks
from tests.kit.small_run import load_cpu_config

VOCAB, WIDTH, SEQUENCE, MICRO, MICRO_BATCHES = 24, 16, 8, 2, 4
SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 20, "num_attention_heads": 2}
SIZES |= {"num_hidden_layers": 4, "max_position_embeddings": 16}
VIT_SIZES = {name: SIZES[name] for name in SIZES if name not in ("vocab_size", "max_position_embeddings")}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class MaskedBlock(nn.Module):
    """A block with a mask as its second argument; it returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x, mask):
        out = x + self.down(F.gelu(self.up(self.norm(x))) * mask[..., None])
        return out, mask


class PlainModel(nn.Module):
    """Parameters of its own beside its modules, frozen positions, and a head whose weight is that of the embedding."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.positions.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH) * 1.5)
        self.register_buffer("order", torch.arange(SEQUENCE))
        self.drop = nn.Dropout(0.0)
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.drop(self.tokens(tokens) * self.scale + self.positions(self.order))
        mask = (tokens != 0).to(x.dtype)
        for block in self.blocks:
            x, _ = block(x, mask)
        return self.head(self.norm(x))


def token_loss(outputs, labels):
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="sum")


class LearnedLoss(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, outputs, labels):
        return (token_loss(outputs, labels) * self.scale).sum()


def tokens_and_labels(generator) -> dict:
    tokens = torch.randint(0, VOCAB, (MICRO, SEQUENCE), generator=generator)
    return {"input_ids": tokens, "labels": tokens.roll(-1, 1).masked_fill(tokens == 3, -100)}


def padded(generator) -> dict:
    batch = tokens_and_labels(generator)
    lengths = torch.randint(3, SEQUENCE, (MICRO, 1), generator=generator)
    return batch | {"attention_mask": (torch.arange(SEQUENCE) < lengths).long()}


def pairs(generator) -> tuple:
    batch = tokens_and_labels(generator)
    return batch["input_ids"], batch["labels"]


def images(generator) -> dict:
    pixels = torch.randn(MICRO, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (MICRO,), generator=generator)}


MODELS = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), None, tokens_and_labels),
    "llama, tied": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)), None, padded),
    "gpt2": (
        lambda: GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_positions=16,
                n_embd=WIDTH,
                n_layer=4,
                n_head=2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=1,
                eos_token_id=1,
            )
        ),
        None,
        tokens_and_labels,
    ),
    "bert": (lambda: BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT)), None, padded),
    "vit": (
        lambda: ViTForImageClassification(
            ViTConfig(**VIT_SIZES, image_size=8, patch_size=4, num_labels=5, **NO_DROPOUT)
        ),
        None,
        images,
    ),
    "plain": (PlainModel, token_loss, pairs),
    "plain, loss with parameters": (PlainModel, LearnedLoss(), pairs),
}


def custom_model(name: str) -> tuple[CustomModel, list]:
    build, loss, make_batch = MODELS[name]
    torch.manual_seed(0)
    module = build()
    generator = torch.Generator().manual_seed(1)
    batches = [make_batch(generator) for _ in range(MICRO_BATCHES)]
    first = batches[0]
    sample = {k: v[0].numpy() for k, v in first.items()} if isinstance(first, dict) else tuple(t[0] for t in first)
    structure = BatchStructure.of(sample) if isinstance(first, dict) else BatchStructure.of_tuple(2)
    custom = CustomModel(module, loss, infer_parallel_spec(module), structure)
    return custom, [structure.flatten(batch) for batch in batches]


def results(world, name: str, overrides: list[str]) -> dict:
    """The loss of training and of evaluation, and the gradients of this rank's parameters, on full tensors."""
    config = load_cpu_config(
        overrides=[
            "--layout.replicate=1", "--precision.compute=fp64", f"--batch.micro={MICRO}",
            f"--batch.global={MICRO * MICRO_BATCHES}", *overrides,
        ]
    )  # fmt: skip
    layout, _ = validate(config, own_model=True)
    custom, batches = custom_model(name)
    model = build_parallel_model(config, layout, custom, Precision(config.precision, world.device), world)
    reports_loss = model.has_loss and layout.is_first_on(world.rank, ["tensor"])
    losses: list = []

    def scale_loss(loss):
        losses.append(loss.detach())
        return loss / 7

    hooks = PassHooks(lambda _phase: None, nullcontext, scale_loss, lambda: None)
    coordinate, degree = layout.data_coordinate(world.rank), layout.data_degree
    model.forward_backward([model.shard_inputs(batch) for batch in batches[coordinate::degree]], hooks)
    found = {"loss": sum(losses) if reports_loss else torch.zeros((), dtype=torch.float64)}
    for parameter_name, parameter in model.parameters().items():
        gradient = parameter.grad
        if gradient is not None:
            found[parameter_name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    with torch.no_grad():
        short = tuple(tensor[:1] for tensor in batches[0])
        found["evaluation"] = model.forward_loss(*model.shard_inputs(short)) * reports_loss / degree
    return found


def run_cases(world, cases) -> list:
    return [results(world, name, overrides) for name, overrides in cases]


def assert_equal_to_one_process(cases, ranks: int, tolerance: float = 1e-10) -> None:
    [expected] = run_ranks(run_cases, 1, [(name, []) for name, _ in cases])
    found = run_ranks(run_cases, ranks, cases)
    for index, (name, overrides) in enumerate(cases):
        reference = expected[index]
        by_rank = [rank[index] for rank in found]
        names = {key for result in by_rank for key in result}
        assert names == set(reference), (name, overrides)
        for key in names:
            values = [result[key] for result in by_rank if key in result]
            value = sum(values) if key in ("loss", "evaluation") else values[0]
            error = float((value - reference[key]).abs().max() / reference[key].abs().max().clamp(min=1e-3))
            assert error < tolerance, (name, overrides, key, error)


def pipeline(schedule: str, *more: str, ranks: int = 2) -> list[str]:
    return [f"--layout.pipeline={ranks}", f"--pipeline.schedule={schedule}", *more]


CASES = [
    ("llama", pipeline("1f1b")),
    ("llama", pipeline("interleaved", "--activation_checkpoint.mode=full")),
    ("llama, tied", pipeline("zbv")),
    ("llama, tied", pipeline("gpipe")),
    ("gpt2", pipeline("1f1b")),
    ("gpt2", pipeline("zero-bubble")),
    ("bert", pipeline("interleaved")),
    ("vit", pipeline("1f1b")),
    ("plain", pipeline("zbv")),
    ("plain", pipeline("1f1b")),
    ("plain, loss with parameters", pipeline("1f1b")),
]


def test_pipelines_of_custom_models_have_the_losses_and_gradients_of_one_process():
    assert_equal_to_one_process(CASES, 2)


FOUR_RANKS = [
    ("bert", pipeline("interleaved", "--layout.shard=parameters", "--layout.replicate=2")),
    ("gpt2", pipeline("1f1b", ranks=4)),
    ("plain", pipeline("1f1b", "--layout.replicate=2")),
]
NORMS_IN_FLOAT32 = [
    ("llama", pipeline("1f1b", "--layout.tensor=2")),
    ("llama, tied", pipeline("zbv", "--layout.tensor=2")),
    ("llama, tied", pipeline("1f1b", "--layout.shard=optimizer", "--layout.replicate=2")),
    ("llama", pipeline("1f1b", "--layout.context=2", "--context.method=all-to-all")),
]
"""Llama of transformers computes its norms in float32, so sums in another order show as errors of float32."""


def test_pipelines_with_other_axes_have_the_losses_and_gradients_of_one_process():
    assert_equal_to_one_process(FOUR_RANKS, 4)
    assert_equal_to_one_process(NORMS_IN_FLOAT32, 4, tolerance=1e-6)


class Linear(nn.Module):
    """A block without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, other=None):
        return x + self.matrix(x if other is None else x + other)


class Refused(nn.Module):
    """(tokens, labels) -> (loss, count), with a forward that stages cannot divide."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.side = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Linear() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, labels):
        x = first = self.embed(tokens)
        results, kind = [], self.kind
        for block in self.blocks[::-1] if kind == "order" else self.blocks:
            side = self.side(tokens) if kind == "argument" else results[0] if kind == "skip" and results else None
            x = block(x, side)
            results.append(x)
            if kind == "between":
                x = x * 2
            if kind == "stop":
                break
        if kind == "around":
            x = x + first.detach()
        if kind == "behind":
            x = x * self.gain
        if kind == "value" and tokens.sum() > 0:
            x = x * 2
        if kind == "early head":
            x = x + results[0]
        return token_loss(self.head(x), labels), torch.zeros(())


REFUSALS = {
    "order": "blocks.2 runs where blocks.0 was expected",
    "argument": "blocks.0 gets the parameter side.weight beside the hidden states",
    "skip": "blocks.2 gets the result of blocks.0 beside the hidden states",
    "between": "the hidden states that blocks.1 gets are not the result of blocks.0",
    "stop": "its forward does not run blocks.1",
    "around": "the parameter embed.weight is used behind the blocks",
    "behind": "the parameter gain is used behind the blocks",
    "value": "the model cannot run on fake tensors",
    "early head": "the result of blocks.0 is used behind the blocks",
}
REFUSED_SPEC = ParallelSpec(blocks="blocks.*", before=("embed", "side"), after=("head",))


def trace(model: nn.Module, spec: ParallelSpec):
    modules = find_stage_modules(model, spec)
    tracer = ModelTracer(model, modules.blocks, modules.before, modules.after, torch.device("cpu"), torch.float32)
    return tracer.trace((torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)), nullcontext)


@pytest.mark.parametrize("kind", REFUSALS)
def test_forward_that_stages_cannot_divide_is_refused(kind):
    with pytest.raises(ConfigError, match=re.escape(REFUSALS[kind])):
        trace(Refused(kind), REFUSED_SPEC)


def test_trace_has_the_hidden_states_of_every_block():
    found = trace(Refused(""), REFUSED_SPEC)
    assert [hidden.shape for hidden in found.block_inputs] == [(2, 5, WIDTH)] * 3
    assert [len(found.outer_results[name]) for name in ("embed", "side")] == [1, 0]


def test_module_that_is_in_no_stage_is_refused():
    with pytest.raises(ConfigError, match="head has parameters, and is neither inside of a block nor before or after"):
        find_stage_modules(Refused(""), ParallelSpec(blocks="blocks.*", before=("embed", "side")))


def test_parameter_that_blocks_share_is_refused():
    model = Refused("")
    model.blocks[1].matrix.weight = model.blocks[0].matrix.weight
    with pytest.raises(ConfigError, match=r"blocks\.0\.matrix\.weight of a block is shared"):
        separate_tied_weights(model, list(model.blocks), [model.head], (0, 1), (True, False))


def test_micro_batches_of_different_shapes_are_refused():
    short, long = torch.zeros(2, 5), torch.zeros(2, 7)
    with pytest.raises(ConfigError, match=r"different shapes, \(2, 5\) and \(2, 7\)"):
        require_equal_shapes([(short,), (long,)])
