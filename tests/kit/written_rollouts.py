"""Writes the folder of a run of reinforcement learning without a model: the queue and the log are real, the learner and
its generators are not.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.base.config import config_to_toml, load_config
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.data.character_tokenizer import CharacterTokenizer
from meshwright.core.data.stream import Stream
from meshwright.rl.log.open_log import open_rollout_log
from meshwright.rl.queue import QueueSettings, RolloutQueue, StepBatch
from meshwright.rl.queue.cursor import RolloutCursor
from meshwright.rl.rollout import Rollout, RolloutGroup
from meshwright.rl.version import PolicyVersion

RUN_ID = "0123456789abcdef"
GROUP_SIZE, GLOBAL = 2, 4
"""Two groups per step, which two ranks with one row per micro-batch train on."""
START = 1_790_000_000.0
RL = ["--rl.objective=grpo", "--rl.task=strings", f"--rl.group_size={GROUP_SIZE}", "--rl.completion_tokens=4"]


class WrittenRollouts:
    """A run whose attempts begin, complete steps and are lost as a test says."""

    def __init__(self, root: Path, staleness: int = 1) -> None:
        self.folder = RunFolder(root)
        for name in ("events", "attempts/0001", "checkpoints"):
            (root / name).mkdir(parents=True)
        settings = [*RL, f"--rl.staleness={staleness}", f"--batch.global={GLOBAL}", "--layout.replicate=2"]
        self.config = load_config(overrides=settings, ranks=2, steps=100)
        self.stream = Stream.from_lengths(1, GLOBAL, [1000], [1.0], 0.01)
        self.folder.run_file.write_text(config_to_toml(self.config))
        self.folder.identity_file.write_text(json.dumps(self.identity(staleness)))
        self.log = open_rollout_log(self.folder, RUN_ID, 1 << 20)
        queue = QueueSettings(GROUP_SIZE, GLOBAL // GROUP_SIZE, staleness, "newest", True, 100)
        self.queue = RolloutQueue(queue, self.log, self.prompt_id)
        self.attempt, self.now = 0, START
        self.batch: StepBatch | None = None

    def identity(self, staleness: int) -> dict[str, Any]:
        values = {"rl.objective": "grpo", "rl.group_size": GROUP_SIZE, "rl.staleness": staleness}
        return {
            "run": RUN_ID,
            "identity": values | {"rl.task": "strings", "rl.level": 1},
            "placement": {"batch.micro": 1, "layout.replicate": 2},
            "sources": [{"name": "strings, level 1"}],
            "stream": self.stream.to_json(),
        }

    def prompt_id(self, group: int) -> int:
        return int(self.stream.sample_ids(np.array([group], np.uint64))[0])

    def write(self, kind: str, **fields: Any) -> None:
        self.now += 0.25
        record = {"kind": kind, "attempt": self.attempt, "rank": 0, "time": self.now, **fields}
        with self.folder.events(0).open("a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def begin(self, cursor: RolloutCursor | None = None, fork: bool = False) -> None:
        """A new attempt, which resumes from a cursor, forks the run there, or begins the run."""
        self.attempt += 1
        step = cursor.step if cursor is not None else 0
        self.queue.begin(cursor, self.attempt, step, fork)
        layout, batch = "replicate 2", "global 4 = micro 1 x data-parallel 2 x accumulation 2"
        self.write("start", steps=100, ranks=2, layout=layout, batch=batch, unit="tokens")
        if cursor is not None:
            self.write("restored", step=step, checkpoint="step", seconds=0.1, changes=[])
        self.queue.publish(self.queue.lineage.version(step))

    def generate(self, count: int, kind: str = "train") -> list[RolloutGroup]:
        """The next groups that generators may generate; `kind` is that of their rewards."""
        groups = []
        for _ in range(count):
            assignment = self.queue.assign("one")
            assert assignment is not None
            groups.append(self.make_group(assignment.group, assignment.version, kind))
            self.queue.add(groups[-1:])
        return groups

    def make_group(self, group: int, version: PolicyVersion, kind: str = "train") -> RolloutGroup:
        encode, rollouts = CharacterTokenizer().encode, []
        for index in range(GROUP_SIZE):
            reward = {"train": 0.25 + index / 2, "no_signal": 1.0, "failed": math.nan}[kind]
            tokens = np.array([*encode("ab"[: index + 1]), 0], np.int32)
            values = np.full(len(tokens), -0.5)
            rollouts.append(Rollout(tokens, values, values, np.empty(0), reward))
        failure = "the reward raised ValueError: no" if kind == "failed" else ""
        prompt = np.array(encode("copy a="), np.int32)
        return RolloutGroup(group, self.prompt_id(group), version, prompt, tuple(rollouts), "one", failure)

    def step(self, complete: bool = True) -> StepBatch:
        """Forms the batch of the next step, and completes the step."""
        number = self.queue.status()["step"]
        batch = self.queue.batch(number)
        assert batch is not None
        described, cursor = batch.to_json(), batch.cursor.to_json()
        groups = described["groups"]
        self.write(
            "rollouts",
            step=number,
            groups=[[group["group"], group["version"], group["prompt_id"]] for group in groups],
            positions=[group["position"] for group in groups],
            rewards=[0.5 for _ in groups],
            dropped=[[group["group"], group["version"], group["cause"]] for group in described["dropped"]],
            staleness=batch.staleness,
            counts=cursor["counts"],
            log=cursor["position"],
            lineage=cursor["lineage"],
            mismatch={},
            wait_seconds=0.075,
            generators=1,
            generator_idle_seconds=0.02 * number,
            generator_seconds=0.1 * (number + 1),
        )
        if complete:
            phases = {"fetch": 0.075, "copy": 0.0, "forward": 0.01, "backward": 0.01, "sync": 0.0, "update": 0.005}
            metrics = {"reward": 0.5 + number / 100, "reward_std": 0.25, "kl": 0.01, "entropy": 2.0 - number / 10}
            metrics |= {"clip_share": 0.1, "staleness": float(batch.staleness), "mismatch": 1e-6, "queue_depth": 0.0}
            self.write("step", step=number, seconds=0.1, loss=0.1, phases=phases, tokens=10, samples=4, metrics=metrics)
            self.queue.publish(self.queue.lineage.version(number + 1))
        return batch

    def complete(self, steps: int) -> RolloutCursor:
        """Generates and completes steps; returns the cursor after them."""
        for _ in range(steps):
            while self.queue.batch(self.queue.status()["step"]) is None:
                self.generate(1)
            cursor = self.step().cursor
        return cursor

    def close(self) -> None:
        self.log.close()


def write_restarted_run(root: Path) -> WrittenRollouts:
    """A run with every fate: its first attempt completes three steps, of which a checkpoint has two, begins a fourth,
    and is killed; the second attempt repeats the third step and completes two more.
    """
    run = WrittenRollouts(root)
    run.begin()
    first = run.generate(1)
    run.queue.add(first)  # group 0 again: a duplicate
    run.generate(1, "no_signal")
    run.generate(1, "failed")
    run.generate(1)
    run.step()  # trains 0 and 3, leaves out 1 and 2
    run.generate(2)
    cursor = run.step().cursor
    run.generate(4)
    run.step()
    run.generate(2)
    run.step(complete=False)
    run.generate(0)
    run.begin(cursor)
    while run.queue.batch(run.queue.status()["step"]) is None:
        run.generate(1)
    run.step()
    for _ in range(2):
        while run.queue.batch(run.queue.status()["step"]) is None:
            run.generate(1)
        run.step()
    stale = run.make_group(run.queue.status()["frontier"], run.queue.lineage.version(2))
    run.queue.add([stale])
    run.generate(1)
    run.close()
    return run
