"""The exposed communication of rank 0 by axis, which is exact in profiled steps. Torch-free."""

from __future__ import annotations

import os
from contextlib import suppress

from meshwright.base.records.run_folder import RunFolder
from meshwright.base.records.span_reader import StepSpanRecord, read_rank_spans
from meshwright.errors import ConfigError
from meshwright.insight.trace.exposed_time import exposed_steps
from meshwright.insight.trace.profile_files import ProfilePath, find_profiles

MAX_PROFILE_BYTES = 64 << 20
"""The largest profile that a report reads."""


def profiled_exposure(folder: RunFolder) -> tuple[int, dict[str, float]]:
    """Returns the steps in the newest profile of rank 0, and the mean exposed seconds of each axis in them."""
    profile = next((each for each in reversed(find_profiles(folder)) if each.rank == 0 and is_small(each)), None)
    if profile is None:
        return 0, {}
    spans = [
        span
        for span in read_rank_spans(folder, 0)
        if isinstance(span, StepSpanRecord) and span.step in profile.steps and span.attempt == profile.attempt
    ]
    steps = []
    with suppress(ConfigError):
        steps = exposed_steps(profile, spans)
    axes = dict.fromkeys(axis[:64] for step in steps for axis in step.seconds)
    return len(steps), {axis: sum(step.seconds.get(axis, 0.0) for step in steps) / len(steps) for axis in axes}


def is_small(profile: ProfilePath) -> bool:
    with suppress(OSError):
        return os.lstat(profile.path).st_size <= MAX_PROFILE_BYTES
    return False
