"""Finds the first step, and the first parameter, in which two runs part."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from meshwright.base.checkpoint.listing import CheckpointEntry
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.scratch_folder import ScratchFolder
from meshwright.base.user_code.user_code import NO_USER_CODE, UserCode
from meshwright.core.checkpoint.inspect import reporting_deletion
from meshwright.core.checkpoint.unsharded import compare_checkpoints, read_full_tensor
from meshwright.core.checkpoint.verify import find_damage
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.launch.scratch_run import scratch_job
from meshwright.errors import CheckpointError
from meshwright.prover.replay.digest_recorder import SavedTensor, digest_rank, join_digests
from meshwright.prover.replay.records import compare_fields, event_fields
from meshwright.prover.replay.run_difference import (
    FirstDifference,
    RunDifference,
    RunDigests,
    different_settings,
    find_first_difference,
    require_same_model,
)
from meshwright.prover.replay.start import ReplaySource

CheckpointPair = tuple[CheckpointEntry, CheckpointEntry]
Starts = tuple[CheckpointEntry | None, CheckpointEntry | None]


def bisect_runs(run: RunFolder, other_run: RunFolder, user: UserCode = NO_USER_CODE) -> RunDifference:
    """Compares the records of two runs, then their common checkpoints, and replays both from the newest state that they
    share up to the step in which they part. Runs of reinforcement learning are compared without a replay. The run
    folders are only read.
    """
    runs = ReplaySource.open(run), ReplaySource.open(other_run)
    require_same_model(runs[0].identity["identity"], runs[1].identity["identity"])
    difference = compare_records(runs)
    pairs = common_checkpoints(runs)
    equal, different = search_checkpoints(pairs)
    difference = replace(
        difference,
        equal_checkpoint=equal[0].step if equal is not None else None,
        different_checkpoint=different[0].step if different is not None else None,
    )
    if difference.agree:
        return difference
    if any(run.config.rl.enabled for run in runs):  # the rollouts of a step are not generated again
        return measure_checkpoints(difference, different)
    last = last_step(difference)
    first, digests, starts = replay_both(runs, equal, last, user)
    one, other = different or (None, None)
    reproduced = is_reproduced(runs[0], digests[0], one), is_reproduced(runs[1], digests[1], other)
    difference = replace(difference, first=first, reproduced=reproduced)
    if first is not None and first.parameter:
        return measure_replayed(runs, starts, difference, first, user)
    return measure_checkpoints(difference, different)


def compare_records(runs: tuple[ReplaySource, ReplaySource]) -> RunDifference:
    """The settings that differ, and the first step whose records do."""
    one, other = (run.records.steps for run in runs)
    common = sorted(one.keys() & other.keys())
    step = next((step for step in common if compare_fields(one[step], other[step])), None)
    at = step if step is not None else common[-1] if common else 0
    starts = runs[0].records.start_of(at), runs[1].records.start_of(at)
    settings = different_settings(runs[0].identity, runs[1].identity, starts)
    found = compare_fields(one[step], other[step]) if step is not None else {}
    return RunDifference(len(common), settings, step, found)


def common_checkpoints(runs: tuple[ReplaySource, ReplaySource]) -> list[CheckpointPair]:
    """The checkpoints of the same number of steps that both runs have, oldest first."""
    one, other = (
        {entry.step: entry for entry in reversed(run.checkpoints()) if entry.manifest is not None} for run in runs
    )
    return [(one[step], other[step]) for step in sorted(one.keys() & other.keys())]


def search_checkpoints(pairs: list[CheckpointPair]) -> tuple[CheckpointPair | None, CheckpointPair | None]:
    """(the newest pair that is equal, the oldest one that differs), by a binary search: runs that have parted do not
    meet again. A damaged checkpoint is left out.
    """
    equal: CheckpointPair | None = None
    different: CheckpointPair | None = None
    low, high = 0, len(pairs)
    while low < high:
        middle = (low + high) // 2
        pair = pairs[middle]
        if find_damage(pair[0]) or find_damage(pair[1]):
            pairs = pairs[:middle] + pairs[middle + 1 :]
            high -= 1
            continue
        with reporting_deletion(*pair):
            same = next(iter(compare_checkpoints(*pair)), None) is None
        if same:
            equal, low = pair, middle + 1
        else:
            different, high = pair, middle
    return equal, different


def last_step(difference: RunDifference) -> int:
    """The last step that is replayed: by its end the runs are known to have parted."""
    known = [difference.recorded_step, (difference.different_checkpoint or 0) - 1]
    return min(step for step in known if step is not None and step >= 0)


def replay_both(
    runs: tuple[ReplaySource, ReplaySource], equal: CheckpointPair | None, last: int, user: UserCode
) -> tuple[FirstDifference | None, tuple[RunDigests, RunDigests], Starts]:
    """Replays both runs up to a step: from the newest checkpoint that is equal in both, else from the newest one of
    each; if the states differ there already, from the initial state.
    """
    starts: Starts = equal or (runs[0].checkpoint_before(last), runs[1].checkpoint_before(last))
    digests = digest_both(runs, starts, last, user)
    first = find_first_difference(*digests)
    if first is not None and first.quantity == "state" and equal is None and first.step:
        with suppress(CheckpointError):
            initial = runs[0].initial_state(), runs[1].initial_state()
            digests, starts = digest_both(runs, initial, last, user), initial
            first = find_first_difference(*digests)
    return first, digests, starts


def is_reproduced(run: ReplaySource, digests: RunDigests, entry: CheckpointEntry | None) -> bool:
    """Whether the replayed steps are bitwise those that the run recorded, and the parameters after them those of a
    checkpoint of the run.
    """
    known = run.records.steps
    if any(compare_fields(fields, known[step]) for step, fields in digests.records.items() if step in known):
        return False
    parameters = digests.parameters.get(entry.step, {}) if entry is not None else {}
    return entry is None or all(
        xxhash.xxh3_128_hexdigest(np.ascontiguousarray(read_full_tensor(entry, f"model/{name}")).tobytes()) == digest
        for name, digest in parameters.items()
        if entry.manifest is not None and f"model/{name}" in entry.manifest.tensors  # frozen ones are not in it
    )


def digest_both(
    runs: tuple[ReplaySource, ReplaySource],
    starts: Starts,
    last: int,
    user: UserCode,
    saved: tuple[SavedTensor, SavedTensor] | None = None,
) -> tuple[RunDigests, RunDigests]:
    results = []
    for index, (run, start) in enumerate(zip(runs, starts, strict=True)):
        with scratch_job(run.config_at(last), run.folder, start, user) as job:
            tensor = saved[index] if saved is not None else None
            ranks = run_ranks(
                digest_rank, job.layout.ranks, job, last, tensor, timeout=math.inf, launch=job.config.launch
            )
        results.append(join_digests(ranks, {event["step"]: event_fields(event) for event in ranks[0].records}))
    return results[0], results[1]


def measure_replayed(
    runs: tuple[ReplaySource, ReplaySource],
    starts: Starts,
    difference: RunDifference,
    first: FirstDifference,
    user: UserCode,
) -> RunDifference:
    """Replays both runs once more up to the step in which they part, and compares the first tensor that differs."""
    folder = ScratchFolder()
    try:
        gradient, number = first.quantity not in ("state", "update"), first.step + (first.quantity == "update")
        paths = [folder.path / f"{index}.npy" for index in (0, 1)]
        saved = [SavedTensor(first.parameter, gradient, number, path) for path in paths]
        last = max(first.step - (first.quantity == "state"), *(start.step if start else 0 for start in starts))
        digest_both(runs, starts, last, user, (saved[0], saved[1]))
        elements, largest, relative = compare_files(paths[0], paths[1])
        return replace(difference, parameter=first.parameter, elements=elements, largest=largest, relative=relative)
    finally:
        folder.remove()


def compare_files(one: Path, other: Path) -> tuple[int, float, float]:
    """How two tensors in files differ: elements, the largest difference, and that relative to the largest value."""
    a, b = (np.load(path, mmap_mode="r", allow_pickle=False) for path in (one, other))
    with np.errstate(all="ignore"):
        equal = (a == b) | (np.isnan(a) & np.isnan(b))
        distance = np.where(equal, 0.0, np.abs(a.astype("f8") - b.astype("f8")))
        scale = float(np.nanmax(np.abs(a), initial=0.0))
    largest = float(np.max(distance, initial=0.0))  # NaN if one of two elements is NaN
    return int(np.count_nonzero(~equal)), largest, largest / scale if scale else float(largest > 0)


def measure_checkpoints(difference: RunDifference, different: CheckpointPair | None) -> RunDifference:
    """Where replays agree, the checkpoints that differ name the first parameter."""
    if different is None:
        return difference
    with reporting_deletion(*different):
        for tensor in compare_checkpoints(*different):
            if tensor.elements:
                name = tensor.name.removeprefix("model/")
                return replace(
                    difference,
                    parameter=name,
                    elements=tensor.elements,
                    largest=tensor.largest,
                    relative=tensor.relative,
                )
    return difference
