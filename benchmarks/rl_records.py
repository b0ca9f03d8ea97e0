"""The runs that the benchmark `rl` measures, and what their records say: rewards over time, and prompts per step."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from meshwright.base.config import RunConfig, load_config
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder

EXAMPLE = Path(__file__).parent.parent / "examples" / "rl.toml"
LAST_SHARE = 0.2
"""The reward after a time is the mean over the steps in this last share of it: single steps have few prompts."""

Curve = list[tuple[float, float]]
"""Seconds since the first request for rollouts, and the mean reward of a step's rollouts."""


def load_run_config(overrides: list[str]) -> RunConfig:
    """The example with other settings, on one rank with one thread."""
    fixed = ["--launch.device=cpu", "--launch.threads=1"]
    return with_device_defaults(load_config(EXAMPLE, overrides=[*fixed, *overrides], ranks=1), "cpu")


def reward_after(curve: Curve, seconds: float) -> float:
    """The reward of the newest step where none ended in the last share: a policy that answers every prompt right has no
    group to train on.
    """
    values = [reward for time, reward in curve if (1 - LAST_SHARE) * seconds <= time <= seconds]
    return statistics.mean(values) if values else [reward for time, reward in curve if time <= seconds][-1]


def rollout_events(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(RunFolder(folder).events(0)) if event["kind"] == "rollouts"]


def own_curve(folder: Path) -> Curve:
    events = rollout_events(folder)
    began = events[0]["time"] - events[0]["wait_seconds"]
    return [(event["time"] - began, event["reward"]) for event in events]


def own_history(folder: Path, group_size: int) -> dict[int, list[int]]:
    """Step -> the rollouts that it has trained; of a step that several attempts have trained, the last one counts."""
    return {
        event["step"]: [number * group_size + index for number, *_ in event["groups"] for index in range(group_size)]
        for event in rollout_events(folder)
    }


def peer_records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def peer_curve(folder: Path) -> Curve:
    records = peer_records(folder)
    began = next(record["time"] for record in records if "begin" in record)
    return [(record["time"] - began, statistics.mean(record["rewards"])) for record in records if "rewards" in record]


def peer_history(folder: Path) -> dict[int, list[int]]:
    """Step -> the rollouts that it has trained, as `own_history`."""
    return {record["step"]: record["trained"] for record in peer_records(folder) if "trained" in record}


def compare_histories(killed: dict[int, list[int]], undisturbed: dict[int, list[int]]) -> dict[str, int]:
    """Rollouts of the surviving steps against those of an undisturbed run of as many steps. A rollout is one of the
    completions of a prompt at a position of the prompt stream, whichever policy has generated it.
    """
    counts = Counter(number for numbers in killed.values() for number in numbers)
    expected = {number for numbers in undisturbed.values() for number in numbers}
    return {
        "lost": len(expected - counts.keys()),
        "trained_twice": sum(count - 1 for count in counts.values()),
        "steps_with_other_rollouts": sum(killed.get(step) != numbers for step, numbers in undisturbed.items()),
    }
