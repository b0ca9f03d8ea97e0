"""Looks up rollouts in the records of a run: those of a step, and what became of a rollout. Torch-free.

Everything is read again from the rollout log and from the events; no state of the queue is trusted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.io import read_json
from meshwright.base.models.initial_model import load_run_config
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.data.character_tokenizer import CharacterTokenizer
from meshwright.core.data.sample_lookup import SampleLookup, lookup_from_identity
from meshwright.errors import ConfigError, DataError, MeshwrightError
from meshwright.rl.log.interface import LogPosition, RolloutReader
from meshwright.rl.log.open_log import open_rollout_reader
from meshwright.rl.lookup.fates import FoundRecord, judge_records
from meshwright.rl.lookup.steps import ConsumedGroup, RolloutStep, RolloutSteps, read_rollout_steps
from meshwright.rl.rollout import InvalidRollout, Rollout, RolloutGroup
from meshwright.rl.tasks.tokenizer import Tokenizer, open_text_tokenizer
from meshwright.rl.version import PolicyVersion

ROLLOUT_ID = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,6})@([0-9]{1,9})\.([0-9]{1,15}))?")
"""A group, such as 12, or a rollout of a policy version, such as 12.3@1.7."""
MAX_DAMAGE = 16
"""Damaged places of the log that an answer names."""
MAX_PROMPT_TOKENS = 1 << 16


@dataclass(frozen=True)
class RolloutLookup:
    """The records of a run that trains on rollouts."""

    folder: RunFolder
    samples: SampleLookup
    run_id: str
    group_size: int
    staleness: int
    tokenizer: Tokenizer | None
    """None if the tokenizer of the run cannot be opened"""

    def show(self, step: int, rank: int | None = None) -> dict[str, Any]:
        """The rollouts of a step in the order of its batch; with a rank, only those of the rank."""
        layout = self.samples.layout
        if step < 0:
            raise ConfigError(f"--step {step} is negative", "expected at least 0")
        if rank is not None and not 0 <= rank < layout.ranks:
            raise ConfigError(f"--rank {rank}: the run has {layout.ranks} rank(s)", f"expected 0 to {layout.ranks - 1}")
        steps = read_rollout_steps(self.folder, lambda number, _first, _frontier: number == step)
        found = steps.attempts_of(step)
        if not found:
            raise ConfigError(
                f"{self.folder.root}: no rollouts of step {step} are on record", "expected a step that the run has done"
            )
        completed = [each for each in found if (step, each.attempt) in steps.completed]
        shown = (completed or found)[-1]
        assert shown.counts is not None
        reader = open_rollout_reader(self.folder, self.run_id)
        try:
            rollouts = [row for group in shown.groups if group.place >= 0 for row in self._rows(shown, group, reader)]
        finally:
            reader.close()
        located = self._has_layout_of(steps, shown.attempt)
        if not located:
            rollouts = [row | {"rank": None, "micro_step": None} for row in rollouts]
        if rank is not None and not located:
            raise ConfigError(
                f"--rank {rank}: attempt {shown.attempt}, which ran step {step}, had another layout than the newest"
                " attempt, whose placement is recorded",
                "try without --rank",
            )
        if rank is not None:
            reader_rank = layout.reader_rank(layout.data_coordinate(rank))
            rollouts = [row for row in rollouts if row["rank"] == reader_rank]
        left_out = [
            {
                "group": group.group,
                "version": str(group.version),
                "staleness": step - group.version.step,
                "cause": group.fate,
            }
            for group in shown.groups
            if group.place < 0
        ]
        return {
            "step": step,
            "attempt": shown.attempt,
            "completed": bool(completed),
            "lost_timeline": steps.is_lost(shown),
            "repeated": len(completed) - 1 if completed else 0,
            **({"rank": rank} if rank is not None else {}),
            "staleness_bound": self.staleness,
            "rollouts": rollouts,
            "left_out": left_out,
            "counts": shown.counts.to_json(),
            "conserved": shown.counts.conserved,
            "log": shown.log.to_json(),
        }

    def find(self, rollout: str) -> dict[str, Any]:
        """What became of a rollout, or of every record of a group."""
        matched = ROLLOUT_ID.fullmatch(rollout)
        if matched is None:
            raise ConfigError(
                f"--rollout {rollout!r} is not the id of a rollout",
                "expected a group and a rollout with their policy version, such as 12.3@1.7, or a group, such as 12",
            )
        number = int(matched[1])
        index = int(matched[2]) if matched[2] else None
        version = PolicyVersion(int(matched[3]), int(matched[4])) if matched[3] else None
        if index is not None and index >= self.group_size:
            raise ConfigError(
                f"--rollout {rollout}: a group has {self.group_size} rollouts", f"expected 0 to {self.group_size - 1}"
            )
        steps = read_rollout_steps(self.folder, lambda _step, first, frontier: first <= number < frontier)
        counted = steps.counted()
        reader = open_rollout_reader(self.folder, self.run_id)
        try:
            damaged, records = judge_records(reader, number, counted, steps.lineages_of(counted), self.staleness)
        finally:
            reader.close()
        chosen = [record for record in records if version is None or record.group.version == version]
        answer: dict[str, Any] = {
            "rollout": rollout,
            "group": number,
            "prompt_id": int(self.samples.stream.sample_ids(np.array([number], np.uint64))[0]),
            "records": [self._describe(record, steps, index) for record in chosen],
            "other_versions": sorted({str(record.group.version) for record in records} - {str(version)})
            if version is not None
            else [],
            "lost_training": self._lost_training(number, version, steps),
            "frontier": counted[-1].frontier if counted else 0,
            "lineage": steps.history.to_json() if steps.history is not None else None,
            "damaged": damaged[:MAX_DAMAGE],
        }
        unread = self._unread(number, version, counted, records, damaged)
        answer["records"] += unread
        answer["fate"] = summarize_fate(answer["records"])
        return answer

    def _unread(
        self,
        number: int,
        version: PolicyVersion | None,
        counted: Sequence[RolloutStep],
        records: Sequence[FoundRecord],
        damaged: Sequence[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """What is known of records of a group that cannot be read: the step that consumed one, or a cursor."""
        unread = []
        places = {tuple(damage["position"]): damage["reason"] for damage in damaged}
        for step in counted:
            for group in step.groups:
                read = any(record.step is step and record.consumed is group for record in records)
                if group.group == number and not read and version in (None, group.version):
                    position = group.position.to_json() if group.position is not None else None
                    reason = places.get(tuple(position or ()), "its record is not in the log, or cannot be read")
                    unread.append(
                        empty_record(group.fate, str(group.version), position, reason)
                        | {"step": step.step, "attempt": step.attempt, "staleness": step.step - group.version.step}
                    )
        if not unread and places and version is not None and not any(r.group.version == version for r in records):
            for entry in list_published(open_run_store(self.folder)):
                cursor = entry.manifest.data.get("in_flight") if entry.manifest is not None else None
                for row in cursor if isinstance(cursor, list) else ():
                    if isinstance(row, list) and row[:1] == [number] and tuple(row[1:]) in places:
                        return [empty_record("damaged", str(version), row[1:], places[tuple(row[1:])])]
        return unread

    def _lost_training(self, number: int, version: PolicyVersion | None, steps: RolloutSteps) -> list[dict[str, Any]]:
        """Steps that consumed the group, and that were not completed or are on a lost timeline."""
        lost = []
        for key, step in sorted(steps.begun.items()):
            consumed = next((group for group in step.groups if group.group == number), None)
            if consumed is None or (version is not None and consumed.version != version):
                continue
            if key not in steps.completed or steps.is_lost(step):
                why = "lost_timeline" if steps.is_lost(step) else "not_completed"
                lost.append(
                    {
                        "step": step.step,
                        "attempt": step.attempt,
                        "version": str(consumed.version),
                        "fate": consumed.fate,
                        "why": why,
                    }
                )
        return lost

    def _rows(self, step: RolloutStep, group: ConsumedGroup, reader: RolloutReader) -> list[dict[str, Any]]:
        """The rollouts of a group that a step trains on, as they are in the log."""
        assert group.position is not None
        try:
            record = RolloutGroup.decode(reader.read(group.position))
        except InvalidRollout as error:
            raise DataError(f"rollout log, {group.position}: {error}", "try to restore the log from a backup") from None
        if (record.group, record.version, len(record.rollouts)) != (group.group, group.version, self.group_size):
            raise DataError(
                f"rollout log, {group.position}: expected {self.group_size} rollouts of group {group.group} and policy "
                f"version {group.version}, found {len(record.rollouts)} of group {record.group} and {record.version}",
                "the rollout log and the events are not of one run",
            )
        return [
            self._row(record, index, group.position)
            | {"staleness": step.step - group.version.step}
            | self._place(group.place * self.group_size + index)
            for index in range(self.group_size)
        ]

    def _row(self, record: RolloutGroup, index: int, position: LogPosition) -> dict[str, Any]:
        rollout: Rollout = record.rollouts[index]
        return {
            "id": record.rollout_id(index),
            "group": record.group,
            "prompt_id": record.prompt_id,
            "version": str(record.version),
            "prompt": self.text(record.prompt.tolist()[:MAX_PROMPT_TOKENS]),
            "completion": self.text(rollout.tokens.tolist()),
            "reward": rollout.reward if math.isfinite(rollout.reward) else None,
            "tokens": len(rollout.tokens),
            "truncated": rollout.truncated,
            "generator": record.generator,
            "position": position.to_json(),
        }

    def _place(self, row: int) -> dict[str, Any]:
        batch, layout = self.samples.batch, self.samples.layout
        data_rank, local = divmod(row, batch.local)
        inside = row < batch.global_
        return {
            "row": row,
            "rank": layout.reader_rank(data_rank) if inside else None,
            "micro_step": local // batch.micro if inside else None,
        }

    def _has_layout_of(self, steps: RolloutSteps, attempt: int) -> bool:
        """Whether an attempt distributed its rows as the newest attempt does, whose placement is recorded."""
        start = steps.starts.get(attempt, {})
        expected = {"layout": str(self.samples.layout), "batch": str(self.samples.batch)}
        return all(start.get(name, value) == value for name, value in expected.items())

    def _describe(self, found: FoundRecord, steps: RolloutSteps, index: int | None) -> dict[str, Any]:
        """A record of a group with its rollouts, or one of them, and where they were trained."""
        indices = range(len(found.group.rollouts)) if index is None else [index]
        rows = [self._row(found.group, each, found.position) for each in indices if each < len(found.group.rollouts)]
        described = {
            "version": str(found.group.version),
            "fate": found.fate,
            "generator": found.group.generator,
            "failure": found.group.failure,
            "position": found.position.to_json(),
            "step": found.step.step if found.step is not None else None,
            "attempt": found.step.attempt if found.step is not None else None,
            "staleness": found.step.step - found.group.version.step if found.step is not None else None,
            "on_lineage": found.fate != "lost_timeline",
        }
        if found.fate == "trained" and found.step is not None and found.consumed is not None:
            located = self._has_layout_of(steps, found.step.attempt)
            first = found.consumed.place * self.group_size
            for each, row in zip(indices, rows, strict=False):
                row |= self._place(first + each) | ({} if located else {"rank": None, "micro_step": None})
        return described | {"rollouts": rows}

    def text(self, tokens: list[int]) -> str:
        """Tokens as text; as their ids if there is no tokenizer."""
        return " ".join(map(str, tokens)) if self.tokenizer is None else self.tokenizer.decode(tokens)


def empty_record(fate: str, version: str, position: list[int] | None, problem: str) -> dict[str, Any]:
    """A record of a group that cannot be read, with what other records say of it."""
    return {
        "version": version,
        "fate": fate,
        "generator": "",
        "failure": "",
        "position": position,
        "step": None,
        "attempt": None,
        "staleness": None,
        "on_lineage": True,
        "problem": problem,
        "rollouts": [],
    }


def summarize_fate(records: Sequence[dict[str, Any]]) -> str:
    """The fate of a rollout: that of the record that was trained, else of the newest record."""
    fates = [str(record["fate"]) for record in records]
    return next((fate for fate in ("trained", "in_flight") if fate in fates), fates[-1] if fates else "never_generated")


def is_rollout_run(run: Path) -> bool:
    """Whether a run folder is that of a run that trains on rollouts."""
    if not run.is_dir():
        return False
    try:
        record = read_json(RunFolder(run).identity_file)
        return str(record["identity"].get("rl.objective", "none")) != "none"
    except (MeshwrightError, LookupError, TypeError, AttributeError):
        return False


def open_rollout_lookup(run: Path, tokenizer: str = "") -> RolloutLookup:
    """The lookup for a run folder. Its identity record is untrusted: every value is validated."""
    folder = RunFolder(run)
    folder.require_own_folders()
    samples = lookup_from_identity(folder.identity_file)
    record = read_json(folder.identity_file)
    values, run_id = record["identity"], record.get("run")
    size, staleness = values.get("rl.group_size"), values.get("rl.staleness")
    valid = type(size) is int and 0 < size <= samples.batch.global_ and samples.batch.global_ % size == 0
    if not (valid and type(staleness) is int and staleness >= 0 and isinstance(run_id, str) and run_id):
        raise ConfigError(
            f"{folder.identity_file} is not a valid identity record of a run that trains on rollouts",
            "try another run folder",
        )
    opened = open_run_tokenizer(folder, values, samples.sources, tokenizer)
    return RolloutLookup(folder, samples, run_id, size, staleness, opened)


def open_run_tokenizer(
    folder: RunFolder, values: dict[str, Any], sources: list[str], tokenizer: str
) -> Tokenizer | None:
    """The tokenizer of the prompts: one token per character for a task, else that of the run's data."""
    if not tokenizer and sources == [f"{values.get('rl.task')}, level {values.get('rl.level')}"]:
        return CharacterTokenizer()
    try:
        config = load_run_config(folder.run_file)
        data = replace(config.data, tokenizer=tokenizer) if tokenizer else config.data
        return open_text_tokenizer(replace(config, data=data))
    except MeshwrightError:
        if tokenizer:
            raise
        return None
