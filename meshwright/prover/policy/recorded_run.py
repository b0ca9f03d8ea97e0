"""Runs a small config of reinforcement learning as `meshwright train` does, and reads what it recorded."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.base.config import RunConfig
from meshwright.base.records.events import Event, read_events
from meshwright.base.records.failures import RanksFailed
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.launch.job import make_job
from meshwright.core.trainer.job import TrainingObserver
from meshwright.errors import MeshwrightError, RestartsExhausted
from meshwright.prover.claims import SMALL_BLOCKS, fault_environment, supervise_quietly
from meshwright.prover.policy.audit import LoggedGroup
from meshwright.prover.shrink.runs import changes
from meshwright.rl.log.interface import DamagedRecord
from meshwright.rl.log.open_log import open_rollout_reader
from meshwright.rl.rollout import RolloutGroup

REWARD_CHANGE = "the reward to a digest of the completion"
"""An untrained small model solves no hard task, and groups without a difference of rewards are left out."""


def digest_reward(_item: dict[str, Any], completion: str) -> float:
    """0, 0.5 or 1, as a function of the completion: most groups have rewards that differ, and some have not."""
    return hashlib.sha256(completion.encode()).digest()[0] % 3 / 2


@dataclass(frozen=True)
class PolicyRun:
    """A run folder, and the config that runs in it."""

    user: RunConfig
    """the config that is proven"""
    config: RunConfig
    """what runs"""
    root: Path

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root)

    @property
    def changes(self) -> tuple[str, ...]:
        """Every setting that differs from the user's, and the reward."""
        return (*changes(self.user, self.config), REWARD_CHANGE)

    def train(self, faults: str = "", observer: TrainingObserver | None = None) -> str:
        """Trains to the last step; returns the reason if that fails, in one line, else ''. A signal ends the proof."""
        self.root.mkdir(parents=True, exist_ok=True)
        with fault_environment(faults):
            job = make_job(self.config, self.folder, UserCode(reward=digest_reward))
            service = job.rollouts
            assert service is not None
            job = replace(job, block_sizes=SMALL_BLOCKS, observer=observer or job.observer)
            with closing(service):
                try:
                    supervise_quietly(job)
                except (RanksFailed, RestartsExhausted) as error:
                    if error.exit_code > 128:
                        raise
                    return first_line(error)
        return ""

    def events(self, *kinds: str) -> list[Event]:
        """The events of rank 0 of these kinds, in order."""
        return [event for event in read_events(self.folder.events(0)) if event["kind"] in kinds]

    def logged_groups(self, run_id: str) -> list[LoggedGroup]:
        """Every record of the rollout log, in order. Raises a ValueError for a record that is damaged."""
        groups = []
        with closing(open_rollout_reader(self.folder, run_id)) as reader:
            for record in reader.scan():
                if isinstance(record, DamagedRecord):
                    raise ValueError(f"rollout log, {record.position}: {record.reason}")
                group = RolloutGroup.decode(record.payload)
                groups.append(
                    LoggedGroup(
                        (record.position.segment, record.position.offset),
                        group.group,
                        (group.version.timeline, group.version.step),
                        group.prompt_id,
                        len(group.rollouts),
                        sum(len(rollout.tokens) for rollout in group.rollouts),
                        content_digest(group),
                    )
                )
        return groups


def content_digest(group: RolloutGroup) -> str:
    """A digest of what a record trains: prompt, tokens, log-probabilities and rewards, without who generated it."""
    digest = hashlib.sha256(group.prompt.tobytes())
    for rollout in group.rollouts:
        for array in (rollout.tokens, rollout.logprobs, rollout.sampler_logprobs, rollout.reference_logprobs):
            digest.update(array.tobytes() + b"/")
        digest.update(repr(rollout.reward).encode())
    return digest.hexdigest()


def first_line(error: MeshwrightError) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
