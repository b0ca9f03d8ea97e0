"""Tests of the choice: headroom, risk, families, baselines, priced settings, offload, other trainers and costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.base.models.architecture import Architecture
from meshwright.base.topology.layout import Layout
from meshwright.base.user_code.user_code import UserCode
from meshwright.errors import ConfigError
from meshwright.planner.api import plan_workload
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import describe_plan, is_compiled
from meshwright.planner.search.choice import (
    CHOICE_TOLERANCE,
    TIE_TOLERANCE,
    complexity,
    expected_seconds,
    family,
    memory_accuracy,
    memory_risk,
    rank_estimates,
    why_first,
)
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.explanation.baselines import FSDP, FSDP_CHECKPOINTED, TENSOR_ZERO_1, build_baselines
from meshwright.planner.search.explanation.suggestions import infeasible_error
from meshwright.planner.search.plan_result import make_plan, plan_json
from meshwright.planner.search.run_cost import parse_tokens, run_cost
from meshwright.planner.search.search import search
from meshwright.planner.search.trainer_rules import RULES, mfu_with_masked_scores, trainer_rules
from meshwright.planner.workload.trainer_profiles import TRAINERS
from meshwright.planner.workload.workload import HEADROOM
from meshwright.planner.workload.workload_args import build_workload, for_trainer
from tests.planner.planned_cases import CASES, cached_plan, cost_cache

LLAMA_2_7B = Architecture("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000)


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_every_plan_leaves_the_headroom_free(model, cluster):
    result = cached_plan(model, cluster)
    assert result.workload.headroom == HEADROOM == 0.08
    for plan in [*result.search.ranked, *result.search.pareto_front]:
        assert plan.peak_memory.total <= (1 - HEADROOM) * plan.job.cluster.device.memory


def test_headroom_is_an_option_and_a_smaller_one_admits_faster_plans():
    cluster = resolve_cluster("h100:8")
    times = []
    for headroom in (0.0, 0.3, 0.5):
        work = for_trainer(build_workload("llama-8b"), "meshwright", headroom)
        plan = make_plan(work, cluster).chosen
        assert plan.peak_memory.total <= (1 - headroom) * cluster.device.memory
        times.append(expected_seconds(plan))
    assert times[0] <= (1 + TIE_TOLERANCE) * times[1] <= (1 + TIE_TOLERANCE) ** 2 * times[2]
    with pytest.raises(ConfigError, match="headroom"):
        for_trainer(build_workload("llama-8b"), "meshwright", 1.0)


def test_a_headroom_that_helps_is_suggested():
    work = for_trainer(build_workload("llama-8b"), "meshwright", 0.9)
    message = str(infeasible_error(cost_cache("llama-8b", "h100:8").__class__(work, resolve_cluster("h100:8"))))
    assert "90%" in message
    assert "--headroom 0." in message


def test_risk_grows_with_memory_and_is_priced():
    plans = search(cost_cache("llama-8b", "h100:8")).ranked
    by_memory = sorted(plans, key=lambda plan: plan.peak_memory.total)
    risks = [memory_risk(plan) for plan in by_memory]
    assert risks == sorted(risks)
    assert all(plan.seconds <= expected_seconds(plan) <= 4 / 3 * plan.seconds for plan in plans)


@pytest.mark.parametrize("trainer", ["meshwright", "megatron"])
def test_risk_of_a_plan_at_the_end_of_its_80_percent_interval_is_a_tenth(trainer):
    work = for_trainer(build_workload("llama-8b"), trainer)
    cluster = resolve_cluster("h100:8")
    plan = search(cost_cache("llama-8b", "h100:8").__class__(work.on(cluster), cluster)).ranked[0]
    device = replace(cluster.device, memory=plan.peak_memory.total * (1 + memory_accuracy(plan.job)))
    full = replace(plan, job=replace(plan.job, cluster=replace(cluster, device=device)))
    assert memory_risk(full) == pytest.approx(0.1, abs=0.001)


def with_layout(layout: Layout, sharding: str = "none", seconds: float = 1.0, memory: float = 0.5) -> Estimate:
    """A plan with this layout, this step time, and so much of the device's memory in use."""
    plan = cached_plan("gpt2-124m", "a100-80:8").chosen
    job = replace(plan.job, layout=layout, sharding=sharding, activation_checkpoint="none", stages_per_rank=1)
    peak = plan.peak_memory
    activations = peak.activations + memory * job.cluster.device.memory - peak.total
    return replace(plan, job=job, phases={"forward": seconds}, memory_by_rank=[replace(peak, activations=activations)])


