"""Checks the policy objective: its gradient under the run's layout equals that of the reference in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.base.config import IGNORE_INDEX, RunConfig
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.core.data.loader import MicroBatch
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.optim.build import build_optimizer
from meshwright.core.parallel.local_shard import full_tensor
from meshwright.core.parallel.parallel_model import router_biases
from meshwright.core.parallel.world import World
from meshwright.core.telemetry.step_clock import StepClock
from meshwright.core.trainer.build import build_parallel_model
from meshwright.core.trainer.precision import Precision
from meshwright.core.trainer.step import Step, StepContext
from meshwright.prover.claims import Claim, describe_settings
from meshwright.prover.oracle.policy_objective import PolicyReference, ReferenceRollout, policy_reference
from meshwright.prover.shrink.policy_runs import objective_run, small_policy_run
from meshwright.prover.shrink.runs import changes
from meshwright.rl.rollout import Rollout, RolloutGroup
from meshwright.rl.rows import group_rows
from meshwright.rl.version import PolicyVersion

FLOAT64_ERROR = 1e-10
"""The largest relative error of a gradient in float64: of sums in another order, over all tokens of a batch."""
MARGINS = {"fp32": 12.0, "bf16": 5.0}
"""How many times the rounding of the reference in this precision a run may differ."""
MIN_GROUPS = 4
MAX_SECONDS = 300.0
LOGPROB_SPREAD, SAMPLER_SPREAD = 0.5, 0.6
"""Standard deviations of recorded log-probabilities around those of initial weights: ratios on both sides of the
clipping, and importance weights on both sides of their cap.
"""


def check_objective(user: RunConfig) -> Iterator[Claim]:
    """Computes the gradient of made-up rollouts on the run's layout, in float64 and in the precision of the run."""
    config = with_groups(objective_run(user))
    groups = made_up_groups(config)
    parameters, reference = None, None
    compute = user.precision.compute
    runs = [config]
    if compute in MARGINS and not user.precision.float8:
        runs.append(with_groups(replace(small_policy_run(user), compile=replace(user.compile, enabled=False))))
    for run in runs:
        loss, gradients, parameters = measure_gradient(run, groups)
        reference = policy_reference(run, parameters, as_reference(groups))
        bound = FLOAT64_ERROR
        if run is not config:
            bound = MARGINS[compute] * rounding_error(run, parameters, groups, reference)
        yield compare_gradients(user, run, loss, gradients, reference, bound)


def with_groups(config: RunConfig) -> RunConfig:
    """The run with at least some groups per step, and without dropped tokens, which depend on the micro-batches."""
    group = config.rl.group_size
    factor = max(1, math.ceil(MIN_GROUPS * group / config.batch.global_))
    config = replace(
        config,
        batch=replace(config.batch, global_=config.batch.global_ * factor),
        model=replace(config.model, capacity_factor=0.0),
        ddp=replace(config.ddp, static_graph=False),
    )
    validate(config)
    return with_device_defaults(config, "cpu")


