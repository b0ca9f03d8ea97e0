"""Audits a run of reinforcement learning from its events, its rollout log and its checkpoints. Torch-free.

It shares no code with the queue that decides what a step trains: the history of a run is what its events say, attempt
after attempt, and every rule is checked on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Version = tuple[int, int]
"""(timeline, step)"""
Position = tuple[int, int]
"""(segment, offset)"""


@dataclass(frozen=True)
class LoggedGroup:
    """A record of the rollout log."""

    position: Position
    group: int
    version: Version
    prompt_id: int
    rollouts: int
    tokens: int
    content: str
    """digest of what a step trains"""


@dataclass(frozen=True)
class TrainedStep:
    """A step of the history: the groups that it trained and left out, as its event says."""

    attempt: int
    step: int
    trained: tuple[tuple[int, Version, int], ...]
    """(group, version, prompt id)"""
    left_out: tuple[tuple[int, Version, str], ...]
    """(group, version, cause)"""
    log: Position
    """end of the log when its batch was formed"""

    @property
    def consumed(self) -> list[int]:
        return sorted([entry[0] for entry in self.trained] + [entry[0] for entry in self.left_out])


@dataclass
class AuditedRollouts:
    """The steps that led to the newest weights of a run, and to those of each checkpoint."""

    steps: list[TrainedStep] = field(default_factory=list)
    timelines: list[int] = field(default_factory=list)
    """the timeline of the policy after 0, 1, 2, ... steps"""
    at: dict[tuple[int, int], tuple[TrainedStep, ...]] = field(default_factory=dict)
    """(attempt, number of steps) -> the steps that led there"""
    timelines_at: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    twice: list[str] = field(default_factory=list)
    """groups that one history trains more than once, or out of order"""
    late: list[str] = field(default_factory=list)
    """groups beyond the staleness bound"""
    lost: list[str] = field(default_factory=list)
    """groups whose policy is not in the history of the weights that they train"""
    trained: int = 0
    """groups in all steps of all attempts"""
    staleness: int = 0
    """the largest one"""
    bound: int = 0
    """rl.staleness"""


def read_history(events: Iterable[Mapping[str, Any]], bound: int) -> AuditedRollouts:
    """Follows the events `rollouts` of all attempts. An attempt begins at the step of its first event: what earlier
    attempts had computed after that is lost, and may be trained again.
    """
    history = AuditedRollouts(bound=bound)
    attempt = 0
    for event in events:
        step = TrainedStep(
            int(event["attempt"]),
            int(event["step"]),
            tuple((int(n), (int(v[0]), int(v[1])), int(prompt)) for n, v, prompt in event["groups"]),
            tuple((int(n), (int(v[0]), int(v[1])), str(cause)) for n, v, cause in event["dropped"]),
            (int(event["log"][0]), int(event["log"][1])),
        )
        if step.attempt != attempt:
            attempt = step.attempt
            del history.steps[step.step :]
            del history.timelines[step.step + 1 :]
            if not history.timelines:
                history.timelines.append(attempt)
        append_step(history, step, bound)
    return history


def append_step(history: AuditedRollouts, step: TrainedStep, bound: int) -> None:
    where = f"attempt {step.attempt}, step {step.step}"
    if step.step != len(history.steps):
        history.twice.append(f"{where} follows step {len(history.steps) - 1}")
        return
    consumed = {group: earlier.step for earlier in history.steps for group in earlier.consumed}
    for group in step.consumed:
        if group in consumed:
            history.twice.append(f"{where}: group {group} was consumed by step {consumed[group]}")
    expected = list(range(len(consumed), len(consumed) + len(step.consumed)))
    if not history.twice and step.consumed != expected:
        history.twice.append(
            f"{where}: expected the groups from {expected[0]} to {expected[-1]}, found {step.consumed}"
        )
    for group, (timeline, at), _ in step.trained:
        history.trained += 1
        history.staleness = max(history.staleness, step.step - at)
        if not 0 <= step.step - at <= bound:
            history.late.append(f"{where}: group {group} of policy {timeline}.{at}, and rl.staleness = {bound}")
        # The initial weights are a function of the seed: every attempt has the same ones.
        elif at and history.timelines[at] != timeline:
            history.lost.append(
                f"{where}: group {group} has policy {timeline}.{at}, and the weights descend from "
                f"{history.timelines[at]}.{at}"
            )
    history.steps.append(step)
    history.timelines.append(step.attempt)
    history.at[step.attempt, len(history.steps)] = tuple(history.steps)
    history.timelines_at[step.attempt, len(history.steps)] = tuple(history.timelines)


def find_unlogged(history: AuditedRollouts, log: Iterable[LoggedGroup]) -> list[str]:
    """The groups that a step trained and that no record of the log is."""
    known = {(record.group, record.version, record.prompt_id) for record in log}
    return [
        f"step {step.step}: group {group} of policy {version[0]}.{version[1]} is not in the log"
        for steps in history.at.values()
        for step in steps[-1:]
        for group, version, prompt in step.trained
        if (group, version, prompt) not in known
    ]


@dataclass
class RejectionJudge:
    """Says why a record that no step consumed, and that is not in flight, was dropped."""

    steps: tuple[TrainedStep, ...]
    timelines: tuple[int, ...]
    bound: int
    held: dict[int, int] = field(default_factory=dict)
    """group -> step of the newest policy of its records that were no duplicates"""

    def find_cause(self, record: LoggedGroup) -> str:
        timeline, at = record.version
        if at >= len(self.timelines) or timeline != self.find_timeline(at):
            return "lost_timeline"
        formed = [step for step in self.steps if step.log <= record.position]
        if len(formed) - at > self.bound:
            return "stale"
        held = self.held.get(record.group)
        if record.group < sum(len(step.consumed) for step in formed) or (
            held is not None and len(formed) - held <= self.bound
        ):
            return "duplicate"
        # It waited: a step that is now done was the last that could have trained it, or it cannot be read any more.
        return "stale" if len(self.steps) - at > self.bound else "damaged"

    def find_timeline(self, at: int) -> int:
        """The timeline of the policy after `at` steps. The initial one is that which the first step trained."""
        return self.timelines[at] if at else self.steps[0].trained[0][1][0]


def check_counts(
    history: AuditedRollouts, log: list[LoggedGroup], attempt: int, cursor: Mapping[str, Any]
) -> list[str]:
    """What is wrong with the counts of a checkpoint's cursor: each record of the log before it must be in one class,
    and those that were dropped under their own cause. Which record of a group trained is known by group and version; a
    second one with both is a duplicate.
    """
    done = int(cursor["step"])
    where = f"checkpoint of step {done}, attempt {attempt}"
    if done and (attempt, done) not in history.at:
        return [f"{where}: no event has the batch of step {done - 1}"]
    steps = history.at.get((attempt, done), ())
    consumed = {(n, v): "trained" for step in steps for n, v, _ in step.trained}
    consumed |= {(n, v): cause for step in steps for n, v, cause in step.left_out}
    waiting = {(int(segment), int(offset)) for _, segment, offset in cursor["in_flight"]}
    judge = RejectionJudge(steps, history.timelines_at.get((attempt, done), ()), history.bound)
    amounts: dict[str, list[int]] = {}
    seen = set()
    for record in log:
        if record.position >= tuple(cursor["position"]):
            break
        key = (record.group, record.version)
        if key in consumed and key not in seen:
            kind = consumed[key]
        else:
            kind = "in_flight" if record.position in waiting else judge.find_cause(record)
        if kind not in ("duplicate", "lost_timeline"):
            judge.held[record.group] = max(record.version[1], judge.held.get(record.group, 0))
        seen.add(key)
        for name in ("generated", kind):
            amount = amounts.setdefault(name, [0, 0])
            amount[0] += record.rollouts
            amount[1] += record.tokens
    counts, none = cursor["counts"], [0, 0]
    found = {name: counts[name] for name in ("generated", "trained", "in_flight")} | counts["dropped"]
    problems = [
        f"{where}: {name} is {list(found[name])}, and the log has {amounts.get(name, none)} rollouts and tokens"
        for name in found
        if list(found[name]) != amounts.get(name, none)
    ]
    total = [sum(found[name][i] for name in found if name != "generated") for i in (0, 1)]
    if total != list(found["generated"]):
        problems.append(f"{where}: {found['generated']} are generated, and {total} are accounted for")
    if int(cursor["frontier"]) != sum(len(step.consumed) for step in steps):
        problems.append(f"{where}: the frontier is {cursor['frontier']}, and the steps consumed {len(consumed)} groups")
    return problems