def test_ddp_is_the_simplest_plan_then_zero_1_then_fsdp_then_model_parallelism():
    ddp, fsdp = with_layout(Layout(replicate=8)), with_layout(Layout(shard=8), "parameters")
    zero_1, zero_2 = (with_layout(Layout(shard=8), sharding) for sharding in ("optimizer", "gradients"))
    assert complexity(ddp) < complexity(zero_1) < complexity(zero_2) == complexity(fsdp)
    for axis in ("pipeline", "context", "tensor"):
        alone = with_layout(Layout(**{axis: 8}))
        assert complexity(fsdp) < complexity(alone) < complexity(with_layout(Layout(replicate=2, **{axis: 4})))


def test_ddp_comes_before_a_pipeline_that_is_as_fast():
    ddp, pipeline = with_layout(Layout(replicate=2), seconds=1.001), with_layout(Layout(pipeline=2))
    assert rank_estimates([pipeline, ddp])[0] is ddp
    result = make_plan(build_workload("tiny"), resolve_cluster("h100:2"))
    assert result.chosen.job.layout == Layout(replicate=2)


def test_list_says_why_the_first_plan_is_not_the_fastest():
    ddp, pipeline = with_layout(Layout(replicate=2), seconds=1.02), with_layout(Layout(pipeline=2))
    assert why_first([ddp, pipeline]) == (
        "Plan 1 is 2.0% slower than plan 2 and simpler: of the plans within 3% of the best, the simplest comes first."
    )
    assert why_first([pipeline, ddp]) == why_first([with_layout(Layout(replicate=2), seconds=1.0005), pipeline]) == ""
    full = with_layout(Layout(replicate=2), seconds=1.0, memory=0.99)
    assert "2.0% slower than plan 2, with a risk of 0.0% and not 4" in why_first([ddp, full])


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_listed_plans_are_of_different_families_and_fold_similar_ones(model, cluster):
    result = cached_plan(model, cluster)
    families = [family(row.best.job) for row in result.listed]
    assert len(set(families)) == len(families)
    assert sum(len(row.plans) for row in result.listed) == len(result.search.ranked)
    for row in result.listed:
        assert {family(plan.job) for plan in row.plans} == {family(row.best.job)}
        assert row.similar <= len(row.plans) - 1


def test_all_lists_every_plan():
    result = make_plan(build_workload("llama-8b"), resolve_cluster("h100:8"), every_plan=True)
    assert [row.best for row in result.listed] == result.search.ranked


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_baselines_are_compared_and_those_that_fit_are_not_faster(model, cluster):
    result = cached_plan(model, cluster)
    assert [row.name for row in result.baselines] == ["DDP", FSDP, "FSDP + full checkpointing", TENSOR_ZERO_1]
    for row in result.baselines:
        if row.estimate is None:
            assert row.reason
            continue
        limit = (1 - HEADROOM) * row.estimate.job.cluster.device.memory
        assert (row.reason == "") == (row.estimate.peak_memory.total <= limit)
        if not row.reason:
            assert expected_seconds(result.chosen) <= (1 + CHOICE_TOLERANCE) * expected_seconds(row.estimate)


def test_baseline_that_does_not_divide_says_so():
    rows = {row.name: row for row in cached_plan("llama-405b", "h100:8x2048").baselines}
    assert rows["DDP"].estimate is None
    assert "2,048 does not divide over 16,384 data-parallel ranks" in rows["DDP"].reason


def test_baseline_that_a_profile_does_not_model_is_not_said_to_be_unsupported():
    cluster = resolve_cluster("h100:8")
    work = for_trainer(build_workload("llama-8b"), "megatron").on(cluster)
    rows = {row.name: row for row in build_baselines(CostCache(work, cluster))}
    assert rows[FSDP].reason == rows[FSDP_CHECKPOINTED].reason == "it is not modelled for megatron"
    assert rows[TENSOR_ZERO_1].estimate is not None


def test_compiled_blocks_are_chosen_and_their_gain_is_priced():
    result = cached_plan("llama-8b", "h100:8")
    assert is_compiled(result.chosen.job)
    eager = next(change for change in result.settings if change.option == "--compile.enabled=false")
    assert eager.time_change > 0.05
    run = make_plan(build_workload("llama-8b", ["--compile.enabled=false"]), resolve_cluster("h100:8"))
    assert not any(is_compiled(plan.job) for plan in run.search.ranked)
    compiled = next(change for change in run.settings if change.option == "--compile.enabled=true")
    assert compiled.time_change < -0.05


