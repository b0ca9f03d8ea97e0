"""Answers to drills of known quality: some good, and some each with one fault and the check that must name it."""

from __future__ import annotations

CHECKPOINTING = {
    "problem": "The device has 40 GiB and DDP needs 44.7 GiB of memory: 4.7 GiB too much, most of it activations.",
    "mechanism": "I keep DDP and add activation checkpointing: activations are recomputed in backward.",
    "communication": "It stays one gradient all-reduce of 4.6 GiB per step; a rank sends 8.1 GiB.",
    "tradeoff": "The forward pass is recomputed, so the step grows by about 25% and memory falls to 26 GiB.",
    "measurement": "Peak memory must fall below 30 GiB while step time grows by less than a third.",
}
SHARDING = {
    "problem": "One replica needs 176 GiB of memory, 96 GiB more than an H100 has; the optimizer state has 90.",
    "mechanism": "FSDP over the 8 ranks: every rank keeps an eighth of parameters, gradients and optimizer state.",
    "communication": "All-gather before forward and backward, reduce-scatter of gradients: 419 GiB per rank.",
    "tradeoff": "More communication, 8 times the bytes of DDP, and wrapping to get right; 60 GiB are used afterwards.",
    "measurement": "Exposed communication in a trace stays near zero, and peak memory is 60 GiB.",
}
ACCUMULATION = {
    "problem": "72% of the step is exposed all-reduce: the network, not the model, is the limit.",
    "mechanism": "Accumulate gradients over 16 micro-batches under no_sync, so that gradients are synchronized once.",
    "communication": "One all-reduce of 4.6 GiB per optimizer step, as before, for 16 times the samples.",
    "tradeoff": "The global batch is larger: fewer updates. A step takes 1.3 s, 17% of it exposed.",
    "measurement": "Tokens per second, and the loss against tokens, because the batch changed.",
}
COMPRESSION = {
    "problem": "72% of the step is exposed all-reduce: the network, not the model, is the limit.",
    "mechanism": "DDP stays, and gradients are reduced in bf16 by the hook bf16_compress.",
    "communication": "One all-reduce of 2.3 GiB per step, half of it before; a rank sends 4.3 GiB.",
    "tradeoff": "Sums of gradients are rounded, so precision is lost; a step takes 180 ms, 53% of it exposed.",
    "measurement": "Exposed communication and tokens per second, and the loss over steps against float32.",
}
PIPELINE = {
    "problem": "The bubble is 37% of a step: ranks wait while the pipeline fills and drains.",
    "mechanism": "Interleaved schedule: two stages per rank, each fill is half as long; only layers move.",
    "communication": "Reduce-scatter and all-gather of the shards as before; a rank sends 10 GiB.",
    "tradeoff": "Twice the activations between ranks; the step takes 570 ms with a bubble of 23%.",
    "measurement": "Bubble fraction per stage from a trace, and step time.",
}
BATCH = {
    "problem": "A larger batch is not a fix for a slow step: the step takes 3 s and no time is lost to communication.",
    "mechanism": "Only accumulation fits: with a micro-batch of 4 the activations grow to 78 GiB.",
    "communication": "The all-reduce stays 4.6 GiB per step, whatever the batch is.",
    "tradeoff": "Optimization changes: fewer updates per token, another learning rate; a step takes 12 s.",
    "measurement": "Loss against tokens, not against steps; tokens per second stays equal.",
}

BUZZWORDS = {
    "problem": "Memory, OOM, exceeds, overflow.",
    "mechanism": "Activation checkpointing of activations.",
    "communication": "All-reduce of gradients.",
    "tradeoff": "Recompute, compute, FLOPs, time.",
    "measurement": "Step time, MFU, peak memory, throughput.",
}

