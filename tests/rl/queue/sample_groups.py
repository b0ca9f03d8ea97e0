"""Groups of rollouts, and queues with a learner and generators, for tests of the rollout queue."""

from __future__ import annotations

import math

import numpy as np

from meshwright.rl.queue import QueueSettings, RolloutQueue, StepBatch
from meshwright.rl.rollout import Rollout, RolloutGroup
from meshwright.rl.version import PolicyVersion

GROUP_SIZE = 2


def prompt_id(group: int) -> int:
    return 1000 + group * 7


def make_group(group, version, generator="a", kind="train", length=1, size=GROUP_SIZE, prompt=None):
    """A group whose content is trainable (`train`), has equal rewards (`no_signal`), or no reward (`failed`)."""
    rollouts = []
    for index in range(size):
        reward = {"train": float(index), "no_signal": 1.0, "failed": math.nan}[kind]
        values = np.full(length, -0.5)
        rollouts.append(Rollout(np.arange(length, dtype=np.int32), values, values, np.empty(0), reward))
    number = prompt_id(group) if prompt is None else prompt
    return RolloutGroup(group, number, version, np.array([1], np.int32), tuple(rollouts), generator)


def make_settings(**changes) -> QueueSettings:
    return QueueSettings(**{"group_size": GROUP_SIZE, "groups_per_step": 2, **changes})


def begin_queue(log, **changes) -> RolloutQueue:
    queue = RolloutQueue(make_settings(**changes), log, prompt_id)
    queue.begin(None, timeline=1, step=0)
    queue.publish(PolicyVersion(1, 0))
    return queue


def generate_all(queue: RolloutQueue, kind_of=lambda group: "train", generator="a") -> list[int]:
    """Generates every group that is permitted; returns their numbers."""
    groups = []
    while assignment := queue.assign(generator):
        group = make_group(assignment.group, assignment.version, generator, kind_of(assignment.group))
        assert [receipt.verdict for receipt in queue.add([group])] == ["accepted"]
        groups.append(assignment.group)
    return groups


def complete_step(queue: RolloutQueue, step: int) -> StepBatch:
    batch = queue.batch(step)
    assert batch is not None
    queue.publish(queue.lineage.version(step + 1))
    return batch


def numbers(batch: StepBatch) -> list[int]:
    return [header.group for header in batch.groups]
