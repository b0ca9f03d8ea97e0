"""Records the state of a run on every rank, from memory: a digest of every tensor, and all small state, per step.

The records share no code with the checkpoint package, so that a checkpoint can be compared with what was in memory.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from meshwright.core.parallel.local_shard import LocalShard, local_shard
from meshwright.core.parallel.parallel_model import persistent_buffers
from meshwright.core.trainer.job import TrainingObserver
from meshwright.prover.custom.subject import find_tied_parameters

if TYPE_CHECKING:
    from meshwright.core.trainer.loop import Training
    from meshwright.core.trainer.step import StepOutcome


@dataclass(frozen=True)
class ShardRecord:
    """A local shard: where it is in the full tensor, and the digest of its bytes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class StateRecord:
    """The state of one rank after `done` optimizer steps."""

    rank: int
    attempt: int
    done: int
    time: float
    """seconds of this host's monotonic clock"""
    tensors: dict[str, ShardRecord]
    """in model order: parameters, then buffers, then optimizer state; tied and offloaded copies count as parameters"""
    small: dict[str, Any]
    """counters, gradient scaler and noise scale"""
    step: dict[str, Any] = field(default_factory=dict)
    """what the last step used: input digest, seed, random states, learning rate; empty directly after a restore"""
    evaluated: bool = False
    """whether an evaluation followed the step, which changes counters"""


class StateRecorder(TrainingObserver):
    """Appends a record after the start, every step and every evaluation to a file per attempt and rank."""

    def __init__(self, folder: Path, save_at_start: bool = False) -> None:
        self.folder, self.save_at_start = folder, save_at_start

    def on_start(self, training: Training) -> None:
        self.training = training
        self.step: dict[str, Any] = {}
        self.write(training.done)
        if self.save_at_start:
            for result in training.saver.save(training.checkpoint_metadata(), wait=True):
                if result.error is not None:
                    raise result.error

    def on_step(self, outcome: StepOutcome) -> None:
        training = self.training
        inputs = xxhash.xxh3_128()
        for batch in outcome.batches:
            for tensor in batch.tensors:
                inputs.update(np.ascontiguousarray(tensor.numpy()).tobytes())
        seen: Any = np.random.get_state()
        self.step = {
            "inputs": inputs.hexdigest(),
            "tokens": outcome.control.tokens,
            "seed": torch.initial_seed(),
            "random states": digest_text(repr((random.getstate(), seen[1].tolist(), seen[2]))),
            "learning rate": training.optimizer.lr,
            "loss, gradient norm, local square, finite, loss scale": [
                value.hex() for value in outcome.numbers.tolist()
            ],
        }
        self.write(outcome.step + 1)

    def on_evaluation(self, step: int, loss: float, tokens: int) -> None:  # noqa: ARG002
        self.write(step + 1, evaluated=True)

    def write(self, done: int, evaluated: bool = False) -> None:
        training = self.training
        training.recorder.flush()
        scaler, noise = training.precision.scaler, training.recorder.noise
        small = {
            **{f"counter {name}": value for name, value in training.recorder.counters().items()},
            "noise scale": [noise.signal.hex(), noise.noise.hex()],
            "gradient scaler": [float(scaler.scale), int(scaler.finite_steps)] if scaler is not None else [],
        }
        tensors = {name: shard_record(shard) for name, shard in state_in_memory(training)}
        rank, attempt = training.world.rank, training.job.attempt
        record = StateRecord(rank, attempt, done, time.monotonic(), tensors, small, self.step, evaluated)
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"{attempt:04d}-rank-{rank}.jsonl", "a") as file:
            file.write(json.dumps(asdict(record)) + "\n")


ROUNDED = "rounded"
"""The kind of a bf16 weight: a checkpoint contains the master weight that it is the rounding of."""
FROZEN = "frozen"
"""The kind of a parameter that a checkpoint does not contain: the base of low-rank adaptation."""


def state_in_memory(training: Training) -> Iterator[tuple[str, LocalShard]]:
    """Every tensor that the next step reads, in model order."""
    module, optimizer = training.module, training.optimizer
    custom, seen = training.job.custom, set()
    tied = find_tied_parameters(custom.modules()) if custom is not None else {}
    first_names = {other: first for first, others in tied.items() for other in others}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        stored = first_names.get(name, name)  # a checkpoint has a tied weight once
        if stored not in seen:
            seen.add(stored)
            kind = FROZEN if training.base and not parameter.requires_grad else "model"
            master = training.parallel_model.masters.get(parameter)
            if parameter.dtype == torch.bfloat16:
                yield f"{ROUNDED}/{stored}", local_shard(parameter)
            if master is not None or parameter.dtype != torch.bfloat16:
                yield f"{kind}/{stored}", local_shard(parameter if master is None else master)
    if optimizer.offload:
        for name, shard, local in zip(optimizer.names, optimizer.shards, optimizer.local_parameters, strict=True):
            yield f"offloaded/{name}", shard.with_local(local.detach())
    for name, buffer in persistent_buffers(module):
        yield f"buffer/{name}", local_shard(buffer)
    for name, shard in optimizer.moments().items():
        yield f"optimizer/{name}", shard


def shard_record(shard: LocalShard) -> ShardRecord:
    return ShardRecord(shard.offset, tuple(shard.local.shape), digest_tensor(shard.local))


def digest_tensor(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


def digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_records(folder: Path) -> dict[int, list[StateRecord]]:
    """The records of every rank, in the order in which they were written; of several records of one attempt after the
    same number of steps only the last one, which follows the evaluation.
    """
    newest: dict[int, dict[tuple[int, int], StateRecord]] = {}
    for path in sorted(folder.glob("*-rank-*.jsonl")):
        for line in path.read_text().split("\n")[:-1]:  # a kill may have left a part of the last line
            values = json.loads(line)
            values["tensors"] = {
                name: ShardRecord(tuple(t["offset"]), tuple(t["shape"]), t["digest"])
                for name, t in values["tensors"].items()
            }
            record = StateRecord(**values)
            newest.setdefault(record.rank, {})[record.attempt, record.done] = record
    return {rank: list(records.values()) for rank, records in sorted(newest.items())}
