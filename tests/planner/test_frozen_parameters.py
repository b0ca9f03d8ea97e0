"""Plans of low-rank adaptation and of frozen groups: what frozen parameters need, and what they do not."""

from __future__ import annotations

import pytest

from meshwright.base.config import load_config
from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.spec import BEFORE, BlockSpec, ModelSpec, ParameterSpec
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology.layout import Layout
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.step_flops import step_flops
from meshwright.planner.search.candidate import Candidate, exact_job
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.search import search
from meshwright.planner.search.trainer_rules import flop_convention
from meshwright.planner.workload.optimizer_bytes import ALL_TRAINED, shares_of_spec
from meshwright.planner.workload.own_trainer import FROZEN_RECAST_TRAFFIC
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.workload_args import workload_from_config
from tests.planner.planned_cases import cost_cache

LORA = ("--lora.rank=16",)
EVERY_PROJECTION = (*LORA, "--lora.targets=*.attention.*,*.ffn.*")
FIRST_BLOCKS = ('--optimizer.groups=[{pattern="*.blocks.[0-9].*",frozen=true},{pattern="*embedding*",frozen=true}]',)
EXPERTS = ('--optimizer.groups=[{pattern="*.bank.*",frozen=true}]',)
ATTENTION = ('--optimizer.groups=[{pattern="*.attention.*",frozen=true}]',)
CANDIDATES = {
    "ddp": Candidate(Layout(replicate=8), 1),
    "fsdp": Candidate(Layout(shard=8), 1, "parameters", "full"),
    "tensor": Candidate(Layout(shard=4, tensor=2), 1, "optimizer", "selective"),
    "pipeline": Candidate(Layout(pipeline=2, shard=4), 1, "optimizer"),
}
GIB = 1 << 30


def costs(model: str, options: tuple[str, ...], candidate: Candidate) -> tuple[Estimate, Estimate]:
    """What the search estimates, and what the config of the run costs."""
    cache = cost_cache(model, "h200:8", "--batch.global=16", *options)
    return cache.estimate(candidate), estimate(exact_job(cache.work, cache.cluster, candidate))


def estimated(options: tuple[str, ...], candidate: Candidate = CANDIDATES["ddp"]) -> Estimate:
    return cost_cache("llama-8b", "h200:8", "--batch.global=16", *options).estimate(candidate)


def test_low_rank_adaptation_of_8b_fits_on_one_h100() -> None:
    """Frozen weights stay float32 in memory, 29.9 GiB, beside nothing that a gradient or an optimizer needs."""
    assert not any(plan for plan in search(cost_cache("llama-8b", "h100:1")).ranked if not plan.job.offload)
    best = search(cost_cache("llama-8b", "h100:1", *LORA)).ranked[0]
    memory = best.peak_memory
    assert not best.job.offload
    assert memory.parameters == pytest.approx(4 * 8.03e9, rel=0.01)
    assert memory.gradients + memory.optimizer < 0.5 * GIB


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("options", [LORA, EVERY_PROJECTION, FIRST_BLOCKS], ids=["attention", "all", "groups"])
def test_candidates_cost_what_their_run_configs_cost(name: str, options: tuple[str, ...]) -> None:
    """The search prices candidates by sizes alone; the plan follows from the parameters of the run."""
    fast, exact = costs("llama-8b", options, CANDIDATES[name])
    if (name, options) != ("pipeline", FIRST_BLOCKS):  # candidates have the mean of all blocks in every stage
        assert fast.seconds == pytest.approx(exact.seconds, rel=0.03)
    assert fast.peak_memory.tensors == pytest.approx(exact.peak_memory.tensors, rel=0.05)


@pytest.mark.parametrize("expert", [1, 8])
@pytest.mark.parametrize("options", [EXPERTS, ATTENTION], ids=["experts", "attention"])
def test_candidates_with_experts_cost_what_their_run_configs_cost(options: tuple[str, ...], expert: int) -> None:
    """Experts are part of their block unless ranks divide them."""
    fast, exact = costs("mixtral-8x7b", options, Candidate(Layout(shard=8, expert=expert), 1, "parameters", "full"))
    assert fast.seconds == pytest.approx(exact.seconds, rel=0.03)
    assert fast.peak_memory.tensors == pytest.approx(exact.peak_memory.tensors, rel=0.05)


def test_frozen_weights_have_no_weight_gradients() -> None:
    full, lora = estimated(()), estimated(LORA)
    assert full.phases["backward"] > 1.9 * full.phases["forward"]
    assert lora.phases["backward"] < 1.4 * lora.phases["forward"]
    attention = 1 - 6 * 8.03e9 * full.job.tokens_per_step / full.model_flops
    assert lora.model_flops / full.model_flops == pytest.approx(2 / 3 + attention / 3, abs=0.03)
    counted = "6 FLOP per active parameter and token, 4 per frozen one, the causal half of the score matrix"
    assert flop_convention(cost_cache("llama-8b", "h200:8", *LORA).work) == counted


