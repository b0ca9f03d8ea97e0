"""The likely cause of a difference from the reference, and the next move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isclose, isnan

import torch
from torch import Tensor

from meshwright.base.config import RunConfig
from meshwright.base.topology.layout import Layout
from meshwright.prover.compare.discrepancy import FACTOR_TOLERANCE, Difference, Quantity, equal_within
from meshwright.prover.compare.updates import RecordedUpdate
from meshwright.prover.oracle.update_rules import ReferenceOptimizer
from meshwright.prover.trace import StepTrace, Trace
from meshwright.prover.tracer import AssembledTrace

ROUNDED = "complete but rounded: a reduction or a matmul in lower precision"
MAX_ROUNDING = 0.02
"""The largest relative error that a single operation in lower precision explains."""
MAX_FIT_ERROR = {"fp64": 1e-7, "fp32": 1e-3}
"""The largest relative error of a sum that explains a gradient."""
MAX_CELLS = 32
"""The most micro-batches of all ranks whose weights are computed."""

NEXT_MOVES = {
    "start": "compare with `meshwright prove --layout.replicate=1`, then add one axis at a time",
    "fetch": "look at the samples with `meshwright data show --step {step} --rank {rank}`",
    "forward": "run `meshwright prove` with one axis at a time, starting with --layout.replicate=1",
    "backward": "run `meshwright prove` with one axis at a time; `gradient of` names the first wrong parameter",
    "sync": "run `meshwright prove` with one axis at a time",
    "update": "compare optimizer and schedule settings with the learning rate and the norm in the step events",
    "evaluate": "run `meshwright prove --eval.samples=N` for several N",
}
"""Phase -> what to do next."""
NEXT_MOVES_ON_ONE_RANK = dict.fromkeys(
    ("start", "forward", "backward", "sync"),
    "run `meshwright prove --layout.replicate=1` with the settings of a preset, then change one setting at a time",
)

GradientCause = Callable[[list[Difference], Difference, "Evidence", list[str]], str]
"""(wrong gradients, first difference, evidence, all parameters) -> cause"""


@dataclass(frozen=True)
class Evidence:
    """A run that differs from its reference, and what can be computed to explain it."""

    config: RunConfig
    expected: Trace
    measured: AssembledTrace
    layout: Layout
    accumulation: int
    stale_loss: Callable[[], float]
    """computes the loss that step 1 has if step 0 updates nothing"""
    fit_sample_weights: Callable[[StepTrace, Mapping[str, Tensor], list[str]], tuple[Tensor, float]]
    """computes the weights of all micro-batches in the gradients of a step, and the relative error of their sum"""
    optimizer: ReferenceOptimizer
    """the optimizer by its definition"""
    explain_gradients: GradientCause | None = None
    """what explains wrong gradients of a custom model; None: the built-in models"""
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """the other names of tied parameters of a custom model"""

    def update_of(self, number: int) -> RecordedUpdate:
        """What the optimizer of the run read and wrote in a step."""
        index = next(i for i, step in enumerate(self.measured.trace.steps) if step.step == number)
        trace = self.measured.trace
        before = trace.steps[index - 1].parameters if index else trace.initial
        return RecordedUpdate(
            self.config, trace.steps[index], before, self.measured.moments[index], self.measured.owners, self.optimizer
        )


def likely_cause(differences: list[Difference], evidence: Evidence) -> str:
    """The usual cause of a pattern of differences, which are in the order of computation. What comes before the first
    difference is correct, so the parameters before a step with a wrong loss are.
    """
    quantity, expected = differences[0].quantity, evidence.expected
    return "; ".join(filter(None, [cause_of_first(differences, evidence), what_preceded(quantity, expected)]))


def what_preceded(quantity: Quantity, expected: Trace) -> str:
    """What the loop did between the last correct step and the first wrong one, apart from the step; '' if nothing."""
    if quantity.kind in ("initial", "evaluation", "evaluated tokens"):
        return ""
    number = quantity.step - 1
    events = ["a skipped step"] if any(s.step == number and isnan(s.loss) for s in expected.steps) else []
    events += ["an evaluation"] if any(step == number for step, *_ in expected.evaluations) else []
    return f"all steps before are correct, and this is the first after {' and '.join(events)}" if events else ""


def cause_of_first(differences: list[Difference], evidence: Evidence) -> str:
    """The cause of the first difference."""
    first, expected, measured = differences[0], evidence.expected, evidence.measured.trace
    quantity, names = first.quantity, list(expected.steps[0].gradients)
    # What comes later follows from the first difference, except for differences of the same step.
    same_step = [found for found in differences if found.quantity.step == quantity.step]
    gradients = [found for found in same_step if found.quantity.kind == "gradient"]
    match quantity.kind:
        case "initial":
            return "the initial weights do not follow from the seed and the name of the parameter"
        case "inputs":
            return inputs_cause(quantity.name, quantity.step, expected, measured)
        case "tokens":
            return f"valid tokens are counted {first.factor:.4g} times, not once over all ranks and micro-batches"
        case "lr":
            return "the learning-rate schedule does not give this rate for the step"
        case "evaluation" | "evaluated tokens":
            return evaluation_cause(first, measured)
        case "loss scale":
            return "the loss scale does not halve after a step that is not finite, or double after its interval"
        case "moments":
            return "parameters are correct, but the optimizer state is not"
        case "norm":
            return evidence.update_of(quantity.step).explain_norm() or norm_cause(first)
        case "update":
            return update_cause(same_step, evidence)
    second = measured.steps[1] if len(measured.steps) > 1 else None
    if (
        second is not None
        and quantity.step == second.step
        and isclose(second.loss, evidence.stale_loss(), rel_tol=1e-6)
    ):
        return "stale parameters: the update did not reach the unsharded parameters"
    if gradients:
        return (evidence.explain_gradients or gradient_cause)(gradients, first, evidence, names)
    factor = describe_factor(first.factor, evidence.layout, evidence.accumulation)
    return f"only the reported loss is wrong: {factor or 'it is not summed over all ranks'}"


def evaluation_cause(found: Difference, measured: Trace) -> str:
    if not any(step == found.quantity.step for step, *_ in measured.evaluations):
        return "training is correct, but this evaluation is missing"
    cause = "training is correct, but evaluation does not count every token of the held-out samples exactly once"
    others = ", or reads other samples or the parameters of another step"
    return cause + (others if found.quantity.kind == "evaluation" else "")


def inputs_cause(what: str, step: int, expected: Trace, measured: Trace) -> str:
    """Which samples of the global batch are not those of the stream."""
    no_rows = torch.empty(0)
    right, found = (
        next(s.inputs.get(what, no_rows) for s in trace.steps if s.step == step) for trace in (expected, measured)
    )
    if right.shape != found.shape:
        return f"the ranks read {tuple(found.shape)} in all, the global batch is {tuple(right.shape)}"
    wrong = (right != found).flatten(1).any(dim=1).nonzero().flatten().tolist()
    known = {tuple(row.tolist()): index for index, row in enumerate(right)}
    moved = [known.get(tuple(found[index].tolist())) for index in wrong]
    if all(index is not None for index in moved):
        return f"the ranks read the right samples in another order: sample {wrong[0]} of the batch is sample {moved[0]}"
    return f"{len(wrong)} of {len(right)} samples are not those of the stream, first sample {wrong[0]} of the batch"


def norm_cause(found: Difference) -> str:
    if found.factor_error < 1e-3:
        return "the norm is rounded: it is summed in lower precision"
    if found.factor > 1:
        return "replicated weights are counted more than once"
    return "the contribution of some ranks is missing"


def update_cause(differences: list[Difference], evidence: Evidence) -> str:
    updates = [found for found in differences if found.quantity.kind == "update"]
    names = [found.quantity.name for found in updates]
    number = updates[0].quantity.step
    if any(step.step == number and isnan(step.loss) for step in evidence.expected.steps):
        return f"the step is skipped, since its loss is not finite, and still updates {names[0]}"
    if all(name.endswith("router.bias") for name in names):
        return f"only the router biases are wrong: {router_bias_cause(evidence)}"
    explained = evidence.update_of(number).explain_update(names)
    if explained:
        return f"gradients and norm are correct, the update is not: {explained}"
    if all(found.error < MAX_ROUNDING and found.factor_error < MAX_ROUNDING / 10 for found in differences):
        return "gradients and norm are correct, the update is rounded: a parameter or moment in lower precision"
    factors = [found.factor for found in updates]
    if all(equal_within(found.error, abs(factors[0] - 1)) for found in updates):
        return f"gradients and norm are correct, the update is {factors[0]:.4g} times as large: the learning rate"
    return "gradients and norm are correct, the update is not: clipping, weight decay or moments"


def router_bias_cause(evidence: Evidence) -> str:
    if not evidence.config.model.router_bias_rate:
        return "they change, and model.router_bias_rate is 0"
    if evidence.layout.ranks == 1:
        return "the expert loads are not those of the tokens of this step"
    return "the expert loads are not summed over all ranks"


FORWARD = "forward and backward are wrong: rows, positions, masks, documents or labels"
MODEL = (
    "forward and backward are wrong on a single rank: a formula of the model (rotary positions, masks, documents, "
    "attention, norms, feed-forward, head) or the labels"
)
FORWARD_HINTS = {
    "context": "positions, masks or labels of the sequence chunks (context)",
    "pipeline": "the order of the stages, or activations and labels of different micro-batches (pipeline)",
    "experts": "tokens that reach the wrong expert or return in the wrong order (experts)",
}
LATER_FORWARD_HINTS = {
    "tied": "the head's copy of a tied weight is not updated (pipeline)",
    "experts": "router biases that enter the routing weights (experts)",
}
GRADIENT_HINTS = {
    "context": "gradients are not summed over the sequence chunks (context)",
    "pipeline": "a stage lacks the weight gradients of a micro-batch (pipeline)",
    "experts": "tokens that reach other experts, as by a router in lower precision (experts)",
}
"""Causes that exist only for a layout or model with the given trait, in addition to the general one; the later ones
only after the first update.
"""


def layout_traits(layout: Layout, names: list[str]) -> set[str]:
    """The axes of a layout, "tied" for a pipeline with tied weights, and "experts" for a mixture of experts."""
    tied = layout.pipeline > 1 and not any(name.startswith("head") for name in names)
    experts = any(".router." in name for name in names)
    return set(layout.active_axes) | ({"tied"} if tied else set()) | ({"experts"} if experts else set())


def with_hints(cause: str, hints: dict[str, str], traits: set[str]) -> str:
    return "; or ".join([cause, *(hint for trait, hint in hints.items() if trait in traits)])


def gradient_cause(gradients: list[Difference], first: Difference, evidence: Evidence, names: list[str]) -> str:
    """The cause of wrong gradients. `names` are all parameters, in the order in which the forward pass uses them."""
    factors, layout = [found.factor for found in gradients], evidence.layout
    wrong = [found.quantity.name for found in gradients]
    traits = layout_traits(layout, names)
    low_precision = evidence.config.precision.compute in ("bf16", "fp16") or evidence.config.ddp.comm_hook != "none"
    tolerance = MAX_ROUNDING if low_precision else FACTOR_TOLERANCE
    equal = all(equal_within(factor, factors[0], tolerance) for factor in factors)
    average = describe_factor(factors[0], layout, evidence.accumulation, tolerance) if equal else ""
    if average and wrong == names:
        return average
    if all("norm" in name for name in wrong) and layout.tensor > 1:
        return "gradients of norm weights are not summed over the sequence chunks (tensor)"
    if kept := kept_gradients(gradients, evidence):
        return kept
    rounded = all(f.error < MAX_ROUNDING and f.factor_error < MAX_ROUNDING / 2 for f in [first, *gradients])
    if rounded and first.quantity.step == evidence.expected.steps[0].step:  # every step rounds, the first one too
        return ROUNDED + (", or a small term that does not belong to the loss" if first.quantity.kind == "loss" else "")
    weights = weights_cause(first.quantity.step, wrong, evidence)
    if first.quantity.kind == "loss":
        if weights:
            return f"forward is correct, but tokens have unequal weights: {weights}"
        cause = FORWARD if layout.ranks > 1 else MODEL
        hints = FORWARD_HINTS | (LATER_FORWARD_HINTS if first.quantity.step > evidence.expected.steps[0].step else {})
        return with_hints(cause, hints, traits)
    in_block = block_cause(wrong, names, traits)
    if in_block:
        return in_block
    tied = not any(name.startswith("head") for name in names)
    if all(name.startswith(("decoder.embedding", "head")) for name in wrong) and (tied or layout.tensor > 1):
        if layout.pipeline > 1 and tied:
            return "the head's gradient of a tied weight is missing, or not added exactly once (pipeline)"
        return "the gradients of the two uses of a tied weight, or of the vocabulary shards, are not combined"
    if average:
        return f"{average}, for {len(wrong)} of {len(names)} parameters only: a bucket or an FSDP unit"
    if wrong == names[: len(wrong)] and len(wrong) < len(names):
        last_correct = names[len(wrong)]
        return (
            f"backward is correct down to {last_correct} and wrong below: a bucket, activation checkpointing or a "
            f"reduction over the tensor axis{f'; {weights}' if weights else ''}"
        )
    if weights:
        return f"gradients of some ranks or micro-batches are missing or counted twice: {weights}"
    return with_hints("gradients of some ranks or micro-batches are missing or counted twice", GRADIENT_HINTS, traits)


def kept_gradients(gradients: list[Difference], evidence: Evidence) -> str:
    """Whether the gradients contain those of the step before, which the optimizer may have scaled; '' if not."""
    number = gradients[0].quantity.step
    steps = {step.step: step for step in evidence.measured.trace.steps}
    right = next(step for step in evidence.expected.steps if step.step == number)
    if number - 1 not in steps:
        return ""
    before, found = steps[number - 1].gradients, steps[number].gradients
    names = [difference.quantity.name for difference in gradients if difference.quantity.name in before]
    names = [name for name in names if name in found]
    text = f"the gradients of step {number - 1} are not zeroed before step {number}"
    if names and not any(found[name].isfinite().all() or before[name].isfinite().all() for name in names):
        return text
    more = {name: found[name].double() - right.gradients[name].double() for name in names}
    factors = [float((more[n] * before[n]).sum() / before[n].double().square().sum().clamp(min=1e-300)) for n in names]
    if not names or not factors[0] > 1e-3:
        return ""
    errors = [float((more[name] - factors[0] * before[name]).norm() / more[name].norm()) for name in names]
    return text if max(errors) < MAX_ROUNDING else ""


def weights_cause(step: int, wrong: list[str], evidence: Evidence) -> str:
    """Which micro-batches the wrong gradients count, and how often; '' if they are no sum of those of micro-batches."""
    recorded = evidence.update_of(step)
    precision, step_trace = evidence.config.precision.compute, recorded.step
    cells = evidence.layout.data_degree * evidence.accumulation
    known = all(name in step_trace.gradients and step_trace.gradients[name].isfinite().all() for name in wrong)
    if cells > MAX_CELLS or not known or evidence.config.model.experts:
        return ""
    weights, error = evidence.fit_sample_weights(step_trace, recorded.before, wrong)
    if not error <= MAX_FIT_ERROR.get(precision, MAX_ROUNDING):
        return ""
    rows = (weights.round(decimals=6) + 0.0).tolist()
    if all(equal_within(weight, 1.0) for row in rows for weight in row):
        return ""
    if all(equal_within(weight, row[0]) or abs(weight - row[0]) < 1e-3 for row in rows for weight in row):
        counts = [f"those of data-parallel rank {rank} {row[0]:.4g} times" for rank, row in enumerate(rows)]
        return "the samples count unequally, " + ", ".join(counts)
    counts = [f"{number} of rank {rank} {w:.4g} times" for rank, row in enumerate(rows) for number, w in enumerate(row)]
    return "the micro-batches count unequally, " + ", ".join(counts)


def block_cause(wrong: list[str], names: list[str], traits: set[str]) -> str:
    """The cause inside the last block whose gradients are wrong; '' if the pattern is not known."""
    if all(is_expert_weight(name) for name in wrong):
        return "only expert weights are wrong: gradients are averaged or summed over the wrong process group"
    last = wrong[-1]
    if "context" in traits and last.endswith("attention.v.weight"):
        if last.replace(".v.", ".q.") not in wrong:
            return "gradients of keys and values do not return from other ranks (context)"
        return "gradients do not flow through attention to the tokens of other ranks (context)"
    if "experts" in traits and last.endswith("ffn.router.weight"):
        return "gradient of the balance loss: not of full sequences, or not weighted once over the batch (experts)"
    if "experts" in traits and last.endswith("ffn_norm.weight") and wrong == names[: len(wrong)]:
        return "gradients of the tokens that experts processed do not return (experts)"
    return ""


def is_expert_weight(name: str) -> bool:
    return ".bank." in name


def describe_factor(factor: float, layout: Layout, accumulation: int, tolerance: float = FACTOR_TOLERANCE) -> str:
    """Which average or sum a factor comes from; '' if none fits."""
    near = partial(equal_within, tolerance=tolerance)
    if layout.pipeline > 1 and accumulation > 1 and near(factor * accumulation, 1):
        return f"averaged over the {accumulation} micro-batches of the pipeline once too often"
    # Stages share no gradients, so the pipeline axis is tried last.
    axes = sorted(layout.active_mesh_axes, key=lambda axis: axis == "pipeline")
    degrees = {f"the {axis} axis ({getattr(layout, axis)})": getattr(layout, axis) for axis in axes}
    degrees |= {f"the {layout.data_degree} data-parallel ranks": layout.data_degree} if layout.data_degree > 1 else {}
    for name, degree in degrees.items():
        if near(factor * degree, 1):
            return f"averaged over {name} once too often"
        if near(factor, degree):
            return f"summed over {name} once too often"
    if accumulation > 1 and near(factor * accumulation, 1):
        return f"divided by the {accumulation} micro-batches"
    if accumulation > 1 and near(factor, accumulation):
        return f"not divided by the {accumulation} micro-batches"
    return ""
