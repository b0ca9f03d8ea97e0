"""Every rank records its own steps and its own errors, with rank, world size and step."""

from __future__ import annotations

import itertools
from typing import Any

from meshwright_practice.checks import Check
from meshwright_practice.interview.evidence import RANKS, STEPS, RunEvidence

KEYS = ("rank", "world_size", "step", "loss", "seconds")


def step_records(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of steps, in order."""
    return [line for line in lines if "loss" in line and "error" not in line]


def rank_records(evidence: RunEvidence) -> Check:
    expected = f"{STEPS} records with {', '.join(KEYS)} from each of {RANKS} ranks"
    records = {rank: step_records(lines) for rank, lines in evidence.records.items()}
    counts = {rank: len(records.get(rank, [])) for rank in range(RANKS)}
    found = "; ".join(f"rank {rank}: {count} records" for rank, count in counts.items())
    message = ""
    silent = [rank for rank, count in counts.items() if not count]
    if len(silent) == RANKS:
        message = "Append one JSON line per step to a file of the rank in config['log_dir']."
    elif silent:
        message = f"Rank {silent[0]} records nothing: what only rank 0 logs hides which rank is slow or failed."
    elif any(count != STEPS for count in counts.values()):
        message = f"Expected one record for each of {STEPS} steps."
    else:
        message = wrong_fields(records)
    return Check("rank_records", not message, expected, found, message)


def wrong_fields(records: dict[int, list[dict[str, Any]]]) -> str:
    for rank, lines in records.items():
        for line in lines:
            if missing := [key for key in KEYS if not isinstance(line.get(key), int | float)]:
                return f"A record of rank {rank} has no number for {', '.join(missing)}."
            if line["world_size"] != RANKS:
                return f"A record of rank {rank} says world_size {line['world_size']}, expected {RANKS}."
        steps = [line["step"] for line in lines]
        if any(after <= before for before, after in itertools.pairwise(steps)):
            return f"The steps of rank {rank} do not increase: {steps}."
    return ""


def rank_errors(evidence: RunEvidence) -> Check:
    """The rank that fails says so itself: the others only see that it is gone."""
    failing = RANKS - 1
    errors = [line for line in evidence.failure_records.get(failing, []) if line.get("error")]
    named = [line for line in errors if isinstance(line.get("step"), int)]
    found = f"{len(errors)} error records of rank {failing}, {len(named)} of them with a step"
    message = (
        ""
        if named
        else (
            f"Rank {failing} failed and did not record it: catch, record rank, step and error on every rank, "
            "and raise again."
        )
    )
    expected = f"rank {failing} records the error that ends it, with rank and step"
    return Check("rank_errors", bool(named), expected, found, message)
