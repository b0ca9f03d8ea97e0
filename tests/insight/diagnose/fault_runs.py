"""Twenty runs, each with one injected fault, and what `meshwright diagnose` must say of it first.

Every fault has two variants: one on which the diagnosis was developed, and one with other sizes, ranks and layouts,
which the tests run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.core.data.sample_lookup import open_sample_lookup
from tests.insight.diagnose.network_namespaces import throttled_link

BIN = Path(sys.executable).parent
TIMEOUT = 150.0
"""Seconds after which a fault run is ended."""
COMMON = (
    "--launch.device=cpu",
    "--launch.restarts=0",
    "--data.kind=synthetic",
    "--eval.every=0",
    "--checkpoint.seconds=0",
    "--schedule.warmup=2",
)
"""Settings of every fault run: nothing but training and its fault."""


@dataclass(frozen=True)
class Variant:
    """One run: its settings, the injected fault and the place that the first finding must name."""

    settings: tuple[str, ...]
    fault: str = ""
    place: dict[str, Any] = field(default_factory=dict)
    """fields of the first finding: rank, phase, axis or step"""
    prepare: Callable[[Path], tuple[str, ...]] = lambda _folder: ()
    """writes the data of the run beside its folder, and returns the settings that name it"""
    launch: Callable[[Path, tuple[str, ...], dict[str, str]], None] | None = None
    """starts the run otherwise than by `meshwright train`"""
    exit_codes: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class FaultRun:
    """A fault, and the cause that the diagnosis must name first."""

    cause: str
    development: Variant
    test: Variant
    variant: str = ""
    """the kind within the class; empty: any"""


def run_fault(variant: Variant, folder: Path) -> Path:
    """Runs a variant in `folder`, and returns the run folder."""
    run = folder / "run"
    settings = (*COMMON, *variant.prepare(folder), *variant.settings)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MESHWRIGHT_FAULT": variant.fault}
    if variant.launch is not None:
        variant.launch(run, settings, environment)
    else:
        train(run, settings, environment, variant.exit_codes)
    return run


def train(
    run: Path, settings: tuple[str, ...], environment: dict[str, str], exit_codes: tuple[int, ...] = (0,)
) -> None:
    command = [str(BIN / "meshwright"), "train", "--run", str(run), *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
    assert done.returncode in exit_codes, done.stderr


def model(width: int, layers: int, sequence: int, batch: int, steps: int, ranks: int = 2) -> tuple[str, ...]:
    """Sizes of a decoder, and the number of steps and ranks."""
    return (
        f"--model.width={width}",
        f"--model.layers={layers}",
        f"--model.ffn={2 * width}",
        f"--data.sequence={sequence}",
        f"--batch.global={batch}",
        f"--steps={steps}",
        f"--ranks={ranks}",
    )


def write_tokens(folder: Path, tokens: np.ndarray) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    tokens.astype(np.uint16).tofile(folder / "tokens.bin")
    return ("--data.kind=tokens", f"--data.path={folder / 'tokens.bin'}")


def write_one_token(folder: Path) -> tuple[str, ...]:
    """Every token is the same, so that every token is routed to the same experts."""
    return write_tokens(folder, np.full(1 << 16, 7))


def write_poisoned(sequence: int, sample: int) -> Callable[[Path], tuple[str, ...]]:
    """A short cycle of tokens that is learnt in a few steps, and one sample of random tokens."""

    def write(folder: Path) -> tuple[str, ...]:
        tokens = np.arange(400 * (sequence + 1)) % 5
        random = np.random.default_rng(0)
        tokens[sample * sequence : (sample + 1) * sequence] = random.integers(100, 250, sequence)
        return write_tokens(folder, tokens)

    return write


def step_of_sample(run: Path, sample: int) -> int:
    """The step in which training first reads a sample."""
    occurrences = open_sample_lookup(run).find(sample, 1)["occurrences"]
    return int(occurrences[0]["step"])


def resume_from_older_checkpoint(
    first_steps: int, kept: int
) -> Callable[[Path, tuple[str, ...], dict[str, str]], None]:
    """A run that loses its newest checkpoints, and is extended: it trains the steps since the older one again."""

    def launch(run: Path, settings: tuple[str, ...], environment: dict[str, str]) -> None:
        train(run, (*settings, f"--steps={first_steps}"), environment)
        for checkpoint in (run / "checkpoints").iterdir():
            if int(checkpoint.name.split("-")[1].split(".")[0]) > kept:
                shutil.rmtree(checkpoint)
        train(run, settings, environment)

    return launch


FAULTS: dict[str, FaultRun] = {
    "slow loader": FaultRun(
        "data",
        Variant(model(64, 2, 32, 8, 24), "step.fetch:slow=0.04", {"phase": "fetch"}),
        Variant(model(32, 3, 64, 12, 20, 3), "step.fetch:slow=0.07", {"phase": "fetch"}),
    ),
    "slow rank in forward": FaultRun(
        "straggler",
        Variant(model(64, 2, 32, 8, 24), "step.forward:rank1:slow=0.03", {"rank": 1, "phase": "forward"}),
        Variant(
            (*model(96, 2, 48, 12, 20, 3), "--batch.micro=2"),
            "step.forward:rank0:slow=0.04",
            {"rank": 0, "phase": "forward"},
        ),
    ),
    "slow rank in data": FaultRun(
        "straggler",
        Variant(model(64, 2, 32, 8, 24), "step.fetch:rank1:slow=0.03", {"rank": 1, "phase": "fetch"}),
        Variant(model(96, 2, 16, 12, 20, 3), "step.fetch:rank2:slow=0.06", {"rank": 2, "phase": "fetch"}),
    ),
    "slow rank under FSDP": FaultRun(
        "straggler",
        Variant(
            (*model(64, 2, 32, 8, 24), "--layout.shard=parameters"),
            "step.backward:rank1:slow=0.04",
            {"rank": 1, "phase": "backward"},
        ),
        Variant(
            (*model(96, 3, 16, 8, 20, 4), "--layout.shard=gradients"),
            "step.forward:rank3:slow=0.1",
            {"rank": 3, "phase": "forward"},
        ),
    ),
    "slow stage of a pipeline": FaultRun(
        "straggler",
        Variant(
            (*model(64, 4, 32, 8, 24), "--layout.replicate=1", "--layout.pipeline=2", "--batch.micro=1"),
            "step.forward:rank1:slow=0.01",
            {"rank": 1, "phase": "forward", "axis": "pipeline"},
        ),
        Variant(
            (*model(48, 6, 64, 6, 20, 3), "--layout.replicate=1", "--layout.pipeline=3", "--batch.micro=1"),
            "step.backward:rank1:slow=0.03",
            {"rank": 1, "phase": "backward", "axis": "pipeline"},
        ),
        variant="slow stage",
    ),
    "tiny buckets": FaultRun(
        "communication",
        Variant((*model(64, 24, 16, 4, 24), "--ddp.bucket_cap_mb=0.001"), "", {"axis": "replicate"}),
        Variant((*model(48, 20, 16, 6, 20, 3), "--ddp.bucket_cap_mb=0.01"), "", {"axis": "replicate"}),
        variant="small buckets",
    ),
    "one giant bucket": FaultRun(
        "communication",
        Variant((*model(512, 6, 16, 4, 16), "--ddp.bucket_cap_mb=1000"), "", {"axis": "replicate"}),
        Variant((*model(640, 4, 8, 2, 14), "--ddp.bucket_cap_mb=400"), "", {"axis": "replicate"}),
        variant="late start",
    ),
    "no overlap": FaultRun(
        "communication",
        Variant((*model(384, 6, 16, 4, 16), "--layout.shard=parameters"), "", {"axis": "shard"}),
        Variant((*model(512, 4, 8, 4, 14, 4), "--layout.shard=gradients"), "", {"axis": "shard"}),
        variant="no overlap",
    ),
    "throttled link": FaultRun(
        "communication",
        Variant(model(256, 4, 32, 4, 12), "", {"axis": "replicate"}, launch=throttled_link("200mbit")),
        Variant(model(384, 2, 16, 8, 10), "", {"axis": "replicate"}, launch=throttled_link("120mbit")),
        variant="slow link",
    ),
    "uneven stages": FaultRun(
        "bubble",
        Variant(
            (*model(192, 5, 64, 16, 20), "--layout.replicate=1", "--layout.pipeline=2", "--batch.micro=1"),
            "",
            {"rank": 0, "axis": "pipeline"},
        ),
        Variant(
            (
                *model(256, 2, 32, 16, 20),
                "--model.vocab=16000",
                "--layout.replicate=1",
                "--layout.pipeline=2",
                "--batch.micro=1",
            ),
            "",
            {"rank": 1, "axis": "pipeline"},
        ),
        variant="imbalance",
    ),
    "too few micro-batches": FaultRun(
        "bubble",
        Variant(
            (*model(192, 4, 64, 8, 20), "--layout.replicate=1", "--layout.pipeline=2", "--batch.micro=4"),
            "",
            {"axis": "pipeline"},
        ),
        Variant(
            (
                *model(128, 6, 64, 12, 20, 3),
                "--layout.replicate=1",
                "--layout.pipeline=3",
                "--batch.micro=4",
                "--pipeline.schedule=gpipe",
            ),
            "",
            {"axis": "pipeline"},
        ),
        variant="fill and drain",
    ),
    "skewed experts": FaultRun(
        "experts",
        Variant(
            (
                *model(64, 2, 32, 8, 24),
                "--model.experts=8",
                "--model.router_bias_rate=0",
                "--layout.expert=2",
                "--log_every=4",
            ),
            prepare=write_one_token,
        ),
        Variant(
            (
                *model(48, 3, 48, 12, 20),
                "--model.experts=6",
                "--model.router_bias_rate=0",
                "--model.router_aux_loss=0",
                "--log_every=5",
            ),
            prepare=write_one_token,
        ),
    ),
    "slow checkpoint disk": FaultRun(
        "checkpoint",
        Variant(
            (*model(64, 2, 32, 8, 24), "--checkpoint.every=6", "--checkpoint.mode=sync"),
            "save.write:slow=0.02",
            {"phase": "save"},
        ),
        Variant(
            (*model(48, 3, 48, 12, 20, 3), "--checkpoint.every=4", "--checkpoint.mode=sync"),
            "save.write:rank1:slow=0.05",
            {"phase": "save"},
        ),
    ),
    "fp16 overflow": FaultRun(
        "numerics",
        Variant((*model(64, 2, 32, 8, 24), "--precision.compute=fp16", "--precision.loss_scale=1e12")),
        Variant((*model(48, 3, 48, 12, 20, 3), "--precision.compute=fp16", "--precision.loss_scale=3e11")),
        variant="overflow",
    ),
    "periodic stall": FaultRun(
        "straggler",
        Variant(model(64, 2, 32, 8, 36), "step.update:rank1:slow=0.15@every6", {"rank": 1, "phase": "update"}),
        Variant(model(96, 2, 48, 12, 40, 3), "step.forward:rank2:slow=0.4@every8", {"rank": 2, "phase": "forward"}),
        variant="periodic",
    ),
    "replayed samples": FaultRun(
        "replay",
        Variant(
            (*model(64, 2, 32, 8, 36), "--checkpoint.every=8", "--checkpoint.keep=9", "--checkpoint.mode=sync"),
            place={"step": 8},
            launch=resume_from_older_checkpoint(24, 8),
        ),
        Variant(
            (*model(48, 3, 48, 12, 30, 3), "--checkpoint.every=5", "--checkpoint.keep=9", "--checkpoint.mode=sync"),
            place={"step": 10},
            launch=resume_from_older_checkpoint(25, 10),
        ),
    ),
    "hang in a collective": FaultRun(
        "hang",
        Variant(
            (*model(64, 2, 32, 8, 24), "--launch.hang_timeout=4"),
            "step.collective:rank1:desync@step9",
            {"rank": 1, "step": 9},
            exit_codes=(5, 8),
        ),
        Variant(
            (*model(48, 3, 48, 12, 20, 3), "--launch.hang_timeout=5"),
            "step.collective:rank2:hang@step6",
            {"rank": 2, "step": 6},
            exit_codes=(5, 8),
        ),
    ),
    "poisoned sample": FaultRun(
        "numerics",
        Variant((*model(64, 2, 32, 8, 40), "--eval.holdout=0"), prepare=write_poisoned(32, 226)),
        Variant((*model(48, 3, 24, 9, 40, 3), "--eval.holdout=0"), prepare=write_poisoned(24, 201)),
        variant="loss spike",
    ),
    "diverging learning rate": FaultRun(
        "numerics",
        Variant((*model(64, 2, 32, 8, 40), "--optimizer.lr=3", "--schedule.kind=constant"), exit_codes=(0, 5, 7)),
        Variant((*model(48, 3, 48, 12, 36, 3), "--optimizer.lr=8", "--optimizer.clip=0"), exit_codes=(0, 5, 7)),
        variant="divergence",
    ),
    "clean": FaultRun(
        "healthy",
        Variant(model(128, 4, 64, 16, 30)),
        Variant((*model(160, 3, 48, 12, 30), "--batch.micro=3")),
    ),
}
"""Fault -> its runs. The place of a poisoned sample is the step that `step_of_sample` finds."""

POISONED_SAMPLES = {"development": 226, "test": 201}
