"""Context parallelism of models that are not ours equals one process: loss and every gradient."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from meshwright.base.config import IGNORE_INDEX, ActivationCheckpointConfig
from meshwright.base.topology.unsupported import validate
from meshwright.core.data.batch_structure import BatchStructure
from meshwright.core.parallel.activation_memory.activation_checkpoint import apply_activation_checkpointing
from meshwright.core.parallel.context_parallel.context_attention import ContextAttention
from meshwright.core.parallel.context_parallel.context_parallel import apply_context_parallel
from meshwright.core.parallel.context_parallel.sequence_chunks import local_chunk
from meshwright.core.parallel.context_parallel.start_check import check_context_parallel
from meshwright.core.parallel.infer_spec import infer_parallel_spec
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.parallel.parallelize import shard_batch
from meshwright.core.trainer.build import build_parallel_model
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.objective import Objective
from meshwright.core.trainer.precision import Precision
from meshwright.errors import ConfigError
from meshwright.testing import run_ranks
from tests.kit.small_run import load_cpu_config

VOCAB, WIDTH, SEQUENCE, BATCH = 23, 32, 16, 2
RANKS = 2
SIZES = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ODD_KEY_HEADS = SIZES | {"num_key_value_heads": 1}
TOLERANCE = 1e-10
TOLERANCES = {"gemma2": 1e-6}
"""Gemma 2 computes its norms in float32, whatever the dtype of the model; sums have another order on chunks."""


class TorchModel(nn.Module):
    """A decoder of torch's modules; positions are an argument."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(TorchBlock(is_causal) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, positions=None):
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TorchBlock(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.is_causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), is_causal
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, scale=0.3)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with a padding mask; no positions, so none are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 40, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.head(self.encoder(self.tokens(tokens), src_key_padding_mask=tokens == 0))


def causal(config, implementation: str = "sdpa") -> nn.Module:
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


SMALL_GPT2 = GPT2Config(
    vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
)
SMALL_BERT = BertConfig(
    **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    num_attention_heads=4, max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
BOTH = ("ring", "all-to-all")
MODELS = {
    "torch": (TorchModel, BOTH),
    "torch, bidirectional": (partial(TorchModel, is_causal=False), BOTH),
    "torch encoder with padding": (TorchEncoder, BOTH[1:]),
    "llama": (lambda: causal(LlamaConfig(**SIZES)), BOTH),
    "llama, one key head": (lambda: causal(LlamaConfig(**ODD_KEY_HEADS)), BOTH),
    "llama, eager": (lambda: causal(LlamaConfig(**ODD_KEY_HEADS), "eager"), BOTH[1:]),
    "qwen3": (lambda: causal(Qwen3Config(**SIZES)), BOTH),
    "mistral with a window": (lambda: causal(MistralConfig(**SIZES, sliding_window=5)), BOTH[1:]),
    "gemma2": (lambda: causal(Gemma2Config(**SIZES, sliding_window=5, query_pre_attn_scalar=8), "eager"), BOTH[1:]),
    "gpt2": (lambda: causal(SMALL_GPT2), BOTH),
    "bert": (lambda: BertForMaskedLM._from_config(SMALL_BERT, attn_implementation="sdpa"), BOTH),
}


def token_loss(outputs, labels):
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def objective(name: str) -> Objective:
    torch.manual_seed(0)
    module = MODELS[name][0]()
    if hasattr(module, "config"):
        module.config.use_cache = False
    return Objective(module.double(), token_loss)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    tokens[0, -3:] = 0
    labels = tokens.roll(-1, 1)
    labels[:, -5:] = IGNORE_INDEX
    return tokens, labels


def spec_of(model: Objective) -> ParallelSpec:
    spec = infer_parallel_spec(model.model)
    positions = "positions" if isinstance(model.model, TorchModel) else spec.positions
    return ParallelSpec(blocks=spec.blocks, positions=positions).under_objective()


def results(model: nn.Module, inputs) -> dict[str, torch.Tensor]:
    total, _ = model(*inputs)
    total.backward()
    return {"loss": total.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def relative(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - one).abs().max() / one.abs().max().clamp(min=1e-3)) for name, one in theirs.items())


def compare_models(world) -> dict[tuple[str, str, str], float]:
    errors = {}
    for name, (_, methods) in MODELS.items():
        expected = results(objective(name), batch())
        for method, mode in product(methods, ("none", "full")):
            model = objective(name)
            spec = spec_of(model)
            context = ContextAttention(dist.group.WORLD, method)
            apply_context_parallel(model, spec, context)
            apply_activation_checkpointing(model, spec, ActivationCheckpointConfig(mode=mode))
            ours = results(model, local_chunk(batch(), context.chunks, None))
            for tensor in ours.values():
                dist.all_reduce(tensor)
            errors[name, method, mode] = relative(ours, expected)
            with context.disabled(), torch.no_grad():
                assert float((model(*batch())[0] - expected["loss"]).abs()) < TOLERANCE
    return errors


def test_context_parallel_custom_models_equal_one_process():
    for errors in run_ranks(compare_models, RANKS):
        assert not {case: error for case, error in errors.items() if not error < TOLERANCES.get(case[0], TOLERANCE)}


