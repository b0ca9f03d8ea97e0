"""What a checkpoint says of a run beside its tensors, and what must agree before a run goes on from it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from meshwright.checkpoint.listing import RunLineage
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.saver import CheckpointMetadata
from meshwright.config import Batch, RunConfig
from meshwright.data.stream import Stream
from meshwright.errors import DataError, IdentityError
from meshwright.optim.schedule import learning_rate
from meshwright.parallel.world import World
from meshwright.topology.axes import ALL_AXES
from meshwright.topology.layout import Layout, stages_per_rank
from meshwright.trainer.identity import code_fingerprint, describe_differences
from meshwright.trainer.precision import Precision
from meshwright.trainer.step import step_seed
from meshwright.trainer.step_recorder import StepRecorder
from meshwright.version import __version__

DEGREES = ALL_AXES
OLDER: dict[str, Any] = dict.fromkeys(DEGREES, 1) | {
    "sharding": "none",
    "pipelining": "none",
    "exchange": "none",
    "compile": False,
    "offload": False,
}
"""What a checkpoint was made with where it does not say so, being older than the word."""


class ResumeState:
    """The run as a checkpoint knows it: positions and small state, each under its logical owner."""

    def __init__(
        self,
        config: RunConfig,
        batch: Batch,
        layout: Layout,
        stream: Stream,
        identity: dict[str, Any],
        lineage: RunLineage,
        world: World,
    ) -> None:
        self.config, self.batch, self.layout, self.stream = config, batch, layout, stream
        self.identity, self.lineage = identity, lineage
        self.owner = f"data/{layout.data_coordinate(world.rank)}"
        self.made_by = {
            "meshwright": __version__,
            "code": code_fingerprint(),
            "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:2])),
            "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
            "threads": config.launch.threads,
            "sharding": config.layout.shard,
            "pipelining": f"{config.pipeline.schedule} x {stages_per_rank(config)}" if layout.pipeline > 1 else "none",
            "exchange": config.context.method if layout.context > 1 else "none",
            "compile": config.compile.enabled,
            "offload": config.optimizer.cpu_offload,
        }

    def facts(self) -> dict[str, Any]:
        """What is the same in every manifest of an attempt."""
        return {
            "layout": {axis: getattr(self.layout, axis) for axis in DEGREES} | {"micro": self.batch.micro},
            "identity": self.identity,
            "made_by": self.made_by,
        }

    def notes(self, done: int, ledger: StepRecorder, precision: Precision, used: int) -> CheckpointMetadata:
        common = {
            "data": self.cursor(done),
            "rng": self.seeds(done),
            "schedule": {"step": done, "lr": self.rate(done)},
            "scaler": precision.scaler.to_json() if precision.scaler is not None else {},
            "counters": ledger.counters(),
        }
        return CheckpointMetadata(done, common, self.owner, {"noise": ledger.noise.to_json()}, used)

    def apply(self, manifest: Manifest, ledger: StepRecorder, precision: Precision) -> None:
        """Puts small state back. What belongs to a data coordinate is only meaningful among as many of them."""
        ledger.restore(manifest.counters)
        if precision.scaler is not None:
            precision.scaler.restore(manifest.scaler)
        if len(manifest.rng) == self.layout.data_degree:
            ledger.noise.restore(manifest.owners[self.owner]["noise"])

    def check(self, manifest: Manifest) -> None:
        """Refuses another run, with both values. Of an earlier timeline a fork takes the tensors, and settings are its
        own.
        """
        if manifest.timeline != self.lineage.timeline:
            return
        if differs := describe_differences(manifest.identity, self.identity):
            raise IdentityError(f"the checkpoint of step {manifest.step} is of another run: {differs}")
        if manifest.data != self.cursor(manifest.step):
            raise DataError(
                f"the stream has moved: the checkpoint goes on at {manifest.data}, this program at "
                f"{self.cursor(manifest.step)}"
            )
        if manifest.schedule["lr"] != self.rate(manifest.step):
            raise IdentityError(
                f"step {manifest.step} has the learning rate {manifest.schedule['lr']} in the checkpoint and "
                f"{self.rate(manifest.step)} here"
            )
        if len(manifest.rng) == self.layout.data_degree and manifest.rng != self.seeds(manifest.step):
            raise IdentityError(f"the seeds of step {manifest.step} differ from the checkpoint's")

    def changes(self, manifest: Manifest) -> list[str]:
        """What may change the last bits without being another run: said, not refused."""
        before = manifest.made_by | manifest.layout
        now = self.made_by | self.facts()["layout"]
        before = OLDER | before
        return [f"{key} was {before.get(key)} and is {value}" for key, value in now.items() if before.get(key) != value]

    def cursor(self, done: int) -> dict[str, Any]:
        position = done * self.batch.global_
        ids = [int(sample) for sample in self.stream.step(done)[:4]]
        return {"step": done, "position": position, "epoch": self.stream.epoch_at(position), "next": ids}

    def seeds(self, done: int) -> dict[str, int]:
        """A generator's state is its seed, a function of position and owner."""
        return {f"data/{c}": step_seed(self.config.seed, done, c) for c in range(self.layout.data_degree)}

    def rate(self, done: int) -> float:
        config = self.config
        return learning_rate(done, config.steps, config.optimizer.lr, config.schedule)
