"""Compares phases with the waits inside them. Expected check: waits inside collectives."""

from collections import defaultdict
from statistics import median

SHARE = 0.1


def local_seconds(record):
    waits = {}
    return {phase: seconds - waits.get(phase, 0.0) for phase, seconds in record["phases"].items() if phase != "sync"}


def find_straggler(records):
    steps = defaultdict(list)
    for record in records:
        if record["step"] > 0:
            steps[record["step"]].append(record)
    excess = defaultdict(dict)
    for step, of_ranks in steps.items():
        length = median(sum(record["phases"].values()) for record in of_ranks)
        local = {record["rank"]: local_seconds(record) for record in of_ranks}
        for phase in of_ranks[0]["phases"].keys() - {"sync"}:
            middle = median(seconds[phase] for seconds in local.values())
            for rank, seconds in local.items():
                excess[rank, phase][step] = (seconds[phase] - middle) / length
    found = [(since(shares), key, shares) for key, shares in excess.items()]
    behind = [(median(late(shares, step)), key, step) for step, key, shares in found if step is not None]
    if not behind:
        return None
    _, (rank, phase), step = max(behind)
    return {"rank": rank, "phase": phase, "since": step}


def since(shares):
    for step in sorted(shares):
        if shares[step] >= SHARE and median(late(shares, step)) >= SHARE and len(late(shares, step)) >= 3:
            return step
    return None


def late(shares, first):
    return [share for step, share in shares.items() if step >= first]
