"""Compares the mean seconds of the ranks, which one slow step decides. Expected check: one stall."""

from collections import defaultdict
from statistics import fmean, median

from meshwright_practice.labs.straggler_hunt.solution import find_straggler as find_since
from meshwright_practice.labs.straggler_hunt.solution import local_seconds


def find_straggler(records):
    seconds, length = defaultdict(list), fmean(sum(record["phases"].values()) for record in records)
    for record in records:
        for phase, value in local_seconds(record).items():
            seconds[phase, record["rank"]].append(value)
    means = {key: fmean(values) for key, values in seconds.items()}
    middle = {phase: median(m for (name, _), m in means.items() if name == phase) for phase, _ in means}
    (phase, rank), mean = max(means.items(), key=lambda item: item[1] - middle[item[0][0]])
    if mean - middle[phase] < 0.1 * length:
        return None
    return {"rank": rank, "phase": phase, "since": (find_since(records) or {"since": 1})["since"]}