def made_up_groups(config: RunConfig) -> list[RolloutGroup]:
    """Groups of random prompts and completions, whose lengths, rewards and log-probabilities differ."""
    draws = np.random.Generator(np.random.Philox(key=config.seed))
    vocab, sequence, size = config.model.vocab, config.data.sequence, config.rl.group_size
    groups = []
    for number in range(config.batch.global_ // size):
        prompt = draws.integers(0, vocab, draws.integers(1, sequence // 2)).astype(np.int32)
        rollouts = []
        for _ in range(size):
            length = int(draws.integers(1, sequence - len(prompt) + 1))
            scored = -math.log(vocab) + LOGPROB_SPREAD * draws.standard_normal(length)
            sampled, initial = scored + SAMPLER_SPREAD * draws.standard_normal((2, length))
            tokens = draws.integers(0, vocab, length).astype(np.int32)
            # what a step in float32 reads: the reference must not differ by the rounding of its inputs
            sampled, scored, initial = (v.astype(np.float32).astype(np.float64) for v in (sampled, scored, initial))
            rollouts.append(Rollout(tokens, sampled, scored, initial, float(draws.normal())))
        groups.append(RolloutGroup(number, number, PolicyVersion(1, 0), prompt, tuple(rollouts)))
    return groups


def as_reference(groups: Sequence[RolloutGroup]) -> list[list[ReferenceRollout]]:
    return [
        [
            ReferenceRollout(
                group.prompt.tolist(),
                rollout.tokens.tolist(),
                rollout.sampler_logprobs.tolist(),
                rollout.logprobs.tolist(),
                rollout.reference_logprobs.tolist(),
                rollout.reward,
            )
            for rollout in group.rollouts
        ]
        for group in groups
    ]


def measure_gradient(
    config: RunConfig, groups: Sequence[RolloutGroup]
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """(loss, gradients, parameters) of the trainer's own step on the ranks of the config."""
    ranks = Layout.from_config(config.layout).ranks
    results = run_ranks(compute_gradient, ranks, config, groups, launch=config.launch, timeout=MAX_SECONDS)
    gradients: dict[str, Tensor] = {}
    parameters: dict[str, Tensor] = {}
    for _, of_rank, values in results:  # the stages of a pipeline have different parameters
        gradients |= of_rank
        parameters |= values
    return results[0][0], gradients, parameters


def compute_gradient(world: World, config: RunConfig, groups: Sequence[RolloutGroup]) -> tuple[Any, ...]:
    """Runs on every rank: builds the model as the trainer does, and computes the gradient of its rows."""
    layout, batch = validate(config)
    precision = Precision(config.precision, world.device)
    model = build_parallel_model(config, layout, None, precision, world)
    optimizer = build_optimizer(model.parameters(), config.optimizer, layout, world, model.block_patterns)
    step = Step(StepContext.for_rank(config, layout, world, model, optimizer, precision))
    dtype = np.float64 if precision.parameters == torch.float64 else np.float32
    rows = group_rows(groups, config.rl, config.data.sequence, dtype)
    first = layout.data_coordinate(world.rank) * batch.local
    batches = []
    for start in range(first, first + batch.local, batch.micro):
        part = slice(start, start + batch.micro)
        arrays = (rows.tokens[part], rows.labels[part], rows.values[part])
        valid = int((rows.labels[part] != IGNORE_INDEX).sum())
        batches.append(MicroBatch(tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays), valid))
    named = step.parallel_model.parameters()
    parameters = {name: full_tensor(value).double().cpu().clone() for name, value in named.items()}
    parameters |= {name: full_tensor(value).double().cpu().clone() for name, value in router_biases(model.module)}
    _, loss = step.gradient(0, batches, StepClock(world.device, world.heartbeat, 0))
    gradients = {
        name: full_tensor(value.grad).double().cpu().clone() for name, value in named.items() if value.grad is not None
    }
    return float(loss), gradients, parameters


def rounding_error(
    config: RunConfig, parameters: dict[str, Tensor], groups: Sequence[RolloutGroup], exact: PolicyReference
) -> float:
    """The largest relative error of a gradient by the reference in the precision of the run."""
    low = torch.bfloat16 if config.precision.compute == "bf16" else None
    rounded = policy_reference(config, parameters, as_reference(groups), torch.float32, low)
    return max(relative_error(rounded.gradients[name], right) for name, right in exact.gradients.items())


def relative_error(found: Tensor, right: Tensor) -> float:
    norm = float(right.double().norm())
    difference = float((found.double() - right.double()).norm())
    return difference / norm if norm else difference


def compare_gradients(
    user: RunConfig,
    config: RunConfig,
    loss: float,
    gradients: dict[str, Tensor],
    reference: PolicyReference,
    bound: float,
) -> Claim:
    rl, layout = config.rl, Layout.from_config(config.layout)
    claim = (
        f"{layout}{describe_settings(config)}, {rl.objective}, {rl.normalization} normalization: loss and gradient of "
        f"the policy objective equal the reference ({config.precision.compute})"
    )
    problems = []
    missing = sorted(reference.gradients.keys() ^ gradients.keys())
    problems += [f"the gradient of {missing[0]} is missing"] if missing else []
    errors = {
        name: relative_error(gradients[name], right)
        for name, right in reference.gradients.items()
        if name in gradients and float(right.norm()) > 0
    }
    worst = max(errors, key=lambda name: errors[name], default="")
    # not <=: an error that is not a number exceeds every bound
    wrong = [name for name in errors if not errors[name] <= bound]
    if wrong:
        right = reference.gradients[worst].double()
        factor = float((gradients[worst].double() * right).sum() / right.square().sum())
        problems.append(
            f"the gradient of {worst} differs by a relative error of {errors[worst]:.1e} (factor {factor:.4g}); "
            f"{len(wrong)} of {len(errors)} gradients differ"
        )
    if not abs(loss - reference.loss) <= max(bound, FLOAT64_ERROR) * max(1.0, abs(reference.loss)):
        problems.append(f"the loss is {loss:.9g}, expected {reference.loss:.9g}")
    clipped = reference.clipped_above, reference.clipped_below
    if rl.objective == "grpo" and not all(clipped):
        problems.append(f"the rollouts exercise no clipping: {clipped[0]} tokens above, {clipped[1]} below")
    counts = f", {clipped[0]} clipped above and {clipped[1]} below" if rl.objective == "grpo" else ""
    measured = (
        f"{len(errors)} gradients of {reference.tokens} tokens{counts}: largest relative error "
        f"{errors.get(worst, 0.0):.1e} ({worst}; bound {bound:.1e})"
    )
    return Claim(claim, bool(errors) and not problems, "; ".join([*problems[:3], measured]), changes(user, config))
