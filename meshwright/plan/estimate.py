"""Everything that is said of a job before it runs."""

from __future__ import annotations

from meshwright.plan.figures import Estimate
from meshwright.plan.fit import memory
from meshwright.plan.job import Job
from meshwright.plan.lessons import Lessons, lessons_of
from meshwright.plan.seconds import timed


def estimate(job: Job, unstated: bool = False, exact: bool = False, lessons: Lessons | None = None) -> Estimate:
    """`unstated`: whether something that matters had to be assumed of it; `exact`: what takes longer to know, too;
    `lessons`: the runs that correct it (default: those that finished on this machine, where it is this machine's).
    """
    lessons = lessons_of(job.cluster) if lessons is None else lessons
    return lessons.timed(timed(job, lessons.weighed(job, memory(job)), unstated, exact))
