"""A simulation of the rollout queue: learners that restart, generators that die, and records that arrive anyhow."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from meshwright.rl.queue import RolloutCursor, RolloutQueue, StepBatch
from meshwright.rl.queue.recount import recount
from meshwright.rl.version import PolicyVersion
from tests.rl.queue.memory_log import MemoryLog
from tests.rl.queue.sample_groups import make_group, make_settings, prompt_id

KINDS = ("train", "train", "train", "no_signal", "failed")


class BrokenRule(Exception):
    """The queue has broken one of its rules."""


def require(condition, *found):
    if not condition:
        raise BrokenRule(*found)


def content(seed: int, group: int, version: PolicyVersion, fixed: bool) -> tuple[str, int]:
    """Kind and length of a group: a function of seed and group, and of the step of its policy."""
    draw = random.Random(f"{seed}/{group}/{version.step}")
    return draw.choice(KINDS), draw.randint(1, 9)


@dataclass
class Simulation:
    """One schedule. Every random choice comes from `seed`."""

    seed: int
    policy: str
    staleness: int
    target: int = 6
    """steps"""
    disturbed: bool = True
    log: MemoryLog = field(default_factory=MemoryLog)
    queue_class: type[RolloutQueue] = RolloutQueue
    batches: list[StepBatch] = field(default_factory=list)
    """of the current lineage"""
    verdicts: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.settings = make_settings(policy=self.policy, staleness=self.staleness, filter_budget=200)
        self.queue = self.queue_class(self.settings, self.log, prompt_id)
        self.timeline = 1
        self.held = []  # (generator, assignment), not delivered yet
        self.sent = []  # groups that were delivered, for duplicates
        self.published = [PolicyVersion(1, 0)]  # of all timelines
        self.queue.begin(None, 1, 0)
        self.queue.publish(PolicyVersion(1, 0))

    def run(self) -> list[StepBatch]:
        for _ in range(4000):
            if len(self.batches) == self.target:
                return self.batches
            self.act()
        raise BrokenRule("no progress", self.queue.status())

    def act(self) -> None:
        draw = self.random.random()
        if draw < 0.35:
            self.assign()
        elif draw < 0.70:
            self.deliver()
        elif draw < 0.85 or not self.disturbed:
            self.train()
        elif draw < 0.90:
            self.release()
        elif draw < 0.94:
            self.deliver_again()
        elif draw < 0.98:
            self.forge()
        else:
            self.restart()

    def assign(self) -> None:
        generator = self.random.choice("abc")
        if (assignment := self.queue.assign(generator)) is not None:
            require(assignment.version in self.queue.policies_needed(), "policy not kept", assignment)
            require(
                assignment.group not in {held.group for name, held in self.held if name != "dead"}, "assigned twice"
            )
            self.held.append((generator, assignment))

    def deliver(self) -> None:
        if self.held:
            generator, assignment = self.held.pop(self.random.randrange(len(self.held)))
            self.send(generator, assignment.group, assignment.version)

    def send(self, generator: str, number: int, version: PolicyVersion) -> None:
        kind, length = content(self.seed, number, version, self.policy == "fixed")
        group = make_group(number, version, generator, kind, length)
        before = len(self.log.payloads)
        failing = self.disturbed and self.random.random() < 0.03
        self.log.fail_next = failing and self.random.random() < 0.5
        self.log.lose_next_answer = failing and not self.log.fail_next
        try:
            (receipt,) = self.queue.add([group])
        except OSError:
            receipt = self.queue.add([group])[0]  # the service tries again
        finally:
            self.log.fail_next = self.log.lose_next_answer = False
        self.verdicts[receipt.verdict] += 1
        appended = receipt.verdict not in ("not_permitted", "invalid")
        require(appended == (len(self.log.payloads) > before), "appended", receipt)
        self.sent.append((generator, number, version))

    def release(self) -> None:
        generator = self.random.choice("abc")
        self.queue.release(generator)
        lost = self.random.random() < 0.5  # killed; or late: it still sends
        kept = [("dead" if name == generator else name, held) for name, held in self.held]
        self.held = [entry for entry in kept if not (lost and entry[0] == "dead")]

    def deliver_again(self) -> None:
        if self.sent:
            self.send(*self.random.choice(self.sent))

    def forge(self) -> None:
        """A group that was not assigned, of any policy version."""
        status = self.queue.status()
        number = self.random.randrange(max(0, status["frontier"] - 2), status["permitted"] + 3)
        forged = PolicyVersion(self.random.randint(1, self.timeline + 1), self.random.randint(0, self.target))
        self.send("forger", number, self.random.choice([*self.published, forged]))

    def train(self) -> None:
        step = len(self.batches)
        batch = self.queue.batch(step)
        if batch is None:
            return
        require(self.queue.batch(step) is batch, "a batch changes")
        self.check(batch)
        if self.disturbed and self.random.random() < 0.2:
            self.restart()  # after the batch is formed, before the step is complete
            return
        self.batches.append(batch)
        self.published.append(self.queue.lineage.version(step + 1))
        self.queue.publish(self.published[-1])

    def restart(self) -> None:
        """A new attempt from any cursor of this lineage, sometimes with a new service."""
        self.timeline += self.random.randint(1, 2)
        step = self.random.randint(max(0, len(self.batches) - 3), len(self.batches))
        self.batches = self.batches[:step]
        first = RolloutCursor.initial(1, self.policy == "fixed")
        cursor = RolloutCursor.from_json((self.batches[-1].cursor if step else first).to_json())
        if self.random.random() < 0.3:
            self.queue = self.queue_class(self.settings, self.log, prompt_id)
            self.held = []
        else:
            self.held = [("dead", held) for _, held in self.held]  # may be assigned to others now
        self.queue.begin(cursor, self.timeline, step)
        self.queue.publish(self.queue.lineage.version(step))

    def check(self, batch: StepBatch) -> None:
        """The rules of a step, by the log and by a count of its own."""
        earlier = [header.group for done in self.batches for header in done.groups]
        groups = [header.group for header in batch.groups]
        require(not set(groups) & set(earlier), "trained twice", groups)
        require(groups == sorted(groups) and len(groups) == self.settings.groups_per_step, "order", groups)
        for header in batch.groups:
            require(0 <= batch.step - header.version.step <= self.staleness, "staleness", batch.step, header)
            require(self.queue.lineage.contains(header.version), "lost timeline", header)
        require(batch.cursor.counts.conserved, "conservation", batch.cursor)
        try:
            counts = recount(self.log, batch.cursor, [*self.batches, batch], self.staleness)
        except Exception as error:
            raise BrokenRule(str(error)) from error
        require(counts == batch.cursor.counts, "recount", counts, batch.cursor.counts)


def trained_sequence(batches: list[StepBatch]) -> list[list[tuple[int, int, tuple[float, ...], tuple[int, ...]]]]:
    """What the steps train on, without timelines: group, step of the policy, rewards and lengths."""
    return [[(h.group, h.version.step, h.rewards, h.tokens) for h in batch.groups] for batch in batches]
