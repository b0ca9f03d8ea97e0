"""Lab: find the straggler in the records of a run. The reference solution."""

from collections import defaultdict
from statistics import median
from typing import Any

SHARE = 0.1
"""The excess of a straggler, as a share of the step time."""


def local_seconds(record: dict[str, Any]) -> dict[str, float]:
    """The phase sync is waiting alone."""
    waits = record.get("waits", {})
    return {phase: seconds - waits.get(phase, 0.0) for phase, seconds in record["phases"].items() if phase != "sync"}


def find_straggler(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Compares each rank with the median of all ranks, step by step and phase by phase."""
    steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if record["step"] > 0:  # the first step compiles and allocates
            steps[record["step"]].append(record)
    excess: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
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


def since(shares: dict[int, float]) -> int | None:
    """The first slow step from which on most steps are slow, and none if the last ones are not."""
    for step in sorted(shares):
        if shares[step] >= SHARE and median(late(shares, step)) >= SHARE and len(late(shares, step)) >= 3:
            return step
    return None


def late(shares: dict[int, float], first: int) -> list[float]:
    return [share for step, share in shares.items() if step >= first]
