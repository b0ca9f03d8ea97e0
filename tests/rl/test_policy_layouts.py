"""The policy objective on every axis: loss, gradients and metrics are those of one process, and of a user's model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.topology.unsupported import validate
from meshwright.core.models.init import build_model
from meshwright.core.optim.build import build_optimizer
from meshwright.core.parallel.local_shard import full_tensor
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.telemetry.step_clock import StepClock
from meshwright.core.torch_private import clear_dtensor_cache
from meshwright.core.trainer.build import build_parallel_model
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.precision import Precision
from meshwright.core.trainer.records.step_counters import count_step
from meshwright.core.trainer.step import Step, StepContext
from meshwright.planner.cost.comm_volume import CollectiveVolume, comm_volume
from meshwright.rl.policy.policy_model import policy_custom_model
from meshwright.rl.policy_head import PolicyHead, use_policy_objective
from meshwright.testing import run_ranks
from tests.kit.small_run import load_cpu_config
from tests.rl.policy_rollouts import micro_batches, random_groups, random_rows
from tests.rl.test_policy_objective import plain_objective

VOCAB, SEQUENCE, ROWS = 26, 16, 8
SIZES = [
    "--model.width=16",
    "--model.heads=4",
    "--model.kv_heads=2",
    "--model.ffn=24",
    f"--model.vocab={VOCAB}",
    "--model.layers=2",
    "--model.separator=0",
    f"--data.sequence={SEQUENCE}",
    "--precision.compute=fp64",
    f"--batch.global={ROWS}",
    "--batch.micro=2",
    "--layout.replicate=1",
    "--compile.enabled=false",
    "--rl.group_size=4",
    "--rl.kl=0.2",
    "--rl.clip_high=0.3",
    "--rl.temperature=0.8",
    "--rl.importance_cap=1.5",
]
MODELS = {
    "llama": ["--rl.objective=grpo"],
    "gradient": ["--rl.objective=policy_gradient", "--rl.normalization=sequence"],
    "gemma2": [  # tied weights, and caps so low that the logits of initial weights reach them
        "--rl.objective=grpo",
        "--model.family=gemma2",
        "--model.tie=true",
        "--model.options.head_size=6",
        "--model.options.query_scale=0.01",
        "--model.options.attention_softcap=0.1",
        "--model.options.logit_softcap=0.05",
        "--model.options.window=3",
        "--context.method=all-to-all",
    ],
    "experts": ["--rl.objective=grpo", "--model.experts=4", "--model.experts_active=2"],
    "custom": ["--rl.objective=grpo"],
}
TWO_RANKS = {
    "DDP": ("llama", ["--layout.replicate=2"]),
    "FSDP2": ("gradient", ["--layout.replicate=2", "--layout.shard=parameters"]),
    "tensor": ("llama", ["--layout.tensor=2", "--kernels.loss=fused"]),
    "tensor, soft cap": ("gemma2", ["--layout.tensor=2"]),
    "pipeline": ("llama", ["--layout.pipeline=2"]),
    "ring": ("llama", ["--layout.context=2"]),
    "all-to-all": ("gradient", ["--layout.context=2", "--context.method=all-to-all"]),
    "expert": ("experts", ["--layout.replicate=2", "--layout.expert=2"]),
    "custom, FSDP2": ("custom", ["--layout.replicate=2", "--layout.shard=parameters"]),
    "custom, pipeline": ("custom", ["--layout.pipeline=2"]),
}
FOUR_RANKS = {
    "HSDP": ("llama", ["--layout.replicate=2", "--layout.shard=parameters", "--layout.shard_degree=2"]),
    "ZeRO-2 x tensor": ("gradient", ["--layout.replicate=2", "--layout.tensor=2", "--layout.shard=gradients"]),
    "context x tensor": ("llama", ["--layout.context=2", "--layout.tensor=2"]),
    "pipeline x tensor": (
        "gemma2",
        ["--layout.pipeline=2", "--layout.tensor=2", "--pipeline.schedule=zero-bubble", "--pipeline.stages=1"],
    ),
    "pipeline x context": ("llama", ["--layout.pipeline=2", "--layout.context=2"]),
    "expert x ZeRO-3": ("experts", ["--layout.replicate=4", "--layout.shard=parameters", "--layout.expert=2"]),
    "expert x pipeline": ("experts", ["--layout.pipeline=2", "--layout.replicate=2", "--layout.expert=2"]),
}
LAYOUTS = TWO_RANKS | FOUR_RANKS
LONG = {"HSDP", "ZeRO-2 x tensor", "pipeline x context", "expert x ZeRO-3"}
"""Layouts of `make test-all` alone; the others use every axis and every objective."""


class Wrapped(nn.Module):
    """The same model as a user would write it: token ids -> logits."""

    def __init__(self, model):
        super().__init__()
        self.decoder, self.head = model.decoder, Projection(model.head.weight)
        self.separator_of_documents = model.separator

    def forward(self, tokens):
        is_separator = (tokens == self.separator_of_documents).long()
        return self.head(self.decoder(tokens, is_separator.cumsum(1) - is_separator))


class Projection(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, hidden):
        return hidden @ self.weight.T


def policy_config(model, options=()):
    return load_cpu_config(overrides=[*SIZES, *MODELS[model], *options])


def user_model(config):
    spec = ParallelSpec(blocks="decoder.blocks.*", before=("decoder.embedding",), after=("decoder.norm", "head"))
    module = Wrapped(build_model(config.model, config.seed, torch.float64))
    return policy_custom_model(CustomModel(module, None, spec), config.rl)


def build_policy_step(world, config, custom):
    config = with_device_defaults(config, "cpu")
    layout, _ = validate(config)
    precision = Precision(config.precision, world.device)
    model = build_parallel_model(config, layout, custom, precision, world)
    optimizer = build_optimizer(model.parameters(), config.optimizer, layout, world, model.block_patterns)
    return Step(StepContext.for_rank(config, layout, world, model, optimizer, precision))


def run_steps(world, cases):
    """For every case: the loss, what was measured, and the gradients of the parameters that this rank has, by name."""
    results = []
    for name, config in cases:
        clear_dtensor_cache()
        layout, batch = validate(config)
        step = build_policy_step(world, config, user_model(config) if name == "custom" else None)
        rows = random_rows(config.rl, ROWS, SEQUENCE, VOCAB)
        batches = micro_batches(rows, batch.micro, layout.data_coordinate(world.rank), batch.replicas)
        _, loss = step.gradient(0, batches, StepClock(world.device, world.heartbeat, 0))
        values = step.objective.measured_values(step.measured.tolist(), rows.valid_targets, "step 0")
        named = step.parallel_model.parameters().items()
        gradients = {k.removeprefix("model."): full_tensor(p.grad) for k, p in named if p.grad is not None}
        results.append((float(loss), values, gradients))
    return results


@pytest.fixture(scope="module")
def alone():
    [results] = run_ranks(run_steps, 1, [(name, policy_config(name)) for name in MODELS])
    return dict(zip(MODELS, results, strict=True))


@cache
def distributed(ranks, long):
    """Layout -> (loss, what was measured, gradients by name), of all quick or all long layouts from one launch."""
    layouts = TWO_RANKS if ranks == 2 else FOUR_RANKS
    layouts = {layout: case for layout, case in layouts.items() if (layout in LONG) == long}
    cases = [(model, policy_config(model, options)) for model, options in layouts.values()]
    by_rank, found = run_ranks(run_steps, ranks, cases, timeout=200.0), {}
    for index, layout in enumerate(layouts):
        loss, values, _ = by_rank[0][index]
        assert all(rank[index][:2] == (loss, values) for rank in by_rank), layout
        found[layout] = loss, values, {k: v for rank in by_rank for k, v in rank[index][2].items()}
    return found


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=pytest.mark.long) if layout in LONG else layout for layout in LAYOUTS]
)
def test_loss_metrics_and_gradients_are_those_of_one_process(layout, alone):
    loss, values, gradients = distributed(2 if layout in TWO_RANKS else 4, layout in LONG)[layout]
    expected_loss, expected_values, expected = alone[LAYOUTS[layout][0]]
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    assert values == pytest.approx(expected_values, rel=1e-10)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-14, msg=name)
        assert gradient.abs().max() > 1e-8, name


def test_a_users_model_has_the_loss_gradients_and_metrics_of_the_built_in_model(alone):
    loss, values, gradients = alone["custom"]
    assert loss == pytest.approx(alone["llama"][0], rel=1e-12)
    assert values == pytest.approx(alone["llama"][1], rel=1e-12)
    assert gradients.keys() == alone["llama"][2].keys()
    for name, gradient in alone["llama"][2].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-15, msg=name)


@pytest.mark.parametrize("name", ["llama", "gradient", "gemma2"])
def test_step_divides_the_plain_sum_by_the_tokens_of_the_global_batch(name, alone):
    config = policy_config(name)
    model = build_model(config.model, config.seed, torch.float64)
    rows = random_rows(config.rl, ROWS, SEQUENCE, VOCAB)
    tokens = torch.from_numpy(rows.tokens)
    is_separator = (tokens == 0).long()
    with torch.no_grad():
        logits = model.head.logits(model.decoder(tokens, is_separator.cumsum(1) - is_separator))
    groups = random_groups(ROWS // 4, 4, SEQUENCE, VOCAB)
    total, _, metrics = plain_objective(groups, logits.numpy(), config.rl)
    loss, values, _ = alone[name]
    assert loss == pytest.approx(total / rows.valid_targets, rel=1e-10)
    assert values == pytest.approx(metrics, rel=1e-10)


def count_policy_step(world, configs):
    """For every config: what this rank communicates in its third step, and the metrics of that step."""
    results = []
    for config in configs:
        clear_dtensor_cache()
        layout, batch = validate(config)
        step = build_policy_step(world, config, None)
        rows = random_rows(config.rl, ROWS, SEQUENCE, VOCAB)
        batches = micro_batches(rows, batch.micro, layout.data_coordinate(world.rank), batch.replicas)
        step.warmup_backward(lambda batches=batches: batches[0])
        for number in range(2):
            step.run(number, 0.01, iter([batches]))
        with count_step(step.parallel_model, step.optimizer) as counters:
            outcome = step.run(2, 0.01, iter([batches]), counters.enter)
        volumes = [CollectiveVolume(r.axis, r.collective, r.message_bytes, r.wire_bytes) for r in counters.rows()]
        results.append((volumes, outcome.measured.tolist()))
    return results


def test_communication_is_predicted_exactly_and_metrics_need_no_collective_of_their_own():
    configs = [policy_config(*TWO_RANKS[layout]) for layout in ("DDP", "tensor", "FSDP2")]
    by_rank = run_ranks(count_policy_step, 2, configs)
    for index, config in enumerate(configs):
        layout, batch = validate(config)
        for rank in range(2):
            volumes, measured = by_rank[rank][index]
            assert sorted(volumes) == sorted(comm_volume(config, layout, batch, rank))
            assert len(measured) == 2 * len(config.rl.measured_names)


def test_policy_head_keeps_names_order_and_tied_weights():
    config = policy_config("gemma2")
    model = build_model(config.model, config.seed, torch.float64)
    names, weight = [name for name, _ in model.named_parameters()], model.head.weight
    use_policy_objective(model, replace(config.rl, objective="policy_gradient"))
    assert isinstance(model.head, PolicyHead)
    assert [name for name, _ in model.named_parameters()] == names
    assert model.head.weight is weight is model.decoder.embedding.weight
