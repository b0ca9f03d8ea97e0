"""Expert parallelism: which parameters a rank keeps, which tokens it computes, and what the all-to-alls move."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from meshwright.base.models.registry import run_spec
from meshwright.core.models.layers.expert_weights import ExpertWeights
from meshwright.core.parallel.parallel_model import router_biases
from meshwright.core.trainer.expert_balancer import imbalance
from meshwright_practice.cards.card import Knobs, Observation
from meshwright_practice.experiments.counted_training import CountedStep, RankTraining, run_trainings, small_config
from meshwright_practice.pictures import Bars

LAYERS, SKEW = 2, 100.0


@dataclass(frozen=True)
class ExpertStep:
    """One step of one rank."""

    step: CountedStep
    rows: int
    """rows that the experts of this rank computed in the forward pass of a step"""
    imbalance: float
    """the largest load of an expert as a multiple of the mean"""


def record_experts(training: RankTraining, skew: float = 0.0) -> ExpertStep:
    rows = 0

    def count_rows(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal rows
        rows += len(inputs[0])

    for module in training.model.module.modules():
        if isinstance(module, ExpertWeights):
            module.register_forward_pre_hook(count_rows)
    if skew:
        with torch.no_grad():
            for _, bias in router_biases(training.model.module):
                bias[0] = skew
    counted = training.count()
    rows = 0
    outcome = training.run()
    assert outcome.expert_loads is not None
    return ExpertStep(counted, rows, imbalance(outcome.expert_loads))


def record_skewed(training: RankTraining) -> ExpertStep:
    return record_experts(training, SKEW)


def exchange(knobs: Knobs) -> Observation:
    """The same mixture of experts with experts on every rank, with experts divided among ranks, with one more active
    expert, and with a router that sends every token to expert 0 first.
    """
    ranks, experts, active = int(knobs["ranks"]), int(knobs["experts"]), int(knobs["active"])
    model = [f"--model.experts={experts}", f"--model.layers={LAYERS}", "--model.router_bias_rate=0"]
    batch = [f"--batch.global={ranks}", "--batch.micro=1", f"--layout.replicate={ranks}"]
    base = [*model, *batch, f"--model.experts_active={active}"]
    replicated = small_config(ranks, *base)
    divided = small_config(ranks, *base, f"--layout.expert={ranks}")
    sparser = small_config(ranks, *model, *batch, "--model.experts_active=1", f"--layout.expert={ranks}")
    plain = run_trainings([replicated, divided, sparser], record_experts)
    [skewed] = run_trainings([divided], record_skewed)
    cases = dict(zip(("replicated", "divided", "sparser", "skewed"), (*plain, skewed), strict=True))
    tokens = ranks * divided.data.sequence * LAYERS
    spec = run_spec(divided)
    total = spec.parameter_count
    of_experts = sum(prod(parameter.shape) for parameter in spec.parameters if parameter.is_expert_weight)
    width = divided.model.width
    values: dict[str, float] = {
        "total_parameters": total,
        "active_parameters": total - of_experts + of_experts * active / experts,
        "active_share": 1 - of_experts / total * (1 - active / experts),
    }
    for name, of_ranks in cases.items():
        rows = [rank.rows for rank in of_ranks]
        values[f"rows_per_token_{name}"] = sum(rows) / tokens
        values[f"busiest_rank_{name}"] = max(rows) / (sum(rows) / ranks)
        values[f"imbalance_{name}"] = of_ranks[0].imbalance
        values[f"parameter_{name}"] = of_ranks[0].step.resident["parameter"] / of_ranks[0].step.model_bytes
        values[f"all_to_alls_{name}"] = of_ranks[0].step.calls("all_to_all")
        values[f"all_to_all_bytes_{name}"] = sum(rank.step.message("all_to_all") for rank in of_ranks)
    values["expected_bytes"] = 4 * tokens * active * width * 8 + 8 * experts * LAYERS * ranks
    values["expert_share_per_rank"] = (total - of_experts + of_experts / ranks) / total
    values["loss_difference"] = abs(cases["replicated"][0].step.loss - cases["divided"][0].step.loss)
    labels = tuple(cases)
    parts: dict[str, tuple[float, ...]] = {
        "rows of experts per token": tuple(values[f"rows_per_token_{name}"] for name in labels),
        "busiest rank / mean": tuple(values[f"busiest_rank_{name}"] for name in labels),
        "resident parameters": tuple(values[f"parameter_{name}"] for name in labels),
    }
    note = f"The model has {total:,} parameters, of which a token uses {values['active_parameters']:,.0f}."
    return Observation(values, Bars("experts on one rank", "share or multiple", labels, parts), (note,))
