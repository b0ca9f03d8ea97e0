"""Where a replay begins: the newest intact checkpoint at or before a step, and the settings that the step had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.base.checkpoint.listing import CheckpointEntry, RunLineage, list_published, open_run_store
from meshwright.base.config import RunConfig, identity, load_config
from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.layout import Layout
from meshwright.core.checkpoint.run_state import find_state_damage
from meshwright.core.checkpoint.verify import find_damage
from meshwright.core.trainer.identity import describe_differences, read_identity
from meshwright.errors import CheckpointError, ConfigError
from meshwright.prover.replay.records import RunRecords


@dataclass(frozen=True)
class ReplaySource:
    """A run folder that is only read."""

    folder: RunFolder
    config: RunConfig
    identity: dict[str, Any]
    records: RunRecords

    @classmethod
    def open(cls, folder: RunFolder, ranks: int | str | None = None, overrides: Sequence[str] = ()) -> ReplaySource:
        folder.require_own_folders()
        if not folder.has_run:
            raise ConfigError(f"{folder.root} has no run", "expected the folder of a run")
        config = load_config(folder.root, overrides, ranks)
        if differences := describe_differences(identity(load_config(folder.root)), identity(config)):
            raise ConfigError(
                f"a replay has the settings of its run: {differences}",
                "expected settings of the placement, such as --layout.tensor=1 or --launch.device=cpu",
            )
        return cls(folder, config, read_identity(folder), RunRecords(RunHistory(folder)))

    @property
    def lineage(self) -> RunLineage:
        return RunLineage.from_identity(self.identity)

    @property
    def fork_step(self) -> int:
        """The step at which the newest timeline begins; 0 for a run that was never forked."""
        return max(self.lineage.last_steps.values(), default=0)

    def checkpoints(self) -> list[CheckpointEntry]:
        """The published checkpoints of this run, newest first."""
        return list_published(open_run_store(self.folder), self.lineage)

    def checkpoint_before(self, step: int) -> CheckpointEntry | None:
        """The newest intact checkpoint from which step `step` can be reached; None: the initial state."""
        self.require_step(step)
        for entry in self.checkpoints():
            if entry.step <= step and not (find_damage(entry) or find_state_damage(entry)):
                return entry
        if self.fork_step or self.lineage.timeline > 1:
            raise CheckpointError(
                f"{self.folder.root}: no intact checkpoint is left at or before step {step}, and the run was forked at "
                f"step {self.fork_step}",
                "try a later step; the initial state is that of another timeline",
            )
        return None

    def initial_state(self) -> CheckpointEntry | None:
        """The oldest state that can be restored: None is the initial one. Raises a CheckpointError where a fork has
        replaced the settings of the first steps.
        """
        return self.checkpoint_before(0) if not self.fork_step else self.checkpoint_before(self.fork_step)

    def require_step(self, step: int) -> None:
        """Raises a ConfigError for a step that the run does not have, or that was run with other settings."""
        if not self.fork_step <= step < self.config.steps:
            before = f"; earlier steps had the settings before the fork at step {self.fork_step}"
            raise ConfigError(
                f"--step {step}: the run has steps {self.fork_step} to {self.config.steps - 1}"
                + (before if 0 <= step < self.fork_step else ""),
                f"expected {self.fork_step} to {self.config.steps - 1}",
            )

    def config_at(self, step: int) -> RunConfig:
        """The settings that the step was run with: a run that was extended had fewer steps before, which decide the
        learning rate.
        """
        steps = self.records.start_of(step).get("steps")
        if not isinstance(steps, int) or not step < steps <= self.config.steps:
            return self.config
        return replace(self.config, steps=steps)

    def is_deterministic(self, step: int) -> bool:
        """Whether the step was recorded with deterministic algorithms; by default, only a CPU uses them."""
        chosen = self.config.precision.deterministic
        return self.records.start_of(step).get("device", "cpu") == "cpu" if chosen is None else chosen

    def layout_note(self, step: int) -> str:
        """A note if the step was recorded on another layout than that of the replay; else ''."""
        recorded, now = self.records.start_of(step).get("layout"), str(Layout.from_config(self.config.layout))
        if not isinstance(recorded, str) or recorded == now:
            return ""
        return f"the step was recorded on the layout {recorded[:200]} and replayed on {now}: the last bits may differ"