def test_backward_ends_at_the_first_trained_block() -> None:
    """Ten of 32 blocks have neither a backward pass nor activations."""
    full, groups = estimated(()), estimated(FIRST_BLOCKS)
    head = 0.1
    assert groups.phases["backward"] / full.phases["backward"] == pytest.approx(22 / 32, abs=head)
    assert groups.peak_memory.activations / full.peak_memory.activations == pytest.approx(22 / 32, abs=head)


def test_blocks_without_a_backward_pass_have_the_flops_of_forward() -> None:
    """A third of their matrix products and of attention, and no recomputation."""
    candidate = Candidate(Layout(replicate=8), 1, "none", "full")
    groups = FIRST_BLOCKS[0].replace("[0-9].*", "*")
    cache = cost_cache("llama-8b", "h200:8", "--data.sequence=131072", groups)
    full, frozen = estimated((), candidate), cache.estimate(candidate)
    model, tokens = cache.work.model, frozen.job.tokens_per_step
    assert isinstance(model, Architecture)
    head, kinds = model.vocab * model.width, model.kind_counts.items()
    blocks = sum(count * model.active_kind_parameters(kind) for kind, count in kinds)
    attention = tokens * sum(count * model.mixer_flops(kind, 131072) for kind, count in kinds)
    assert full.hardware_flops > 1.3 * full.model_flops
    assert frozen.hardware_flops == frozen.model_flops
    assert frozen.model_flops == pytest.approx(tokens * (6 * head + 2 * blocks) + attention)
    assert flop_convention(cache.work).count(", 4 per frozen one, 2 in blocks without a backward pass, ") == 1


def test_products_in_8_bits_are_those_that_a_step_has() -> None:
    job = estimated((*LORA, "--precision.float8=true")).job
    flops = step_flops(job.model, job)
    assert job.is_quantized
    assert isinstance(job.model, Architecture)
    attention = 3 * sum(
        count * job.model.mixer_flops(kind, job.sequence) for kind, count in job.model.kind_counts.items()
    )
    factors, head = 6 * 32 * job.trained.factor_elements(), 4 * job.model.vocab * job.model.width
    in_16_bits = job.tokens_per_step * (attention + factors + head)
    assert flops.in_job_precision + in_16_bits == pytest.approx(flops.model)


def test_only_trained_parameters_are_reduced() -> None:
    def reduced(options: tuple[str, ...], candidate: Candidate) -> float:
        reductions = ("all_reduce", "reduce_scatter")
        calls = [call for call in estimated(options, candidate).calls if call.collective in reductions]
        return sum(call.message_bytes * call.calls for call in calls if call.axis in ("replicate", "shard"))

    for candidate in (CANDIDATES["ddp"], CANDIDATES["fsdp"]):
        assert reduced(LORA, candidate) < 0.01 * reduced((), candidate)
    gathers = [
        sum(
            call.message_bytes * call.calls
            for call in estimated(options, CANDIDATES["fsdp"]).calls
            if call.collective == "all_gather"
        )
        for options in ((), LORA)
    ]
    assert gathers[0] <= gathers[1] < 1.1 * gathers[0]  # a frozen embedding is gathered in float32


def traced_model(*parameters: ParameterSpec) -> TracedModel:
    spec = ModelSpec("Net", parameters, (BlockSpec("blocks.0"), BlockSpec("blocks.1")), ("encoder",))
    return TracedModel("Net", spec, spec, 1, 64)


def linear(name: str, unit: str, *, trainable: bool = True) -> ParameterSpec:
    return ParameterSpec(f"{name}.weight", (16, 16), unit, trainable=trainable)


def test_frozen_groups_of_a_traced_model_are_those_of_its_own_parameters() -> None:
    """Its trace says which parameters are frozen; the patterns match no parameter of the config's model."""
    groups = '--optimizer.groups=[{pattern="encoder.*",frozen=true},{pattern="blocks.0.*",frozen=true}]'
    config = load_config(None, [groups, "--precision.compute=bf16", "--precision.weights=bf16", "--batch.global=8"])
    traced = traced_model(
        linear("encoder", BEFORE, trainable=False),
        linear("blocks.0", "blocks.0", trainable=False),
        linear("blocks.1", "blocks.1"),
    )
    job = PlannedJob.from_config(config, resolve_cluster("h100:1"), traced=traced)
    assert (job.trained.before, job.trained.block) == (0, 0.5)
    assert job.trainer.recast_traffic_bytes == FROZEN_RECAST_TRAFFIC / 2
    assert CostCache(workload_from_config(config, traced=traced), resolve_cluster("h100:1")).work.trained == job.trained


def test_factors_of_a_traced_model_are_parameters_like_others() -> None:
    """A user's own low-rank adaptation names its weight as it likes."""
    factors = [ParameterSpec(f"blocks.0.lora_{part}", (2, 16), "blocks.0") for part in "ab"]
    shares = shares_of_spec(traced_model(linear("blocks.0.linear", "blocks.0", trainable=False), *factors).spec)
    assert (shares.block, shares.frozen, shares.factors) == (64 / (64 + 256), 256 / (64 + 256), ())


def test_a_run_without_frozen_parameters_is_all_trained() -> None:
    assert cost_cache("llama-8b", "h100:1").work.trained is ALL_TRAINED
