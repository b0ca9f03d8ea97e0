"""The evidence that checks read: each probe of the user's code runs once, when the first check needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from meshwright_practice.interview.exercise import BASE_CONFIG
from meshwright_practice.interview.rank.probes import read_lines
from meshwright_practice.interview.rank.recorder import Injection, ObservedRun
from meshwright_practice.interview.runner import ProbeFailed, Runner

RANKS = 2
STEPS, KILL_AT = 8, 5
"""The steps of the run that is compared with a resumed one, and the step (from 0) that the kill interrupts."""
SLOW_FETCH_AT, SLOW_LOSS_AT, DELAY = 3, 4, 0.03
RESUME_CONFIG = {"steps": STEPS, "save_every": 2, "dropout": 0.1}
MAX_LOG_FILES = 16


@dataclass(frozen=True)
class Resumed:
    """A run that was killed, and the run that continued it. Batches are the samples of all ranks per step, sorted."""

    saved_step: int
    """optimizer steps of the last complete checkpoint; 0 if there was none"""
    before: list[list[int]]
    after: list[list[int]]
    final: Mapping[str, torch.Tensor]


class RunEvidence:
    """What running the user's code has shown."""

    def __init__(self, runner: Runner, options: Mapping[str, str], answered: bool) -> None:
        self.runner, self.options, self.answered = runner, options, answered
        self.submission, self.scratch = runner.submission, runner.scratch

    @cached_property
    def single(self) -> tuple[ObservedRun, list[float], list[float]]:
        """A long run on one rank, and the losses of two equal short ones."""
        value: tuple[ObservedRun, list[float], list[float]] = self.runner.values("single", 1)[0]
        return value

    @cached_property
    def partitions(self) -> dict[tuple[int, int, int], list[tuple[list[int], list[int]]]]:
        """(samples, ranks, epoch) -> for every rank, what two calls returned."""
        value: dict[tuple[int, int, int], list[tuple[list[int], list[int]]]] = self.runner.values("partitions", 1)[0]
        return value

    @cached_property
    def batches(self) -> list[int]:
        value: list[int] = self.runner.values("batches", 1)[0]
        return value

    @cached_property
    def two_ranks(self) -> list[ObservedRun]:
        return self._train("two-ranks", {"steps": 3})

    @cached_property
    def union_gradients(self) -> list[dict[str, torch.Tensor]]:
        """For each recorded step of `two_ranks`, the gradients of one process on the samples of all ranks."""
        traces = self.two_ranks
        count = min(len(trace.steps) for trace in traces)
        steps = [index for index in range(count) if traces[0].steps[index].gradients]
        cases = [
            (traces[0].steps[index].parameters, [sample for trace in traces for sample in trace.steps[index].samples])
            for index in steps
        ]
        value: list[dict[str, torch.Tensor]] = self.runner.values("union_gradients", 1, cases)[0]
        return value

    @cached_property
    def uninterrupted(self) -> list[ObservedRun]:
        """The reference of resumes. Its records are checked as well, so one fetch and one loss are slow in it."""
        injection = Injection(slow_fetch_at=SLOW_FETCH_AT, slow_loss_at=SLOW_LOSS_AT, delay=DELAY)
        return self._train("uninterrupted", RESUME_CONFIG | {"checkpoint": "uninterrupted/checkpoint"}, injection)

    @cached_property
    def resumed(self) -> Resumed:
        return self._resume("killed", RANKS, {})

    @cached_property
    def elastic(self) -> Resumed:
        """The resume on one rank, with the same global batch."""
        return self._resume("elastic", 1, {"micro_batch": RANKS * BASE_CONFIG["micro_batch"]})

    @cached_property
    def restarts(self) -> dict[str, Any]:
        value: dict[str, Any] = self.runner.values("restarts", 1)[0]
        return value

    @cached_property
    def interrupted_saves(self) -> list[tuple[str, str]]:
        value: list[tuple[str, str]] = self.runner.values("interrupted_saves", 1)[0]
        return value

    @cached_property
    def records(self) -> dict[int, list[dict[str, Any]]]:
        """rank -> its records of the uninterrupted run. A line belongs to the rank that it names."""
        _ = self.uninterrupted
        return self._records("uninterrupted")

    @cached_property
    def failure_records(self) -> dict[int, list[dict[str, Any]]]:
        """The records of a run in which the last rank fails in its second step."""
        changes = self._folders("failing", RESUME_CONFIG | {"checkpoint": "failing/checkpoint"})
        self.runner.run("training", RANKS, changes, Injection(fail_fetch_at=1), "failing")
        return self._records("failing")

    def _train(self, name: str, changes: dict[str, Any], injection: Injection | None = None) -> list[ObservedRun]:
        return self.runner.values("training", RANKS, self._folders(name, changes), injection or Injection(), name)

    def _folders(self, name: str, changes: dict[str, Any]) -> dict[str, Any]:
        """Makes the folders of a run in the scratch folder."""
        (self.scratch / name / "log").mkdir(parents=True, exist_ok=True)
        paths = {"checkpoint": str(self.scratch / changes["checkpoint"])} if "checkpoint" in changes else {}
        return {**changes, **paths, "log_dir": str(self.scratch / name / "log")}

    def _resume(self, name: str, ranks: int, change: dict[str, Any]) -> Resumed:
        """Kills a run, and continues it on so many ranks."""
        changes = self._folders(name, RESUME_CONFIG | {"checkpoint": f"{name}/checkpoint"})
        ended = self.runner.run("training", RANKS, changes, Injection(kill_at=KILL_AT), name)
        ledgers = [read_lines(self.scratch / f"ledger-{name}-{rank}.jsonl") for rank in range(RANKS)]
        before = merged([[line["samples"] for line in lines if "samples" in line] for lines in ledgers])
        if len(before) < KILL_AT:
            errors = [(rank, end) for rank, end in enumerate(ended) if end.error and "signal" not in end.error]
            reason = self.runner.describe(*errors[0], RANKS) if errors else f"the run ended after {len(before)} steps"
            raise ProbeFailed(f"{reason}; expected {STEPS} steps")
        saved = max((line["saved"] for lines in ledgers for line in lines if "saved" in line), default=0)
        if saved == 0:
            raise ProbeFailed(f"train did not call save(path, state) in {KILL_AT} steps with save_every = 2")
        resuming = changes | change | {"resume": True}
        traces: list[ObservedRun] = self.runner.values("training", ranks, resuming, Injection(), f"{name}-resumed")
        after = merged([[step.samples for step in trace.steps] for trace in traces])
        return Resumed(saved, before, after, traces[0].final)

    def _records(self, name: str) -> dict[int, list[dict[str, Any]]]:
        found: dict[int, list[dict[str, Any]]] = {}
        for path in sorted((self.scratch / name / "log").rglob("*"))[:MAX_LOG_FILES]:
            for line in read_lines(path) if path.is_file() else []:
                if isinstance(rank := line.get("rank"), int):
                    found.setdefault(rank, []).append(line)
        return found


def merged(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The samples of all ranks per step, sorted; steps that some rank has not done are left out."""
    return [sorted(sample for samples in step for sample in samples) for step in zip(*ranks, strict=False)]
