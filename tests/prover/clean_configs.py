"""Random valid configs without a fault, on one to eight ranks, over everything that a training run can be set to."""

from __future__ import annotations

from math import lcm
from random import Random

from meshwright.base.topology.schedules import SCHEDULES
from meshwright.base.topology.unsupported import validate
from meshwright.errors import ConfigError
from tests.kit.small_run import load_cpu_config
from tests.prover.traced_cases import SMALL

MAX_RANKS = 8
PRECISIONS = ("fp32", "fp32", "fp32", "fp64", "fp64", "bf16", "fp16")


def clean_options(seed: int) -> tuple[str, ...]:
    """The command-line options of a config that depends on the seed alone."""
    draw = Random(seed)
    while not is_valid(options := draw_options(draw)):
        pass
    return options


def is_valid(options: tuple[str, ...]) -> bool:
    """Not every schedule supports activation checkpointing."""
    try:
        validate(load_cpu_config(overrides=[*SMALL, *options]))
    except ConfigError as error:
        assert "activation_checkpoint.mode" in str(error), error
        return False
    return True


def draw_options(draw: Random) -> tuple[str, ...]:
    replicate, pipeline, context, tensor, sharded = draw_degrees(draw)
    schedule, method = draw.choice(list(SCHEDULES)), draw.choice(["ring", "all-to-all"])
    stages = SCHEDULES[schedule].default_stages if pipeline > 1 else 1
    barred = {"gradients"} if pipeline > 1 else set()
    barred |= {"parameters"} if pipeline > 1 and SCHEDULES[schedule].splits_backward else set()
    shard = draw.choice(sorted({"optimizer", "gradients", "parameters"} - barred)) if sharded > 1 else "none"
    data = replicate * sharded
    experts = draw_experts(draw, data * context)
    kv_heads = tensor * draw.choice([1, 2])
    heads = lcm(kv_heads, tensor * (context if method == "all-to-all" else 1)) * draw.choice([1, 2, 3])
    micro = draw.choice([1, 2, 3])
    micro_batches = draw.choice([1, 2, 3, 5]) if pipeline == 1 else pipeline * draw.choice([2, 3])
    options = [
        f"--layout.replicate={replicate}",
        *([f"--layout.shard={shard}", f"--layout.shard_degree={sharded}"] if shard != "none" else []),
        f"--layout.pipeline={pipeline}",
        f"--layout.context={context}",
        f"--layout.tensor={tensor}",
        f"--pipeline.schedule={schedule}",
        f"--context.method={method}",
        f"--model.vocab={tensor * draw.randint(9, 40)}",
        f"--model.heads={heads}",
        f"--model.kv_heads={kv_heads}",
        f"--model.width={heads * draw.choice([2, 4, 6])}",
        f"--model.ffn={tensor * draw.randint(3, 20)}",
        f"--model.layers={pipeline * stages + draw.choice([0, 0, 1, 2])}",
        f"--model.tie={draw.choice(['true', 'false'])}",
        *experts,
        *([f"--model.separator={draw.choice([0, 1])}"] if draw.random() < 0.3 else []),
        f"--data.sequence={2 * tensor * context * draw.randint(1, max(1, 12 // (tensor * context)))}",
        f"--batch.global={data * micro * micro_batches}",
        f"--batch.micro={micro}",
        f"--precision.compute={draw.choice(PRECISIONS)}",
        f"--seed={draw.randint(0, 2**40)}",
        f"--steps={draw.choice([2, 3, 5])}",
    ]
    return (*options, *draw_settings(draw))


def draw_degrees(draw: Random) -> tuple[int, int, int, int, int]:
    """Degrees of replicate, pipeline, context, tensor and shard on at most eight ranks."""
    while True:
        degrees = tuple(draw.choice([1, 1, 1, 2, 2, 3, 4]) for _ in range(5))
        product = degrees[0] * degrees[1] * degrees[2] * degrees[3] * degrees[4]
        if product <= MAX_RANKS:
            return degrees  # type: ignore[return-value]


def draw_experts(draw: Random, ranks: int) -> list[str]:
    """A mixture of experts in one of four configs, with an expert axis that divides the ranks it reuses."""
    if draw.random() > 0.25:
        return []
    expert = draw.choice([degree for degree in (1, 2, 4) if ranks % degree == 0])
    experts = expert * draw.choice([1, 2, 3]) if expert > 1 else draw.choice([2, 4, 5])
    return [
        f"--layout.expert={expert}",
        f"--model.experts={experts}",
        f"--model.experts_active={draw.randint(1, min(2, experts))}",
        f"--model.experts_shared={draw.choice([0, 1])}",
        f"--model.router_aux_loss={draw.choice([0.0, 0.01])}",
        f"--model.router_bias_rate={draw.choice([0.0, 1e-3])}",
    ]


def draw_settings(draw: Random) -> list[str]:
    """Settings of the optimizer, the schedule, activation checkpointing and the data."""
    settings = [
        f"--optimizer.clip={draw.choice([0.0, 0.1, 1.0])}",
        f"--optimizer.weight_decay={draw.choice([0.0, 0.1])}",
        f"--optimizer.eps={draw.choice([1e-8, 1e-5])}",
        f"--optimizer.beta2={draw.choice([0.95, 0.999])}",
        f"--optimizer.lr={draw.choice([1e-4, 3e-3])}",
        f"--schedule.kind={draw.choice(['constant', 'cosine', 'linear', 'wsd'])}",
        f"--schedule.warmup={draw.choice([0, 1, 100])}",
        f"--eval.holdout={draw.choice([0.0, 0.05, 0.2])}",
        f"--eval.every={draw.choice([0, 3])}",
        f"--activation_checkpoint.mode={draw.choice(['none', 'none', 'full', 'selective'])}",
    ]
    settings += ["--optimizer.cpu_offload=true"] if draw.random() < 0.1 else []
    if draw.random() < 0.3:
        weights = [draw.choice([1, 2.5, 0.1]) for _ in range(2)]
        sources = ", ".join(
            f'{{kind="synthetic", samples={draw.randint(40, 300)}, weight={weight}}}' for weight in weights
        )
        settings.append(f"--data.mixture=[{sources}]")
    return settings
