"""Step throughput of a transformers Llama on two CPU ranks, through Meshwright relative to accelerate."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks import meshwright_loop
from benchmarks.accelerate_loop import train_with_accelerate
from benchmarks.peer_components import RunSteps
from benchmarks.throughput import MESHWRIGHT, RANKS, WARMUP_ROUNDS, import_error, race, ratio_statistics, settings
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.launch.job import make_job
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import Job

ACCELERATE = "accelerate"
SEQUENCE, VOCABULARY = 128, 256
MIN_RATIO = 1.0
"""The smallest ratio of steps per second to accelerate."""


class RandomTokens:
    """Random token sequences; a sample depends only on its index. The model shifts the labels itself."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (SEQUENCE,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def build() -> nn.Module:
    """A Llama with the sizes of the tiny preset."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def accelerate_loop(job: Job, world: World) -> RunSteps:
    loader = DataLoader(RandomTokens(), job.batch.micro, shuffle=True, drop_last=True)  # type: ignore[arg-type, var-annotated]
    return train_with_accelerate(job, world, build(), loader, lambda model, batch: model(**batch).loss)


def measure(rounds: int) -> dict[str, Any]:
    missing = {name: reason for name in (ACCELERATE, "transformers") if (reason := import_error(name))}
    if missing:
        return {"ratio_to_accelerate": None, "missing": missing}
    config = replace(settings(), steps=rounds + WARMUP_ROUNDS)
    loops = {MESHWRIGHT: meshwright_loop.make_loop, ACCELERATE: accelerate_loop}
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        job = make_job(config, RunFolder(Path(folder)), UserCode(model=build(), source=RandomTokens()))
        by_rank = run_ranks(race, RANKS, job, loops, 1, timeout=900.0, launch=config.launch)
    seconds = {name: values[WARMUP_ROUNDS:] for name, values in by_rank[0][0].items()}
    return {
        "ranks": RANKS,
        "rounds": rounds,
        "step_ms": {name: round(statistics.median(values) * 1e3, 2) for name, values in seconds.items()},
        "ratio_to_accelerate": ratio_statistics(seconds[MESHWRIGHT], seconds[ACCELERATE]),
        "missing": missing,
    }