def test_float8_checkpointing_and_offload_are_priced():
    options = {change.option: change for change in cached_plan("llama-8b", "h100:8").settings}
    assert options["--precision.float8=true"].time_change < 0
    assert (
        options["--activation_checkpoint.mode=full"].memory_change
        < 0
        < options["--activation_checkpoint.mode=full"].time_change
    )
    ddp = ["--layout.shard=none", "--layout.tensor=1", "--layout.context=1", "--layout.pipeline=1"]
    replicated = make_plan(build_workload("llama-1b", ddp, 512, 2048), resolve_cluster("h100:8")).settings
    assert {change.option: change for change in replicated}["--optimizer.cpu_offload=true"].memory_change < 0
    ampere = {change.option for change in make_plan(build_workload("llama-8b"), resolve_cluster("a100-80:8")).settings}
    assert "--precision.float8=true" not in ampere


def test_seven_billion_parameters_on_two_small_devices_are_planned_with_offload():
    work = build_workload("llama-8b", ["--model.ffn=11008", "--model.vocab=32000", "--model.kv_heads=32"], 64, 4096)
    result = make_plan(work, resolve_cluster("a100-40:2"))
    assert result.chosen.job.offload
    assert result.chosen.peak_memory.optimizer == 0
    assert "optimizer state in host memory" in describe_plan(result.chosen.job)
    assert result.ladder[-1].estimate is result.chosen
    with pytest.raises(ConfigError, match="does not fit"):
        make_plan(build_workload("llama-8b", ["--optimizer.cpu_offload=false"], 64, 4096), resolve_cluster("a100-40:2"))


def test_offload_is_not_chosen_where_a_plan_fits_without_it():
    for model, cluster in CASES:
        assert not any(plan.job.offload for plan in cached_plan(model, cluster).search.ranked)


def test_batch_that_does_not_divide_is_named_with_the_nearest_that_do():
    with pytest.raises(ConfigError) as raised:
        make_plan(build_workload("llama-8b"), resolve_cluster("h100:7"))
    message = str(raised.value)
    assert "512 samples does not divide over 7 data-parallel ranks" in message
    for alternative in ("--batch 511", "--batch 518", "8 devices"):
        assert alternative in message


@pytest.mark.parametrize("name", sorted(set(TRAINERS) - {"meshwright", "meshwright-eager"}))
def test_plan_for_a_trainer_keeps_its_rules_and_states_its_flop_convention(name):
    rules = trainer_rules(name)
    result = make_plan(for_trainer(build_workload("llama-8b"), name), resolve_cluster("h100:8x4"))
    assert result.search.ranked
    for plan in result.search.ranked:
        job = plan.job
        assert job.trainer.name == TRAINERS[name].name
        assert job.sharding in ("none", *rules.shardings)
        assert set(job.layout.active_axes) - {"replicate"} <= rules.axes
        assert job.layout.pipeline == 1 or job.schedule in (rules.schedules or (job.schedule,))
        assert job.activation_checkpoint in rules.checkpoint_modes
    record = plan_json(result, 3)["trainer"]
    assert (record["name"], record["profile"]) == (name, TRAINERS[name].name)
    whole = mfu_with_masked_scores(result.chosen)
    assert record["mfu_causal"] == result.chosen.mfu < whole == record["mfu_whole_scores"]
    assert ("whole" in record["mfu_convention"]) == rules.counts_masked_scores
    assert record["mfu"] >= (whole if rules.counts_masked_scores else result.chosen.mfu)


def test_trainers_without_rules_of_their_own_are_not_restricted():
    assert {name for name in TRAINERS if not any(name.startswith(key) for key in RULES)} == set()
    with pytest.raises(ConfigError, match="unknown"):
        for_trainer(build_workload("llama-8b"), "unheard-of")


UNSUPPORTED_OPTIONS = [
    ("torchtitan", "--compile.enabled=false", "does not model compile.enabled; try --trainer torchtitan-eager"),
    ("torchtitan", "--optimizer.kind=muon", "the profile of torchtitan does not model optimizer.kind; expected"),
    ("torchtitan", "--precision.float8=true", "does not model precision.float8; try --precision fp8"),
    (
        "torchtitan",
        "--layout.shard=optimizer",
        "the profile of torchtitan does not model layout.shard = optimizer; expected one of none, parameters",
    ),
    ("torchtitan", "--pipeline.schedule=dualpipev", "pipeline.schedule = dualpipev; expected one of gpipe"),
    ("torchtitan", "--context.method=all-to-all", "context.method = all-to-all: its method is gather"),
    ("llm-foundry", "--layout.tensor=2", "llm-foundry does not support tensor parallelism"),
    ("llm-foundry", "--pipeline.stages=2", "llm-foundry does not support pipeline parallelism"),
    ("megatron-2021", "--layout.context=2", "megatron-2021 does not support context parallelism"),
    ("megatron-2021", "--layout.shard_degree=2", "does not shard over data-parallel ranks"),
    ("deepspeed", "--activation_checkpoint.mode=selective", "mode = selective; expected one of none, full"),
    ("megatron", "--layout.shard=parameters", "layout.shard = parameters; expected one of none, optimizer"),
    ("deepspeed", "--layout.shard=parameters --layout.pipeline=2", "together with a pipeline"),
    ("meshwright", "--layout.shard=gradients --layout.pipeline=2", "together with a pipeline"),
    ("meshwright-eager", "--compile.enabled=true", "meshwright-eager does not compile blocks"),
]