CASES: list[tuple[str, int, dict[str, str], set[str]]] = [
    ("barely_exceeds", 0, CHECKPOINTING, set()),
    ("substantially_exceeds", 0, SHARDING, set()),
    ("all_reduce_dominates", 0, ACCUMULATION, set()),
    ("all_reduce_dominates", 0, COMPRESSION, set()),
    (
        "all_reduce_dominates",
        0,
        COMPRESSION | {"communication": "One all-reduce per step; a rank sends 8.6 GiB, as before."},
        {"communication.bytes"},
    ),
    (
        "substantially_exceeds",
        0,
        SHARDING | {"mechanism": f"{SHARDING['mechanism']} Gradients are reduce-scattered in bf16."},
        set(),
    ),
    ("substantially_exceeds", 0, SHARDING | {"mechanism": COMPRESSION["mechanism"]}, {"mechanism.strategy"}),
    ("pipeline_bubble", 0, PIPELINE, set()),
    ("bigger_batch", 0, BATCH, set()),
    ("barely_exceeds", 0, BUZZWORDS, {"problem.figure", "communication.bytes", "tradeoff.figure"}),
    (
        "barely_exceeds",
        0,
        CHECKPOINTING | {"mechanism": "No activation checkpointing: I change nothing about activations."},
        {"mechanism.strategy"},
    ),
    (
        "barely_exceeds",
        0,
        CHECKPOINTING
        | {"mechanism": "DDP, FSDP, tensor parallelism, pipeline parallelism and activation checkpointing."},
        {"mechanism.strategy"},
    ),
    ("barely_exceeds", 0, CHECKPOINTING | {"communication": "All-reduce of 46 MiB."}, {"communication.bytes"}),
    ("barely_exceeds", 0, CHECKPOINTING | {"communication": "An all-to-all of 4.6 GiB."}, {"communication.collective"}),
    ("barely_exceeds", 0, CHECKPOINTING | {"problem": "Memory is short by 500 GB."}, {"problem.figure"}),
    ("barely_exceeds", 0, CHECKPOINTING | {"problem": "Memory: it exceeds 40 GiB, or 40 GB."}, {"problem.figure"}),
    ("barely_exceeds", 0, CHECKPOINTING | {"measurement": "I would look at it."}, {"measurement.metric"}),
    ("barely_exceeds", 0, CHECKPOINTING | {"tradeoff": ""}, {"tradeoff.price", "tradeoff.figure"}),
    (
        "barely_exceeds",
        0,
        CHECKPOINTING
        | {"tradeoff": "Activation checkpointing is free: it uses spare compute, and memory falls to 26 GiB."},
        {"tradeoff.wrong_statement"},
    ),
    (
        "substantially_exceeds",
        0,
        SHARDING
        | {
            "mechanism": "Activation checkpointing: activations are recomputed.",
            "communication": "One all-reduce of 30 GiB.",
            "tradeoff": "The forward pass is recomputed: a step takes 7.9 s.",
        },
        {"mechanism.strategy"},
    ),
    (
        "substantially_exceeds",
        0,
        SHARDING | {"communication": "FSDP moves less bytes than DDP: all-gather and reduce-scatter of 419 GiB."},
        {"communication.wrong_statement"},
    ),
    (
        "substantially_exceeds",
        0,
        SHARDING | {"mechanism": "Offload the optimizer state to the host."},
        {"mechanism.strategy"},
    ),
    (
        "all_reduce_dominates",
        0,
        ACCUMULATION
        | {
            "mechanism": "FSDP, so that parameters and gradients are sharded.",
            "communication": "All-gather and reduce-scatter: a rank sends 17 GiB.",
            "tradeoff": "More communication: a step takes 520 ms.",
        },
        {"mechanism.strategy"},
    ),
    (
        "bigger_batch",
        0,
        BATCH | {"communication": "A larger batch raises the gradient payload of the all-reduce, 4.6 GiB."},
        {"communication.wrong_statement"},
    ),
    (
        "bigger_batch",
        0,
        BATCH | {"mechanism": "A larger micro-batch of 4 with more activations."},
        {"mechanism.strategy"},
    ),
]
"""(scenario, case, answer, names of the checks that must fail)"""
