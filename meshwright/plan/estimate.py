"""Everything that is said of a job before it runs."""

from __future__ import annotations

from meshwright.plan.figures import Estimate
from meshwright.plan.fit import memory
from meshwright.plan.job import Job
from meshwright.plan.seconds import timed


def estimate(job: Job, unstated: bool = False, exact: bool = False) -> Estimate:
    """`unstated`: whether something that matters had to be assumed of it; `exact`: what takes longer to know, too."""
    return timed(job, memory(job), unstated, exact)
