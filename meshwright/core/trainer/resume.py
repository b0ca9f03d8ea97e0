"""The state of a run that a checkpoint keeps beside its tensors, and its validation before a run resumes from it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from meshwright.base.checkpoint.listing import RunLineage
from meshwright.base.checkpoint.manifest import Manifest
from meshwright.base.config import Batch, RunConfig
from meshwright.base.records.events import EventLog
from meshwright.base.topology.axes import ALL_AXES
from meshwright.base.topology.layout import Layout, stages_per_rank
from meshwright.core.checkpoint.run_state import find_manifest_damage, find_owner_damage
from meshwright.core.checkpoint.saver import CheckpointMetadata
from meshwright.core.checkpoint.verify import Damage
from meshwright.core.data.stream import Stream
from meshwright.core.optim.schedule import ScheduleFunction, learning_rate
from meshwright.core.parallel.data_parallel.rank_agreement import ModelUse
from meshwright.core.parallel.world import World
from meshwright.core.trainer.identity import code_fingerprint, describe_differences
from meshwright.core.trainer.precision import Precision
from meshwright.core.trainer.records.step_recorder import StepRecorder
from meshwright.core.trainer.step import step_seed
from meshwright.errors import DataError, IdentityError
from meshwright.rl.policy.rollouts import RolloutLoader
from meshwright.version import __version__

DEFAULTS: dict[str, Any] = dict.fromkeys(ALL_AXES, 1) | {
    "sharding": "none",
    "pipelining": "none",
    "exchange": "none",
    "compile": False,
    "weights": "fp32",
    "residual": "fp32",
    "loss": "torch",
    "attention": None,
    "scope": None,
    "offload": False,
}
"""The values for keys that a manifest of an older version lacks."""


class ResumeState:
    """The stream position, seeds, schedule and small state of a run, each stored under its logical owner."""

    def __init__(
        self,
        config: RunConfig,
        batch: Batch,
        layout: Layout,
        stream: Stream,
        identity: dict[str, Any],
        lineage: RunLineage,
        world: World,
        base: dict[str, str],
        schedule: ScheduleFunction | None = None,
        rollouts: RolloutLoader | None = None,
    ) -> None:
        """`rollouts` has the cursor of a run of reinforcement learning, which takes the place of the stream's."""
        self.config, self.batch, self.layout, self.stream = config, batch, layout, stream
        self.identity, self.lineage, self.base = identity, lineage, base
        self.schedule, self.rollouts = schedule, rollouts
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
            "weights": config.precision.weights,
            "residual": config.precision.residual,
            "loss": config.kernels.loss,
            "offload": config.optimizer.cpu_offload,
        }

    def manifest_facts(self) -> dict[str, Any]:
        """Returns the manifest fields that are equal in every checkpoint of an attempt."""
        return {
            "layout": {axis: getattr(self.layout, axis) for axis in ALL_AXES} | {"micro": self.batch.micro},
            "identity": self.identity,
            "made_by": self.made_by,
            "base": self.base,
        }

    def metadata(self, done: int, recorder: StepRecorder, precision: Precision, use: ModelUse) -> CheckpointMetadata:
        """Returns what a checkpoint after `done` steps keeps beside its tensors."""
        common = {
            "data": self.stream_position(done),
            "rng": self.seeds(done),
            "schedule": {"step": done, "lr": self.learning_rate(done)},
            "scaler": precision.scaler.to_json() if precision.scaler is not None else {},
            "counters": recorder.counters(),
        }
        return CheckpointMetadata(done, common, self.owner, {"noise": recorder.noise.to_json()}, use)

    def apply(
        self, manifest: Manifest, owner_state: dict[str, Any], recorder: StepRecorder, precision: Precision
    ) -> None:
        """Restores the small state. State of a data coordinate is restored only if their number has not changed."""
        recorder.restore(manifest.counters)
        if precision.scaler is not None:
            precision.scaler.restore(manifest.scaler)
        if len(manifest.rng) == self.layout.data_degree:
            recorder.noise.restore(owner_state["noise"])
        if self.rollouts is not None:
            self.rollouts.restored = manifest.data
            self.rollouts.forked = manifest.timeline != self.lineage.timeline

    def find_damage(self, manifest: Manifest, owner_state: dict[str, Any]) -> list[Damage]:
        """What `apply` and `validate` would read, and is not there."""
        damage = list(find_manifest_damage(manifest))
        if len(manifest.rng) == self.layout.data_degree:
            damage += find_owner_damage(f"the part of {self.owner}", owner_state)
        return damage

    def validate(self, manifest: Manifest) -> None:
        """Raises an error, with both values, for a checkpoint of another run. A fork takes the tensors of an earlier
        timeline with any settings. The learning rate is compared under the `steps` that the checkpoint was made with.
        """
        if manifest.timeline != self.lineage.timeline:
            return
        step = manifest.step
        self.validate_base(manifest)
        if differences := describe_differences(manifest.identity, self.identity):
            raise IdentityError(f"the checkpoint of step {step} belongs to another run: {differences}")
        if self.rollouts is None and manifest.data != self.stream_position(step):
            raise DataError(
                f"the sample order changed: the checkpoint of step {step} continues at {manifest.data}, this run at "
                f"{self.stream_position(step)}"
            )
        if manifest.schedule["lr"] != (rate := self.learning_rate(step, self.steps_of(manifest))):
            raise IdentityError(
                f"the learning rate of step {step} is {manifest.schedule['lr']} in the checkpoint and {rate} here"
            )
        if len(manifest.rng) == self.layout.data_degree and manifest.rng != self.seeds(step):
            raise IdentityError(f"the random seeds of step {step} differ from the checkpoint's")

    def validate_base(self, manifest: Manifest) -> None:
        """Raises an error if the frozen parameters differ from those that the factors in a checkpoint belong to."""
        before, now = manifest.base.get("digest"), self.base.get("digest")
        if before != now:
            raise IdentityError(
                f"the checkpoint of step {manifest.step} was trained on frozen parameters with digest {before} "
                f"({manifest.base.get('weights')}), and this run has {now} ({self.base.get('weights')})",
                "try the weights that the run began with, or --fresh to begin a new run with these",
            )

    def steps_of(self, manifest: Manifest) -> int:
        """Returns the number of steps that the run had when the checkpoint was written."""
        return int(manifest.identity.get("steps", self.config.steps))

    def changes(self, manifest: Manifest) -> list[str]:
        """Lists what may change the last bits without being identity: versions, device, threads, layout."""
        before = DEFAULTS | manifest.made_by | manifest.layout
        now = self.made_by | self.manifest_facts()["layout"]
        return [
            f"the source code of Meshwright changed (hash {str(before.get(key))[:8]} -> {value[:8]})"
            if key == "code"
            else f"{key} was {before.get(key)} and is {value}"
            for key, value in now.items()
            if before.get(key) != value
        ]

    def stream_position(self, done: int) -> dict[str, Any]:
        """Returns where in the stream a run continues after `done` steps, with the next sample ids as a check."""
        if self.rollouts is not None:
            return self.rollouts.position(done)
        position = done * self.batch.global_
        ids = [int(sample) for sample in self.stream.step(done)[:4]]
        return {"step": done, "position": position, "epoch": self.stream.epoch_at(position), "next": ids}

    def seeds(self, done: int) -> dict[str, int]:
        """Returns the seed of the next step for every data coordinate; it is the whole state of a generator."""
        return {f"data/{c}": step_seed(self.config.seed, done, c) for c in range(self.layout.data_degree)}

    def learning_rate(self, step: int, steps: int | None = None) -> float:
        """Returns the learning rate of a step, in a run of `steps` (by default the configured number)."""
        config = self.config
        steps = config.steps if steps is None else steps
        return learning_rate(step, steps, config.optimizer.lr, config.schedule, self.schedule)

    def record_extension(self, log: EventLog, step: int, steps_before: int) -> None:
        """Records that the run now has more steps, and what this does to the learning rate of the next step."""
        if steps_before != self.config.steps:
            log.write(
                "extended",
                step=step,
                steps_before=steps_before,
                steps=self.config.steps,
                lr_before=self.learning_rate(step, steps_before),
                lr=self.learning_rate(step),
            )
