"""The scenarios: each is a situation on concrete models and clusters, and the remedies that the planner judges."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError
from meshwright.planner.search.candidate import Candidate

PARTS = ("problem", "mechanism", "communication", "tradeoff", "measurement")


@dataclass(frozen=True)
class Remedy:
    """A way out: the strategies that an answer names for it, and the job that the planner estimates."""

    strategies: tuple[str, ...]
    candidate: Candidate
    batch: int | None = None
    """samples per step, where the remedy changes it"""
    compress: bool = False
    """whether DDP all-reduces gradients in bfloat16"""


@dataclass(frozen=True)
class ScenarioCase:
    """A model on a cluster, as it runs now, and what could be done."""

    model: str
    cluster: str
    batch: int
    sequence: int
    now: Candidate
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True)
class DrillScenario:
    """A question, what limits the job in it, and its cases. `limit` is memory, communication, bubble or batch."""

    name: str
    question: str
    limit: str
    cases: tuple[ScenarioCase, ...]
    wrong: tuple[tuple[str, str], ...] = ()
    """(pattern of a wrong statement, what is right)"""


def data_parallel(ranks: int, micro: int = 1, checkpointing: str = "none") -> Candidate:
    return Candidate(Layout(replicate=ranks), micro, activation_checkpoint=checkpointing)


def sharded(ranks: int, state: str, checkpointing: str = "none") -> Candidate:
    return Candidate(Layout(shard=ranks), 1, state, checkpointing)


def long_context(model: str, cluster: str, sequence: int, now: Candidate) -> ScenarioCase:
    """A model on eight devices whose activations are the overflow."""
    remedies = (
        Remedy(("checkpointing",), data_parallel(8, 1, "full")),
        Remedy(("selective", "checkpointing"), data_parallel(8, 1, "selective")),
        Remedy(("fsdp",), sharded(8, "parameters")),
        Remedy(("zero",), sharded(8, "gradients")),
        Remedy(("context",), Candidate(Layout(replicate=4, context=2), 1)),
        Remedy(("tensor",), Candidate(Layout(replicate=4, tensor=2), 1)),
        Remedy(("pipeline",), Candidate(Layout(pipeline=2, replicate=4), 1)),
    )
    return ScenarioCase(model, cluster, 64, sequence, now, remedies)


def slow_network(model: str, cluster: str, ranks: int, batch: int, sequence: int) -> ScenarioCase:
    """One device per node, and little work per optimizer step."""
    remedies = (
        Remedy(("accumulation",), data_parallel(ranks), 16 * batch),
        Remedy(("bf16_reduction",), data_parallel(ranks), compress=True),
        Remedy(("zero",), sharded(ranks, "optimizer")),
        Remedy(("fsdp",), sharded(ranks, "parameters")),
        Remedy(("checkpointing",), data_parallel(ranks, 1, "full")),
    )
    return ScenarioCase(model, cluster, batch, sequence, data_parallel(ranks), remedies)


def short_pipeline(cluster: str, batch: int) -> ScenarioCase:
    """Four stages with few micro-batches, on sixteen devices."""
    now = Candidate(Layout(pipeline=4, shard=4), 1, "optimizer")
    remedies = (
        Remedy(("micro_batches",), now, 8 * batch),
        Remedy(("interleaved",), Candidate(now.layout, 1, "optimizer", schedule="interleaved", stages_per_rank=2)),
        Remedy(("fsdp",), sharded(16, "parameters")),
        Remedy(("checkpointing",), Candidate(now.layout, 1, "optimizer", "full")),
    )
    return ScenarioCase("llama-8b", cluster, batch, 4096, now, remedies)


def large_model(cluster: str, ranks: int, batch: int, sequence: int) -> ScenarioCase:
    remedies = (
        Remedy(("fsdp",), sharded(ranks, "parameters")),
        Remedy(("zero",), sharded(ranks, "gradients")),
        Remedy(("checkpointing",), data_parallel(ranks, 1, "full")),
        Remedy(("tensor",), Candidate(Layout(replicate=ranks // 8, tensor=8), 1)),
        Remedy(("pipeline",), Candidate(Layout(pipeline=2, replicate=ranks // 2), 1)),
    )
    return ScenarioCase("llama-8b", cluster, batch, sequence, data_parallel(ranks), remedies)


def enormous_model(cluster: str, ranks: int) -> ScenarioCase:
    remedies = (
        Remedy(("fsdp", "checkpointing"), sharded(ranks, "parameters", "full")),
        Remedy(
            ("fsdp", "tensor", "checkpointing"), Candidate(Layout(shard=ranks // 8, tensor=8), 1, "parameters", "full")
        ),
        Remedy(
            ("fsdp", "tensor", "pipeline", "checkpointing"),
            Candidate(Layout(pipeline=8, shard=ranks // 64, tensor=8), 1, "parameters", "full"),
        ),
        Remedy(("tensor", "pipeline"), Candidate(Layout(pipeline=8, shard=ranks // 64, tensor=8), 1, "optimizer")),
        Remedy(("checkpointing",), data_parallel(ranks, 1, "full")),
    )
    return ScenarioCase("llama-405b", cluster, 2048, 8192, sharded(ranks, "parameters"), remedies)


def larger_batch(cluster: str, sequence: int) -> ScenarioCase:
    remedies = (
        Remedy(("accumulation",), data_parallel(8), 256),
        Remedy(("micro_batch",), data_parallel(8, 4), 256),
    )
    return ScenarioCase("llama-1b", cluster, 64, sequence, data_parallel(8), remedies)


CHEAPER_SHARDING = (
    r"(?:zero|fsdp|shard)\w*(?:(?!(?<!with )(?<!to )(?<!unlike )\bddp\b)[^.;]){0,60}"
    r"\b(?:less|fewer|lower|half(?: of)?(?: the)?)\s+(?:(?:network|wire|total)\s+)?(?:communicat|bytes|traffic)"
    r"(?![^.;]{0,20}\bthan (?:fsdp|zero|shard))",
    "Sharding parameters moves more bytes than DDP: 3 instead of 2 times the parameters, and again per micro-batch.",
)
FREE_CHECKPOINTING = (
    r"checkpointing[^.;]{0,40}\b(?:is free|for free|no cost|costs nothing)",
    "Activation checkpointing computes the forward pass again: about a third more compute.",
)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        DrillScenario(
            "barely_exceeds",
            "The job runs out of memory, by a little. What do you change first?",
            "memory",
            (
                long_context("llama-1b", "a100-40:8", 15360, data_parallel(8)),
                long_context("llama-1b", "h100:8", 49152, data_parallel(8)),
                long_context("llama-1b", "a100-80:8", 49152, data_parallel(8)),
            ),
            (CHEAPER_SHARDING, FREE_CHECKPOINTING),
        ),
        DrillScenario(
            "all_reduce_dominates",
            "Most of the step is gradient all-reduce. What do you change?",
            "communication",
            (
                slow_network("llama-1b", "h100:1x16", 16, 32, 2048),
                slow_network("gpt2-124m", "h100:1x16", 16, 16, 1024),
                slow_network("llama-1b", "a100-40:1x16", 16, 32, 1024),
            ),
        ),
        DrillScenario(
            "activation_spikes",
            "Memory peaks at the end of forward, far beyond the model state. What do you change?",
            "memory",
            (
                long_context("llama-1b", "a100-40:8", 65536, data_parallel(8)),
                long_context("llama-1b", "a100-40:8", 49152, data_parallel(8)),
                long_context("llama-1b", "h100:8", 65536, data_parallel(8)),
            ),
            (
                FREE_CHECKPOINTING,
                (
                    r"pipelin\w+[^.;]{0,60}\b(?:reduces?|cuts?|lowers?|halves)\b[^.;]{0,30}activation",
                    "Under 1F1B the first stage keeps as many micro-batches as there are stages: as many "
                    "activations as before.",
                ),
            ),
        ),
        DrillScenario(
            "pipeline_bubble",
            "Every pipeline rank is idle at the start and at the end of the step. What do you change?",
            "bubble",
            (short_pipeline("h100:8x2", 16), short_pipeline("a100-80:8x2", 32)),
        ),
        DrillScenario(
            "substantially_exceeds",
            "The model state alone is larger than the device. What do you change?",
            "memory",
            (
                large_model("h100:8", 8, 64, 8192),
                large_model("h100:8x2", 16, 128, 4096),
                large_model("a100-80:8x2", 16, 128, 4096),
            ),
            (CHEAPER_SHARDING,),
        ),
        DrillScenario(
            "enormous",
            "A very large model on dedicated nodes: sharded over all devices it still does not fit. What do you add?",
            "memory",
            (enormous_model("h100:8x64", 512), enormous_model("h100:8x128", 1024)),
            (CHEAPER_SHARDING, FREE_CHECKPOINTING),
        ),
        DrillScenario(
            "bigger_batch",
            "The job is too slow, and somebody asks: why not just make the batch four times as large?",
            "batch",
            (larger_batch("h100:8", 16384), larger_batch("a100-80:8", 16384)),
            (
                (
                    r"(?:larger|bigger|increas\w+|doubl\w+)[^.;]{0,30}batch[^.;]{0,60}\b(?:more|larger|raises?|increases?)\b"
                    r"[^.;]{0,20}(?:gradient|payload|all-?reduce)",
                    "The gradient has the size of the parameters: its bytes per step do not depend on the batch.",
                ),
            ),
        ),
    )
}


def find_scenario(name: str) -> DrillScenario:
    if name not in SCENARIOS:
        raise ConfigError(f"--drill {name[:40]} is unknown", f"expected one of {', '.join(SCENARIOS)}")
    return SCENARIOS[name]
