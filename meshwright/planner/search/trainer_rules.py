"""What the profile of each trainer models and how it counts FLOP, so that a plan is one that it runs; torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.base.models.architecture import Architecture
from meshwright.errors import ConfigError
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.workload.trainer_profiles import TRAINERS
from meshwright.planner.workload.workload import Workload
from meshwright.planner.workload.workload_args import split_overrides

AXES = frozenset(("shard", "tensor", "pipeline", "context", "expert"))


@dataclass(frozen=True)
class TrainerRules:
    """The layouts of a trainer that its profile models, and the FLOP of its MFU."""

    axes: frozenset[str] = AXES
    shardings: tuple[str, ...] = ("optimizer", "gradients", "parameters")
    """what it shards over data-parallel ranks, besides nothing"""
    schedules: tuple[str, ...] = ()
    """pipeline schedules; empty: all of topology/schedules.py"""
    checkpoint_modes: tuple[str, ...] = ("none", "selective", "full")
    shards_in_pipeline: bool = True
    """whether gradients or parameters are sharded together with a pipeline"""
    shards_gradients_in_pipeline: bool = False
    """whether gradients can be sharded in a pipeline without parameters: a stage has them until they are reduced"""
    counts_masked_scores: bool = False
    """whether its MFU counts the whole score matrix of attention, and not only the half that a causal mask keeps"""
    counts_recomputation: bool = False
    """whether its published share of the peak counts recomputed FLOP: HFU, not MFU"""


# Megatron-FSDP shards parameters, too; no profile models it.
MEGATRON = TrainerRules(shardings=("optimizer",), schedules=("1f1b", "interleaved"))
RULES = {
    "meshwright": TrainerRules(),
    # The distributed optimizer came in 2022, context and expert parallelism in 2023 and 2024. The FLOP formula of the
    # papers counts the whole score matrix, and recomputation (arXiv:2104.04473, equation 3).
    "megatron-2021": TrainerRules(
        AXES - {"shard", "context", "expert"},
        (),
        ("1f1b", "interleaved"),
        ("none", "full"),
        counts_masked_scores=True,
        counts_recomputation=True,
    ),
    "megatron-2022": TrainerRules(
        AXES - {"context", "expert"}, ("optimizer",), ("1f1b", "interleaved"), counts_masked_scores=True
    ),
    "megatron": MEGATRON,
    "nemo": MEGATRON,
    # FSDP2 alone shards; its FLOP per token are 6 N + 12 L H D S, the whole score matrix.
    "torchtitan": TrainerRules(
        shardings=("parameters",),
        schedules=("gpipe", "1f1b", "interleaved", "zbv"),
        counts_masked_scores=True,
    ),
    "deepspeed": TrainerRules(
        AXES - {"context", "expert"},
        schedules=("1f1b",),
        checkpoint_modes=("none", "full"),
        shards_in_pipeline=False,
        counts_masked_scores=True,
    ),
    "llm-foundry": TrainerRules(
        frozenset(("shard",)), ("gradients", "parameters"), checkpoint_modes=("none", "full"), counts_masked_scores=True
    ),
    # FSDP of Llama 3 does not reshard parameters after forward (arXiv:2407.21783, section 3.3.2).
    "meta": TrainerRules(
        shardings=("gradients",),
        schedules=("1f1b", "interleaved"),
        checkpoint_modes=("none", "full"),
        shards_gradients_in_pipeline=True,
    ),
    # All-to-alls are hidden by the pairs of passes of DualPipe (arXiv:2412.19437, section 3.2.1).
    "hai-llm": TrainerRules(shardings=("optimizer",), schedules=("dualpipev",)),
    "nanotron": TrainerRules(
        AXES - {"context"}, ("optimizer",), ("1f1b", "gpipe"), ("none", "full"), counts_masked_scores=True
    ),
}
"""Beginning of a trainer's name in `plan --trainer` -> its rules; the longest match counts."""


def trainer_rules(name: str) -> TrainerRules:
    """Returns the rules of a trainer; one without rules of its own is not restricted."""
    matching = [key for key in RULES if name.startswith(key)]
    return RULES[max(matching, key=len)] if matching else TrainerRules()


MODELLED_SETTINGS = ("preset", "model.", "batch.global", "data.sequence", "precision.compute")
"""Config keys, or their beginnings, that a plan for another trainer depends on besides those that are searched."""
EXPECTED_SETTINGS = "expected settings of the layout, the model, the batch or the precision"