def compare_own_losses(world) -> dict[str, float]:
    """Models that compute their loss themselves: Llama shifts its labels, and BERT returns a mean. The second half of
    the sequence has no label, so that a rank has none.
    """
    errors = {}
    for name, method in (("llama", "ring"), ("llama", "all-to-all"), ("bert", "all-to-all")):
        tokens, labels = batch()
        labels[:, SEQUENCE // 2 :] = IGNORE_INDEX
        structure = BatchStructure.of({"input_ids": 0, "labels": 0})
        module = objective(name).model
        custom = CustomModel(module, None, infer_parallel_spec(module), structure)
        expected = results(custom.build_objective(world.device, torch.float64), (tokens, labels))
        overrides = ["--layout.replicate=1", "--layout.context=2", f"--context.method={method}", "--batch.micro=1"]
        config = load_cpu_config(overrides=[*overrides, "--precision.compute=fp64"], ranks=RANKS)
        layout, _ = validate(config, own_model=True)
        precision = Precision(config.precision, world.device)
        parallel_model = build_parallel_model(config, layout, custom, precision, world)
        check_context_parallel(parallel_model, (tokens, labels), nullcontext)
        found = results(parallel_model.module, parallel_model.shard_inputs((tokens, labels)))
        for tensor in found.values():
            dist.all_reduce(tensor)
        errors[f"{name} {method}"] = relative(found, expected)
    return errors


def test_context_parallel_models_with_a_loss_of_their_own_equal_one_process():
    """Losses of transformers are computed in float32."""
    for errors in run_ranks(compare_own_losses, RANKS):
        assert not {name: error for name, error in errors.items() if not error < 1e-5}


# Refusals, each in one line.


class LocalPositions(TorchModel):
    """Takes positions from the length of its input."""

    def forward(self, tokens):
        return super().forward(tokens)


class MixedTokens(TorchModel):
    """Mixes neighbouring tokens outside of attention."""

    def forward(self, tokens, positions=None):
        return super().forward(tokens.cummax(1).values, positions)


class DenseMask(TorchModel):
    """Makes a causal mask of the length of its input."""

    def forward(self, tokens, positions=None):
        x = self.tokens(tokens)[:, None]
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        return self.head(F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, 0])


class NoAttention(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB))


def squared_loss(outputs, labels):
    return token_loss(outputs, labels).square()


def refused(model: nn.Module, method: str, loss=token_loss, positions: str = "", inputs=None) -> str:
    """The message of the check before the first step, or an empty string."""
    torch.manual_seed(0)
    spec = ParallelSpec(positions=positions).under_objective()
    parallel_model = ParallelModel(Objective(model, loss))
    try:
        parallel_model.context = ContextAttention(dist.group.WORLD, method)
        apply_context_parallel(parallel_model.module, spec, parallel_model.context)
        parallel_model.shard_inputs = partial(shard_batch, parallel_model.context, None)
        check_context_parallel(parallel_model, inputs or batch(), nullcontext)
    except ConfigError as error:
        return str(error)
    return ""


def refusals(world) -> dict[str, str]:
    padding = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    padding[0, -2:] = 0
    return {
        "right": refused(TorchModel(), "ring", positions="positions"),
        "right in bf16": refused(TorchModel().bfloat16(), "ring", positions="positions"),
        "positions by length": refused(LocalPositions(), "all-to-all"),
        "positions not declared": refused(TorchModel(), "ring"),
        "rotary positions not declared": refused(MODELS["llama"][0](), "ring"),
        "rotary positions not declared, bf16": refused(MODELS["llama"][0]().bfloat16(), "all-to-all"),
        "tokens mixed": refused(MixedTokens(), "all-to-all", positions="positions"),
        "loss not a sum": refused(TorchModel(), "all-to-all", squared_loss, "positions"),
        "dense mask": refused(DenseMask(), "all-to-all"),
        "no attention": refused(NoAttention(), "ring"),
        "no such argument": refused(TorchModel(), "ring", positions="place"),
        "no sequence": refused(TorchModel(), "ring", inputs=(torch.randn(2, 3, 8, 8), torch.zeros(2).long())),
        "window": refused(MODELS["mistral with a window"][0](), "ring", positions="position_ids"),
        "soft cap": refused(MODELS["gemma2"][0](), "ring", positions="position_ids"),
        "mask": refused(TorchEncoder(), "ring"),
    }


def test_context_parallel_refuses_what_it_would_compute_wrong():
    expected = {
        "positions by length": "on a chunk of the sequence that differ.*expected ParallelSpec\\(positions=",
        "tokens mixed": "on a chunk of the sequence that differ.*no dependence between tokens but attention",
        "loss not a sum": "as a sum over chunks of the sequence and .* on the full .*expected a sum over tokens",
        "dense mask": "a mask of 8 queries and 8 keys, and the rank has 8 of 16 tokens.*expected is_causal=True",
        "no attention": "calls neither torch.nn.functional.scaled_dot_product_attention nor",
        "no such argument": "ParallelSpec.positions = place is no argument of the model's forward",
        "no sequence": "no tensor of shape \\(samples, tokens\\) of integers",
        "window": "context.method = ring .* has a sliding window; try context.method = all-to-all",
        "soft cap": "context.method = ring .* has a s.*; try context.method = all-to-all",
        "mask": "context.method = ring .* has a mask; try context.method = all-to-all",
    }
    for messages in run_ranks(refusals, RANKS):
        assert messages.pop("right") == messages.pop("right in bf16") == ""
        undeclared = {name: messages.pop(name) for name in list(messages) if "not declared" in name}
        assert all("expected ParallelSpec(positions=" in message for message in undeclared.values()), undeclared
        assert messages.keys() == expected.keys()
        for name, message in messages.items():
            assert re.search(expected[name], message), (name, message)
