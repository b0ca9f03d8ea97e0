"""Tokens per second of greedy sampling relative to `generate` of transformers, with the same weights on CPU.

Both generate the same tokens, which is checked. Methods alternate within a round; a result is the median over rounds of
the ratio within a round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.throughput import ratio_statistics
from meshwright.base.config import ModelConfig
from meshwright.base.models.registry import model_spec, stored_parameters, write_huggingface_config
from meshwright.core.generate.generation import generate
from meshwright.core.generate.settings import SamplingConfig
from meshwright.core.models.init import build_model

MODEL = ModelConfig(vocab=8192, width=512, layers=8, heads=8, kv_heads=4, ffn=1408)
BATCHES = (1, 8)
PROMPT_TOKENS, TOKENS = 32, 64
ROUNDS = 7
MIN_RATIO = 1.0
"""The smallest rate relative to transformers."""


def measure(rounds: int = ROUNDS, model: ModelConfig = MODEL, tokens: int = TOKENS) -> dict[str, Any]:
    """Tokens per second and ratios for every batch size."""
    ours = build_model(model, 0).eval()
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**write_huggingface_config(model))).eval()
    weights = dict(ours.named_parameters())
    theirs.load_state_dict({part.stored: weights[part.name] for part in stored_parameters(model)}, strict=not model.tie)
    result: dict[str, Any] = {"tokens": tokens, "prompt_tokens": PROMPT_TOKENS}
    for batch in BATCHES:
        prompts = torch.randint(model.vocab, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(batch))

        def sample(prompts: torch.Tensor = prompts) -> list[list[int]]:
            config = SamplingConfig(tokens, temperature=0.0)
            steps = list(generate(ours, model_spec(model), prompts.tolist(), config))
            return [list(row) for row in zip(*steps, strict=True)]  # type: ignore[arg-type]

        def peer(prompts: torch.Tensor = prompts) -> list[list[int]]:
            options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            out = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
            rows: list[list[int]] = out[:, PROMPT_TOKENS:].tolist()
            return rows

        result[f"batch_{batch}"] = compare({"meshwright": sample, "transformers": peer}, rounds, batch * tokens)
    return result


def compare(methods: dict[str, Callable[[], list[list[int]]]], rounds: int, tokens: int) -> dict[str, Any]:
    """Tokens per second of both methods, and their ratio."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    shuffled = random.Random(0)
    found: dict[str, list[list[int]]] = {}
    for _ in range(rounds + 1):
        for name in shuffled.sample(list(methods), len(methods)):
            start = time.perf_counter()
            found[name] = methods[name]()
            seconds[name].append(time.perf_counter() - start)
        if len({str(rows) for rows in found.values()}) > 1:
            raise RuntimeError("the methods generate different tokens")
    ours, peer = (values[1:] for values in seconds.values())  # the first round allocates
    rates = {name: round(tokens / statistics.median(values[1:]), 1) for name, values in seconds.items()}
    return {"tokens_per_second": rates, "ratio_to_transformers": ratio_statistics(ours, peer)}
