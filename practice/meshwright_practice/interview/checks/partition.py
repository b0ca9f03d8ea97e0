"""How samples are divided over ranks: deterministic, complete, without overlap or padding, reshuffled, used."""

from __future__ import annotations

from collections import Counter

from meshwright_practice.checks import Check
from meshwright_practice.interview.evidence import RunEvidence
from meshwright_practice.interview.exercise import BASE_CONFIG
from meshwright_practice.interview.runner import ProbeFailed

EXAMPLES = 6
"""Samples that a message names."""


def partition_deterministic(evidence: RunEvidence) -> Check:
    """Two calls with the same arguments return the same samples."""
    expected = "the same samples for the same arguments"
    try:
        cases = evidence.partitions
    except ProbeFailed as failed:
        return Check("partition_deterministic", False, expected, str(failed), "partition returns a list of ints.")
    differing = [case for case, ranks in cases.items() if any(first != second for first, second in ranks)]
    found = (
        "the same" if not differing else f"two calls differ for {differing[0][0]} samples on {differing[0][1]} ranks"
    )
    message = "" if not differing else "Use a generator seeded with (seed, epoch), not a global one."
    return Check("partition_deterministic", not differing, expected, found, message)


def partition_union(evidence: RunEvidence) -> Check:
    """No sample of the data set is missing, and none is outside of it."""
    expected, problem = "the union over ranks is the data set", ""
    for (count, size, _), ranks in evidence.partitions.items():
        union = {sample for first, _ in ranks for sample in first}
        missing, foreign = set(range(count)) - union, union - set(range(count))
        if missing or foreign:
            named = f"misses {shown(missing)}" if missing else f"has {shown(foreign)}, which do not exist"
            problem = problem or f"with {count} samples on {size} ranks it {named}"
    message = "" if not problem else "A sample that no rank ever reads is lost silently; drop whole batches instead."
    return Check("partition_union", not problem, expected, problem or "exactly the data set", message)


def duplicates(count: int, ranks: list[tuple[list[int], list[int]]]) -> tuple[list[int], bool]:
    """The samples that are there more than once, and whether they are padding: ranks of equal length, fewer extra
    samples than ranks.
    """
    counter = Counter(sample for first, _ in ranks for sample in first)
    repeated = sorted(sample for sample, times in counter.items() if times > 1)
    extra = counter.total() - len(counter)
    lengths = {len(first) for first, _ in ranks}
    return repeated, len(lengths) == 1 and 0 < extra < len(ranks) and len(counter) == count


def partition_overlap(evidence: RunEvidence) -> Check:
    """No sample is on two ranks; padding has a check of its own."""
    problem = ""
    for (count, size, _), ranks in evidence.partitions.items():
        repeated, is_padding = duplicates(count, ranks)
        if repeated and not is_padding:
            problem = problem or (
                f"with {count} samples on {size} ranks, {len(repeated)} samples are there more than once: "
                f"{shown(repeated)}"
            )
    message = (
        ""
        if not problem
        else (
            "Ranks train on the same data: give rank r of N every N-th sample from r on, and take both from the "
            "arguments, not from hidden state."
        )
    )
    return Check("partition_overlap", not problem, "no sample twice in an epoch", problem or "none", message)


def partition_padding(evidence: RunEvidence) -> Check:
    """Ranks are not made equally long by repeating samples."""
    problem = ""
    for (count, size, _), ranks in evidence.partitions.items():
        repeated, is_padding = duplicates(count, ranks)
        if is_padding:
            problem = problem or f"with {count} samples on {size} ranks it repeats {shown(repeated)}"
    message = (
        ""
        if not problem
        else (
            "DistributedSampler does this too unless drop_last is set: repeated samples weigh twice. "
            "Let ranks differ by one sample, and drop the batch that not every rank can fill."
        )
    )
    return Check("partition_padding", not problem, "no padding with repeated samples", problem or "none", message)


def partition_reshuffle(evidence: RunEvidence) -> Check:
    cases = evidence.partitions
    first, second = ([ranks[0] for ranks in cases[24, 2, epoch]] for epoch in (0, 1))
    found = "another order" if first != second else "the order of epoch 0 again"
    message = "" if first != second else "Derive the order from (seed, epoch); with a sampler object, call set_epoch."
    return Check("partition_reshuffle", first != second, "another order in epoch 1 than in epoch 0", found, message)


def sampler_used(evidence: RunEvidence) -> Check:
    """`train` reads on each rank what `partition` says, in that order."""
    count, problem = BASE_CONFIG["num_samples"], ""
    for rank, trace in enumerate(evidence.two_ranks):
        read = [sample for step in trace.steps for sample in step.samples]
        planned = evidence.partitions[count, len(evidence.two_ranks), 0][rank][0][: len(read)]
        if read != planned:
            problem = problem or f"rank {rank} reads {read[:EXAMPLES]}, partition says {planned[:EXAMPLES]}"
    message = "" if not problem else "train must take its indices from partition(...), in order."
    return Check("sampler_used", not problem, "train reads what partition says", problem or "the same samples", message)


def shown(samples: list[int] | set[int]) -> str:
    """A few of many samples."""
    ordered = sorted(samples)
    text = ", ".join(map(str, ordered[:EXAMPLES]))
    return f"samples {text}" + (f" and {len(ordered) - EXAMPLES} more" if len(ordered) > EXAMPLES else "")
