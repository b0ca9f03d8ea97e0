"""The batches of a run of reinforcement learning: rollouts from the log, in the order that the rollout service decides.

Rank 0 asks the service which groups a step trains on and tells the other ranks; every rank reads them from the log,
verified, and takes its rows. The cursor that the service returns with a batch is committed with the weights that the
batch leads to, in the manifest of one checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from meshwright.base.checkpoint.listing import RunLineage, list_published, open_run_store
from meshwright.base.config import IGNORE_INDEX
from meshwright.base.records.events import EventLog
from meshwright.base.records.phases import OUTSIDE_PHASES
from meshwright.core import faults
from meshwright.core.checkpoint.state import CheckpointState
from meshwright.core.data.loader import MicroBatch
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import Job
from meshwright.errors import CheckpointError, DataError, MeshwrightError, StoppedBySignal
from meshwright.rl.log.interface import LogPosition
from meshwright.rl.log.open_log import open_rollout_reader
from meshwright.rl.policies import PolicyPublisher, open_policy_store, policies_outlive_power
from meshwright.rl.queue.cursor import RolloutCursor
from meshwright.rl.rollout import InvalidRollout, RolloutGroup
from meshwright.rl.rows import COLUMNS, PolicyRows, group_rows
from meshwright.rl.service.learner import LearnerClient
from meshwright.rl.version import PolicyLineage, PolicyVersion

ROUND_SECONDS = 1.0
"""How long rank 0 waits for a batch before it tells the other ranks, whose collective must not time out."""
CURSORS_OF_CHECKPOINTS = 2
"""Cursors that are kept in addition to those of `checkpoint.keep` checkpoints: saves may be in flight."""


def open_rollouts(job: Job, world: World, run: str, dtype: torch.dtype, log: EventLog) -> RolloutLoader | None:
    """The batches of a run of reinforcement learning; None for a run that trains on samples."""
    return RolloutLoader(job, world, run, dtype, log) if job.config.rl.enabled else None


class RolloutLoader:
    """The micro-batches of one rank. It has the methods of `data.loader.Loader` that a training loop uses."""

    def __init__(self, job: Job, world: World, run: str, dtype: torch.dtype, log: EventLog) -> None:
        assert job.rollouts is not None
        self.job, self.world, self.run, self.log = job, world, run, log
        self.config, self.batch, self.coordinate = job.config.rl, job.batch, job.layout.data_coordinate(world.rank)
        self.dtype = np.float64 if dtype == torch.float64 else np.float32
        self.client = self._connect() if world.rank == 0 else None
        self.reader = open_rollout_reader(job.folder, run)
        self.lineage = PolicyLineage.begin(job.attempt)
        self.restored: dict[str, Any] | None = None
        """the cursor of the checkpoint that this attempt resumes from"""
        self.forked = False
        """whether that checkpoint belongs to the timeline before a fork"""
        self.cursors: dict[int, dict[str, Any]] = {}
        """the cursors after the last completed step and after the step of the newest batch, by the number of steps"""
        self.signal_seen: Callable[[], int] = lambda: 0
        """the signal that this rank has received, or 0"""
        self.facts: dict[str, float] = {}
        """what is known of the newest batch beside its tensors, for the metrics of its step"""
        self.publisher: PolicyPublisher | None = None
        self.saved_policies: dict[int, set[PolicyVersion]] = {}
        """the versions that the cursors of the newest checkpoints need, by step"""

    def _connect(self) -> LearnerClient:
        assert self.job.rollouts is not None
        heartbeat = self.world.heartbeat
        return LearnerClient(self.job.rollouts.address, self.job.attempt, heartbeat.beat, self._report)

    def _report(self, problem: str) -> None:
        self.log.write("rollout_problem", message=problem)

    def begin(
        self,
        done: int,
        lineage: RunLineage,
        facts: dict[str, Any],
        parameters: Callable[[], CheckpointState],
        first_attempt: int = 1,
    ) -> None:
        """Begins the attempt after `done` steps, with the cursor of the checkpoint that was restored, and publishes
        its policy. `facts` are the manifest fields of an attempt, `parameters` the tensors of a policy, and
        `first_attempt` that of the timeline of the run.
        """
        job, cursor = self.job, self._resumed_cursor(done, first_attempt)
        more = (facts, parameters, job.layout, job.block_sizes, job.config.launch.hang_timeout)
        store = open_policy_store(job.folder, create=True, durable=policies_outlive_power(self.config))
        self.publisher = PolicyPublisher(store, self.world, lineage, job.attempt, *more)
        fixed = self.config.policy == "fixed"
        if self.client is not None:
            record = cursor.to_json() if cursor is not None else None
            self.lineage = self.client.begin(self.run, record, done, self.forked)
        self.lineage = PolicyLineage.from_json(
            self.world.broadcast_object(self.lineage.to_json(), "lineage of policies")
        )
        if cursor is None:
            cursor = RolloutCursor.initial(job.attempt, fixed)
        elif self.forked:
            cursor = cursor.fork(job.attempt, fixed)
        self.cursors = {done: cursor.to_json()}
        self._remember_checkpoints()
        self.remember(done)
        self.publisher.remove_damaged(self.lineage.version(done))
        if self.forked and self.config.kl:  # the reference of a fork is the policy that it begins with
            self.publisher.publish(self.lineage.version(0))
        self.publish(done)

    def _resumed_cursor(self, done: int, first_attempt: int) -> RolloutCursor | None:
        """The cursor of the checkpoint that was restored; None for the first attempt of a run."""
        fixed = self.config.policy == "fixed"
        if self.restored is None:  # what earlier attempts generated from the initial weights remains valid
            return RolloutCursor.initial(first_attempt, fixed) if self.job.attempt > first_attempt else None
        try:
            return RolloutCursor.from_json(self.restored)
        except ValueError as error:
            if self.forked:  # of a run without reinforcement learning
                return replace(RolloutCursor.initial(0), step=done)
            raise CheckpointError(f"the checkpoint of step {done} has no cursor of rollouts: {error}") from None

    def publish(self, done: int) -> None:
        """Publishes the policy after `done` steps, and removes those that nothing needs any more."""
        assert self.publisher is not None
        version = self.lineage.version(done)
        heartbeat = self.world.heartbeat
        phase, outside = heartbeat.phase, dict(heartbeat.outside)
        faults.fail_point("policy.publish", done)
        digest = self.publisher.publish(version)
        heartbeat.enter(phase)
        if phase not in OUTSIDE_PHASES:
            heartbeat.outside = outside  # the step counts these seconds in its own phase, and no save took them
        if self.client is not None:
            faults.fail_point("policy.published", done)
            needed = set(self.client.publish(version, digest)).union(*self.saved_policies.values())
            if self.config.kl:
                needed.add(self.lineage.version(0))
            self.publisher.policies.remove_except(needed | {version})

    def _remember_checkpoints(self) -> None:
        """Keeps the policies of the checkpoints of earlier attempts: a run may fall back to each of them."""
        for entry in list_published(self.job.store or open_run_store(self.job.folder)) if self.client else ():
            with suppress(ValueError):  # a checkpoint from before a fork, without rollouts
                if entry.manifest is not None:
                    self.saved_policies[entry.step] = RolloutCursor.from_json(entry.manifest.data).policies

    def remember(self, done: int) -> None:
        """Keeps the policies that a checkpoint after `done` steps needs to generate the same groups again."""
        self.saved_policies[done] = RolloutCursor.from_json(self.cursors[done]).policies
        while len(self.saved_policies) > self.job.config.checkpoint.keep + CURSORS_OF_CHECKPOINTS:
            del self.saved_policies[min(self.saved_policies)]

    def position(self, done: int) -> dict[str, Any]:
        """The cursor after `done` steps, for the manifest of a checkpoint. The batch of the next step may be there."""
        if not self.cursors and self.restored is not None:  # a complete run, which begins no attempt
            return self.restored
        self.remember(done)
        return self.cursors[done]

    def first(self) -> MicroBatch:
        """A micro-batch of the shapes of every one, whose tokens and labels are all 0."""
        shape = self.batch.micro, self.job.config.data.sequence
        labels = torch.zeros(shape, dtype=torch.int64)
        values = torch.zeros((*shape, COLUMNS), dtype=torch.from_numpy(np.zeros(1, self.dtype)).dtype)
        return MicroBatch((torch.zeros_like(labels), labels, values), labels.numel())

    def steps(self, first: int, end: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step in [first, end), once its rollouts are there."""
        for step in range(first, end):
            if step > first:
                self.publish(step)
            yield self._step(step)

    def _step(self, step: int) -> list[MicroBatch]:
        began = time.monotonic()
        answer = self._wait(step)
        seconds = time.monotonic() - began
        self.cursors = {step: self.cursors[step], step + 1: answer["cursor"]}
        groups = [self._read(LogPosition.from_json(group["position"])) for group in answer["groups"]]
        rows = group_rows(groups, self.config, self.job.config.data.sequence, self.dtype)
        self._record(step, answer, rows, seconds)
        return self._micro_batches(rows)

    def _wait(self, step: int) -> dict[str, Any]:
        """Waits for the batch of a step on all ranks, or until a signal stops the run before the step."""
        while True:
            told: dict[str, Any] = {}
            if self.client is not None:
                told = {"batch": self.client.batch(step, ROUND_SECONDS), "signal": self.signal_seen()}
            told = self.world.broadcast_object(told, "rollouts of the step")
            if told["batch"] is not None:
                batch: dict[str, Any] = told["batch"]
                return batch
            if told["signal"]:
                raise StoppedBySignal(told["signal"], step)

    def _read(self, position: LogPosition) -> RolloutGroup:
        """A group of the batch. If its record cannot be read any more, another attempt generates it again."""
        try:
            return RolloutGroup.decode(self.reader.read(position))
        except (DataError, InvalidRollout) as error:
            raise MeshwrightError(f"a rollout of the batch cannot be read: {error}") from None

    def _micro_batches(self, rows: PolicyRows) -> list[MicroBatch]:
        batches = []
        for start in range(
            self.coordinate * self.batch.local, (self.coordinate + 1) * self.batch.local, self.batch.micro
        ):
            part = slice(start, start + self.batch.micro)
            arrays = (rows.tokens[part], rows.labels[part], rows.values[part])
            tensors = tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
            batches.append(MicroBatch(tensors, int((rows.labels[part] != IGNORE_INDEX).sum())))
        return batches

    def _record(self, step: int, answer: dict[str, Any], rows: PolicyRows, seconds: float) -> None:
        """Records which groups a step trains on and which it leaves out, and the state of the queue."""
        groups, status = answer["groups"], answer["status"]
        without_signal = [group for group in answer["dropped"] if group["cause"] == "no_signal"]
        rewards = [reward for group in (*groups, *without_signal) for reward in group["rewards"]]
        staleness = [group["staleness"] for group in groups]
        dropped = {cause: amount[0] for cause, amount in answer["cursor"]["counts"]["dropped"].items()}
        self.facts = {
            "reward": float(np.mean(rewards)),
            "reward_std": float(np.std(rewards)),
            "completion_tokens": rows.valid_targets / len(rows),
            "staleness": float(np.mean(staleness)),
            "mismatch": rows.mismatch.mean_difference,
            "queue_depth": float(answer["cursor"]["counts"]["in_flight"][0]),
            "rejected": float(sum(dropped.values())),
        }
        if self.world.rank == 0:
            self.log.write(
                "rollouts",
                step=step,
                groups=[[group["group"], group["version"], group["prompt_id"]] for group in groups],
                positions=[group["position"] for group in groups],
                reward=round(self.facts["reward"], 6),
                rewards=[round(float(np.mean(group["rewards"])), 6) for group in groups],
                dropped=[[group["group"], group["version"], group["cause"]] for group in answer["dropped"]],
                staleness=max(staleness),
                counts=answer["cursor"]["counts"],
                log=answer["cursor"]["position"],
                lineage=answer["cursor"]["lineage"],
                mismatch=rows.mismatch.to_json(),
                wait_seconds=round(seconds, 6),
                generators=status["generators_connected"],
                generator_idle_seconds=status["generator_idle_seconds"],
                generator_seconds=status["generator_seconds"],
            )

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.publisher is not None:
            self.publisher.close()
        self.reader.close()