def validate_options(work: Workload, overrides: Sequence[str]) -> None:
    """Raises ConfigError if the trainer of a workload does not run what `--KEY=VALUE` options ask for, or if its
    profile does not model it.
    """
    name, pinned = work.trainer_name, work.pinned
    if work.trainer is not None:
        for option in split_overrides(overrides)[1]:
            key = option.removeprefix("--").partition("=")[0]
            if not key.startswith(MODELLED_SETTINGS):
                hint = "try --precision fp8" if key == "precision.float8" else EXPECTED_SETTINGS
                raise ConfigError(f"the profile of {name} does not model {key}", hint)
        if "compile.enabled" in pinned:
            eager = f"{name}-eager"
            hint = f"try --trainer {eager}" if eager in TRAINERS else "try it without this option"
            raise ConfigError(f"the profile of {name} does not model compile.enabled", hint)
        method = work.trainer.context_method
        if pinned.get("context.method", method) != method:
            raise ConfigError(
                f"{name} does not support context.method = {pinned['context.method']}: its method is {method}",
                "try it without this option",
            )
    validate_pins(work, trainer_rules(name))


def validate_pins(work: Workload, rules: TrainerRules) -> None:
    """Raises ConfigError if a pinned setting is none that these rules allow."""
    name, pinned = work.trainer_name, work.pinned
    for axis in ("tensor", "pipeline", "context", "expert"):
        keys = [f"layout.{axis}", *(("pipeline.stages",) if axis == "pipeline" else ())]
        if axis not in rules.axes and any(int(pinned.get(key, 1)) > 1 for key in keys):
            raise ConfigError(f"{name} does not support {axis} parallelism", f"expected --layout.{axis}=1")
    shardings = ("none", *rules.shardings) if "shard" in rules.axes else ("none",)
    sharding, schedules = str(pinned.get("layout.shard", "none")), rules.schedules
    if sharding not in shardings:
        raise not_modelled(name, f"layout.shard = {sharding}", shardings)
    if int(pinned.get("layout.shard_degree", 1)) > 1 and shardings == ("none",):
        raise ConfigError(f"{name} does not shard over data-parallel ranks", "try it without --layout.shard_degree")
    if schedules and (schedule := str(pinned.get("pipeline.schedule", schedules[0]))) not in schedules:
        raise not_modelled(name, f"pipeline.schedule = {schedule}", schedules)
    if (mode := str(pinned.get("activation_checkpoint.mode", "none"))) not in rules.checkpoint_modes:
        raise not_modelled(name, f"activation_checkpoint.mode = {mode}", rules.checkpoint_modes)
    in_pipeline = {"gradients": rules.shards_gradients_in_pipeline, "parameters": rules.shards_in_pipeline}
    if int(pinned.get("layout.pipeline", 1)) > 1 and not in_pipeline.get(sharding, True):
        raise ConfigError(
            f"{name} does not support layout.shard = {sharding} together with a pipeline",
            "try another --layout.shard, or --layout.pipeline=1",
        )


def not_modelled(name: str, setting: str, modelled: Sequence[str]) -> ConfigError:
    return ConfigError(f"the profile of {name} does not model {setting}", f"expected one of {', '.join(modelled)}")


def mfu_with_masked_scores(plan: Estimate) -> float:
    """Returns the MFU that counts the whole score matrix of attention."""
    job = plan.job
    if not isinstance(job.model, Architecture):
        return plan.mfu
    layers = sum(count for kind, count in job.model.kind_counts.items() if kind.has_attention)
    masked = 3.0 * job.tokens_per_step * job.sequence * job.model.attention_width * layers
    return (plan.model_flops + masked) / plan.seconds / plan.peak_flops


def trainer_mfu(plan: Estimate, name: str) -> float:
    """Returns the share of the peak as a trainer counts it."""
    rules = trainer_rules(name)
    mfu = mfu_with_masked_scores(plan) if rules.counts_masked_scores else plan.mfu
    return mfu * plan.hardware_flops / plan.model_flops if rules.counts_recomputation else mfu


def flop_convention(work: Workload) -> str:
    """Says which FLOP the MFU of a trainer counts."""
    rules = trainer_rules(work.trainer_name)
    scores = "the whole score matrix" if rules.counts_masked_scores else "the causal half of the score matrix"
    recomputed = ", and recomputation" if rules.counts_recomputation else ""
    frozen = ", 4 per frozen one" if work.trained.frozen else ""
    frozen += ", 2 in blocks without a backward pass" if work.trained.reached < 1 else ""
    return f"6 FLOP per active parameter and token{frozen}, {scores}{recomputed}"
