"""Runs on CUDA without pytest: where steps synchronize the host with the device, and the digest of a short run."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.base.config import load_config
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.kernels.cudnn_attention import deterministic_attention
from meshwright.core.launch.job import make_job
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import Job
from meshwright.core.trainer.loop import Training
from meshwright.prover.claims import fault_environment, supervise_quietly

SMALL = [
    "--model.width=256",
    "--model.heads=4",
    "--model.kv_heads=4",
    "--model.layers=2",
    "--model.ffn=512",
    "--data.sequence=128",
    "--data.kind=synthetic",
    "--data.samples=500",
    "--batch.global=8",
    "--schedule.warmup=2",
    "--launch.device=cuda",
    "--checkpoint.mode=off",
    "--eval.every=0",
    "--numerics.compare_every=0",
    "--count_bytes_every=0",
    "--precision.compute=bf16",
]
FIRST, LAST = 3, 8
"""The steps that are watched; everything lazy exists by then."""
TIMEOUT = 240.0


class TinyRegression(nn.Module):
    """A user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def squared_error(output: torch.Tensor, target: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
    """A loss of two parts with its count as a number of the host."""
    error = (output - target).square().sum()
    return {"error": error, "size": 1e-3 * output.square().sum()}, target.numel()


def user_code() -> UserCode:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 16, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return UserCode(TinyRegression(), squared_error, data)


CASES: dict[str, tuple[int, list[str], bool]] = {
    "one rank": (1, [], False),
    "gradient accumulation": (1, ["--batch.micro=2"], False),
    "float8": (1, ["--precision.float8=true"], False),
    "experts": (1, ["--model.experts=4", "--model.experts_active=2"], False),
    "offload": (1, ["--activation_checkpoint.mode=full", "--activation_checkpoint.offload=true"], False),
    "a user's model": (1, [], True),
    "DDP": (2, [], False),
    "FSDP2": (2, ["--layout.shard=parameters"], False),
}
"""Name -> ranks, settings, and whether the model is the user's."""


def job_of(case: str, folder: Path, *settings: str, steps: int = LAST + 1) -> Job:
    """The job of a case in a run folder inside `folder`."""
    ranks, of_case, is_custom = CASES[case]
    config = load_config(overrides=[*SMALL, *of_case, *settings], steps=steps, ranks=ranks)
    return make_job(config, RunFolder(folder / "run"), user_code() if is_custom else UserCode())


def watch_steps(world: World, job: Job) -> list[str]:
    """Where the steps of a job synchronize: the innermost calls of this package, and torch's."""
    training = Training(job, world)
    for _ in range(FIRST):
        training.run_step()
    found: list[str] = []

    def record(message: Any, *_args: Any, **_kwargs: Any) -> None:
        if "called a synchronizing" in str(message):
            stack = traceback.extract_stack()[:-1]
            found.append(" < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(stack[-12:])))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        while training.done <= LAST:
            training.run_step()
        torch.cuda.set_sync_debug_mode("default")
    training.signals.close()
    return found


def synchronizations(case: str, *settings: str) -> list[str]:
    """Where steps 3 to 8 synchronize, on any rank."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(case, Path(folder), *settings).as_attempt(1, 0, fork=False)
        job.folder.root.mkdir()
        found = run_ranks(watch_steps, job.layout.ranks, job, launch=job.config.launch, timeout=TIMEOUT)
    return sorted({place for places in found for place in places})


def trained_digest(case: str, *settings: str, faults: str = "") -> str:
    """The digest of the parameters after a deterministic run with checkpoints, whose ranks restart after a fault."""
    checkpoints = ("--checkpoint.mode=async", "--checkpoint.every=3", "--checkpoint.seconds=0")
    with tempfile.TemporaryDirectory() as folder, fault_environment(faults):
        job = job_of(case, Path(folder), "--precision.deterministic=true", *checkpoints, *settings, steps=10)
        return str(supervise_quietly(job).parameters_digest)


def compare_attention(compiled: bool) -> tuple[list[float], bool]:
    """The relative errors of cuDNN's deterministic attention and its gradients against torch's flash kernels, and
    whether repetitions are bitwise equal.
    """
    [result] = run_ranks(attention_on_device, 1, compiled, launch=load_config(overrides=SMALL).launch, timeout=TIMEOUT)
    return result  # type: ignore[no-any-return]


def attention_on_device(world: World, compiled: bool) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 512, n, 64, device=world.device, dtype=torch.bfloat16) for n in (8, 2, 2))
    q, k, v = (tensor.transpose(1, 2).requires_grad_() for tensor in (q, k, v))
    function = torch.compile(deterministic_attention, fullgraph=True) if compiled else deterministic_attention

    def run(attend: Any) -> list[torch.Tensor]:
        out = attend(q, k, v, 0.125)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    def by_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    found, expected = run(function), run(by_flash)
    errors = [float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, expected, strict=True)]
    repeats = all(torch.equal(a, b) for _ in range(5) for a, b in zip(found, run(function), strict=True))
    return errors, repeats
