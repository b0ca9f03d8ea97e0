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
from benchmarks.peer_components import READ_LOSS_EVERY, RunSteps, lr_multiplier, make_adamw
from benchmarks.throughput import MESHWRIGHT, RANKS, WARMUP_ROUNDS, import_error, race, ratio_statistics, settings
from meshwright.launch.job import make_job
from meshwright.launch.ranks import run_ranks
from meshwright.launch.user_code.user_code import UserCode
from meshwright.parallel.world import World
from meshwright.telemetry.run_folder import RunFolder
from meshwright.trainer.loop import Job

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
    """The loop of accelerate's guide; the model returns the mean loss of the rank's batch."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    config = job.config
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    assert accelerator.num_processes == world.size
    plain_model = build()
    plain_optimizer = make_adamw(plain_model, config.optimizer)
    plain_scheduler = torch.optim.lr_scheduler.LambdaLR(plain_optimizer, lr_multiplier(job, world.size))
    plain_loader = DataLoader(RandomTokens(), job.batch.micro, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(
        plain_model, plain_optimizer, plain_loader, plain_scheduler
    )
    batches = iter(loader)
    done, last_loss = 0, float("nan")

    def run(steps: int) -> float:
        nonlocal done, last_loss
        for _ in range(steps):
            loss = model(**next(batches)).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), config.optimizer.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done % READ_LOSS_EVERY == 0:
                last_loss = loss.item()
        return last_loss

    return run


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
