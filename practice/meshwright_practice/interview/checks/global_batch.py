"""The algebra of the global batch: micro-batch x accumulation x data-parallel degree, which is not the world size."""

from __future__ import annotations

from meshwright_practice.checks import Check
from meshwright_practice.interview.evidence import RunEvidence
from meshwright_practice.interview.exercise import BASE_CONFIG
from meshwright_practice.interview.rank.probes import BATCH_CASES
from meshwright_practice.interview.runner import ProbeFailed


def global_batch(evidence: RunEvidence) -> Check:
    expected_values = []
    for case in BATCH_CASES:
        config = BASE_CONFIG | case
        model_ranks = config["tensor_parallel"] * config["pipeline_parallel"]
        expected_values.append(config["micro_batch"] * config["accumulation"] * config["world_size"] // model_ranks)
    measured = sum(len(trace.steps[-1].samples) for trace in evidence.two_ranks)
    expected = f"{expected_values[0]} samples on 2 ranks, {expected_values[1]} on 8 ranks with tensor 2 and pipeline 2"
    try:
        found = evidence.batches
    except ProbeFailed as failed:
        return Check("global_batch", False, expected, str(failed), "global_batch returns an int.")
    message = ""
    if found[0] != measured:
        message = f"A step of your own run on 2 ranks reads {measured} samples."
    elif found != expected_values:
        message = "Ranks of one model replica share their samples: multiply by the data-parallel degree only."
    return Check(
        "global_batch", not message, expected, f"{found[0]} and {found[1]}; counted on 2 ranks: {measured}", message
    )
