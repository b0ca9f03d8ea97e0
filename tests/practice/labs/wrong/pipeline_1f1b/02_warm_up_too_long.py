"""Warms up with one forward too many. Expected check: order."""

from meshwright_practice.labs.pipeline_1f1b.solution import pipeline_step  # noqa: F401


def schedule(stage, stages, micro_batches):
    warm_up = min(stages - stage, micro_batches)
    order = [("F", i) for i in range(warm_up)]
    for i in range(warm_up, micro_batches):
        order += [("F", i), ("B", i - warm_up)]
    return order + [("B", i) for i in range(micro_batches - warm_up, micro_batches)]