@pytest.mark.parametrize(("trainer", "options", "message"), UNSUPPORTED_OPTIONS)
def test_options_that_a_trainer_does_not_run_or_model_are_refused(trainer, options, message):
    with pytest.raises(ConfigError) as raised:
        plan_workload("llama-1b", UserCode(), "h100:8", options.split(), trainer=trainer)
    assert message in str(raised.value)


SUPPORTED_OPTIONS = {
    "torchtitan": "--layout.shard=parameters --layout.pipeline=2 --pipeline.schedule=zbv",
    "Megatron": "--layout.tensor=4 --layout.shard=optimizer --activation_checkpoint.mode=full --context.method=ring",
    "meta-2024": "--layout.shard=gradients --layout.pipeline=2 --batch.global=64 --optimizer.cpu_offload=true",
    "meshwright": "--optimizer.kind=muon --compile.enabled=false --layout.context=2 --context.method=all-to-all",
}


@pytest.mark.parametrize("trainer", SUPPORTED_OPTIONS)
def test_options_that_a_trainer_runs_are_pinned_and_its_name_is_spelled_in_any_case(trainer):
    options = SUPPORTED_OPTIONS[trainer].split()
    work = plan_workload("llama-1b", UserCode(), "h100:8", options, trainer=trainer)
    assert work.trainer_name == trainer.lower()
    for key, value in work.pinned.items():
        assert f"--{key}={value}".lower() in options


def test_eager_meshwright_is_planned_without_compiled_blocks():
    result = make_plan(for_trainer(build_workload("llama-8b"), "meshwright-eager"), resolve_cluster("h100:8"))
    assert not any(is_compiled(plan.job) for plan in result.search.ranked)


def test_token_budget_is_priced_in_device_hours_money_and_energy():
    plan = cached_plan("llama-8b", "h100:8").chosen
    cost = run_cost(plan, 15e12, 2.5)
    assert cost.gpu_hours == pytest.approx(15e12 / plan.tokens_per_second * 8 / 3600)
    assert cost.money == pytest.approx(2.5 * cost.gpu_hours)
    assert cost.megawatt_hours == pytest.approx(cost.gpu_hours * 700 / 1e6)
    assert cost.gpu_hours_low < cost.gpu_hours < cost.gpu_hours_high
    assert run_cost(plan, 15e12, None).money is None
    two_nodes = cached_plan("deepseek-moe-16b", "h100:8x2").chosen
    assert run_cost(two_nodes, 1e12, None).gpu_hours == pytest.approx(1e12 / two_nodes.tokens_per_second * 16 / 3600)
    result = make_plan(build_workload("llama-8b"), resolve_cluster("h100:8"), tokens=1e12, price=2.0)
    assert json.loads(json.dumps(plan_json(result, 1)))["cost"]["money"] == pytest.approx(result.cost.money)


@pytest.mark.parametrize(("text", "tokens"), [("15T", 15e12), ("300B", 3e11), ("1.5m", 1.5e6), ("2e12", 2e12)])
def test_token_budget_is_parsed(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "T", "many", "-1B", "nan", "inf", "1e30"])
def test_token_budget_that_is_no_number_is_refused(text):
    with pytest.raises(ConfigError, match="--tokens"):
        parse_tokens(text)


def test_scaling_names_the_next_exposed_collective_and_the_serial_seconds():
    result = cached_plan("llama-8b", "h100:8", scaling=True)
    table = result.scaling
    assert table is not None
    assert table.serial_seconds == pytest.approx(table.serial_fraction * result.chosen.seconds)
    assert 0 < table.serial_seconds < 0.1 * result.chosen.seconds
    assert table.largest.job.layout.ranks in [row.devices for row in table.strong]
    ddp = ["--layout.shard=none", "--layout.tensor=1", "--layout.context=1", "--layout.pipeline=1"]
    pinned = make_plan(build_workload("llama-1b", ddp, 512, 2048), resolve_cluster("h100:8"), scaling=True).scaling
    assert pinned is not None
    assert pinned.strong_exposure is not None
    assert pinned.strong_exposure.axis == "replicate"
    assert pinned.strong_exposure.share >= 0.01
    assert pinned.strong_exposure.devices > 8
