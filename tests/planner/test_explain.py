"""Tests of the explanation, the scaling table and the suggestions: they state the figures of the estimates."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.base.io import format_bytes, format_percent, format_seconds
from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.calibration.prediction import prediction_record
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import describe_plan, exposed_seconds, merged_calls
from meshwright.planner.display.plan_text import trainer_text
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.choice import complexity, memory_risk
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.explanation.explain import compare_plans, explain
from meshwright.planner.search.explanation.mechanism import mechanism
from meshwright.planner.search.explanation.suggestions import infeasible_error
from meshwright.planner.search.plan_result import make_plan, plan_json
from meshwright.planner.search.scaling import critical_batch, scaled_estimate, serial_fraction
from meshwright.planner.search.search import search
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.workload import count_samples
from meshwright.planner.workload.workload_args import build_workload, for_trainer
from tests.planner.planned_cases import CASES, cached_plan, cost_cache, untrainable_workload

PARTS = ("problem", "mechanism", "communication", "tradeoff", "measurement")


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_five_parts_of_the_explanation_state_the_figures_of_the_estimate(model, cluster):
    result = cached_plan(model, cluster)
    chosen = result.chosen
    text = {part: " ".join(getattr(result.explanation, part)) for part in PARTS}
    assert all(text.values())
    assert format_bytes(chosen.job.cluster.device.memory) in text["problem"]
    ddp = result.ladder[0].bottleneck
    assert ddp.message in text["problem"] or ddp.kind == "none"
    for axis in chosen.job.layout.active_axes:
        assert f"{axis} {getattr(chosen.job.layout, axis)}: " in text["mechanism"]
    for call in merged_calls(chosen):
        volume = f"{call.axis} {call.collective}: {call.calls:,.0f} x {format_bytes(call.message_bytes)}"
        assert volume in text["communication"]
    assert format_seconds(chosen.seconds) in text["tradeoff"]
    assert f"{chosen.mfu:.1%}" in text["tradeoff"]
    interval = f"{format_seconds(chosen.interval_low)} to {format_seconds(chosen.interval_high)}"
    assert interval in text["measurement"]
    assert "meshwright train PLAN.toml --steps 20" in text["measurement"]
    for row in result.listed[1:3]:
        assert f"Rejected: {describe_plan(row.best.job)}: " in text["tradeoff"]


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_explanation_answers_the_questions_and_what_breaks_at_ten_times_the_size(model, cluster):
    questions = cached_plan(model, cluster).explanation.questions
    assert len(questions) == 5
    assert all(question.endswith("?") and answer.endswith(".") for question, answer in questions.items())
    assert any(letter.isdigit() for letter in questions["What breaks first at 10x?"])


def explained_questions(model: str, cluster: str, layout: Layout, sharding: str) -> tuple[Estimate, dict[str, str]]:
    plan = cost_cache(model, cluster).estimate(Candidate(layout, 1, sharding))
    return plan, explain(plan).questions


def test_experts_are_replicated_over_fewer_ranks_than_other_parameters():
    _, ddp = explained_questions("mixtral-8x7b", "h200:8x4", Layout(replicate=32, expert=8), "none")
    assert ddp["What is replicated?"].startswith("Replicated over 32 ranks (experts over 4): parameters ")
    _, fsdp = explained_questions("mixtral-8x7b", "h200:8x4", Layout(shard=32, expert=8), "parameters")
    expected = "parameters, gradients, optimizer state over 32 ranks (experts over 4); experts over 8 ranks; "
    assert fsdp["What is sharded?"].startswith(expected)
    _, single = explained_questions("mixtral-8x7b", "h200:8", Layout(replicate=8, expert=8), "none")
    assert single["What is replicated?"].startswith("Replicated over 8 ranks (each expert on one): parameters ")


@pytest.mark.parametrize("sharding", ["optimizer", "gradients"])
def test_unsharded_parameters_of_a_step_are_told_from_the_shard_that_a_rank_updates(sharding):
    plan, questions = explained_questions("llama-8b", "h100:8x4", Layout(shard=32), sharding)
    unsharded, shard = format_bytes(plan.peak_memory.unsharded), format_bytes(plan.peak_memory.parameters)
    replicated = f"Replicated over 32 ranks: unsharded parameters of a step {unsharded}"
    assert questions["What is replicated?"].startswith(replicated)
    assert f"a rank updates {shard} of parameters" in questions["What is sharded?"]
    assert f"{unsharded} of unsharded ones in a step" in questions["What is sharded?"]


def test_run_is_explained_without_a_search():
    run = PlannedJob.from_config(build_workload("llama-8b").base_config, resolve_cluster("h100:2"))
    explanation = explain(estimate(run))
    assert "replicate 2: " in explanation.mechanism[0]
    assert len(explanation.questions) == 4


def test_every_sentence_of_the_explanation_states_a_figure():
    explanation = cached_plan("llama-70b", "h100:8x16").explanation
    for part in PARTS:
        for sentence in getattr(explanation, part):
            assert any(letter.isdigit() for letter in sentence), sentence


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_prediction_record_adds_up_and_survives_json(model, cluster):
    chosen = cached_plan(model, cluster).chosen
    record = json.loads(json.dumps(prediction_record(chosen)))
    assert record["seconds"] == pytest.approx(sum(record["phases"].values()))
    assert record["low"] <= record["seconds"] <= record["high"]
    assert record["memory"]["total"] == chosen.peak_memory.total
    assert record["exposed_seconds"] == pytest.approx(exposed_seconds(chosen))
    assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"])
    assert sum(row["exposed_seconds"] for row in record["communication"]) == pytest.approx(record["exposed_seconds"])


def test_plan_json_survives_json():
    record = plan_json(cached_plan("llama-8b", "h100:8", scaling=True), 3)
    assert json.loads(json.dumps(record)) == record
    assert len(record["ranked"]) == 3
    assert record["plan"] == record["ranked"][0]
    assert [row["factor"] for row in record["scaling"]["strong"]] == [1, 2, 4, 8, 16, 32, 64]


def test_scaling_starts_at_the_plan_and_every_row_fits():
    result = cached_plan("llama-8b", "h100:8", scaling=True)
    table = result.scaling
    assert table is not None
    for rows in (table.strong, table.weak):
        assert rows[0].estimate is result.chosen
        assert rows[0].efficiency == 1
        for row in rows:
            assert row.estimate is None or row.estimate.fits
            assert row.estimate is None or row.estimate.job.layout.ranks == row.devices
            assert row.estimate is None or row.estimate.job.batch.global_ == row.batch
    assert [row.batch for row in table.weak] == [512 * row.factor for row in table.weak]
    assert 0 <= table.serial_fraction <= 1


def test_explanation_and_weak_scaling_agree_at_ten_times_the_size():
    """Ten times the shards do not divide Mixtral's experts, and would not fit: the shard groups are replicated."""
    result = cached_plan("mixtral-8x7b", "h100:8x4", scaling=True)
    cache = cost_cache("mixtral-8x7b", "h100:8x4")
    cache = CostCache(cache.work.on(cache.cluster), cache.cluster)
    ten, same_layout = scaled_estimate(cache, result.chosen, 10, weak=True)
    assert ten is not None
    assert result.scaling is not None
    assert same_layout
    assert ten.peak_memory.total <= cache.memory_limit
    rows = {row.factor: row.efficiency for row in result.scaling.weak}
    assert rows[16] == pytest.approx(result.chosen.seconds / ten.seconds, abs=0.03)
    answer = result.explanation.questions["What breaks first at 10x?"]
    assert f"({format_percent(result.chosen.seconds / ten.seconds)} efficiency)" in answer


def test_serial_fraction_of_amdahls_law_is_recovered():
    for fraction in (0.0, 0.0003, 0.05, 0.5, 1.0):
        points = [(factor, 24.0 * (fraction + (1 - fraction) / factor)) for factor in (1, 2, 4, 8, 64)]
        assert serial_fraction(points) == pytest.approx(fraction)


def test_critical_batch_is_given_or_stated_as_an_assumption():
    model = build_workload("llama-8b").model
    assert critical_batch(model, 4e6) == (4e6, "critical batch: 4 M tokens, as given")
    tokens, assumption = critical_batch(model)
    assert 1e6 < tokens < 2e7
    assert "assumed" in assumption
    assert "arXiv:2001.08361" in assumption


@pytest.mark.parametrize(
    ("model", "cluster", "overrides", "message"),
    [
        ("llama-405b", "h100:8", (), "does not fit: the plan with the least memory ("),
        ("llama-8b", "h100:8", ("--layout.tensor=3",), "layout.tensor = 1, 2, 4, 8"),
        ("llama-8b", "h100:8x2", ("--layout.tensor=16",), "layout.tensor = 16 does not divide 8 kv heads"),
        ("llama-8b", "h100:8x8", ("--layout.pipeline=64",), "more stages than 32 layers"),
        ("llama-8b", "h100:8", ("--layout.expert=2",), "layout.expert = 2 does not divide 0 experts"),
        ("llama-8b", "h100:8", ("--batch.micro=3",), "--batch.micro=3"),
    ],
)
def test_infeasible_workload_raises_one_line_with_suggestions(model, cluster, overrides, message):
    with pytest.raises(ConfigError) as raised:
        make_plan(build_workload(model, overrides), resolve_cluster(cluster))
    assert message in str(raised.value)
    assert "; try " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_suggested_number_of_devices_is_the_smallest_that_fits():
    cache = cost_cache("llama-70b", "h100:8")
    message = str(infeasible_error(cache))
    devices = int(message.partition("; try ")[2].split(" devices")[0].split(" ")[-1].replace(",", ""))
    assert devices > 8
    assert search(CostCache(cache.work, cache.cluster.with_devices(devices))).ranked
    if devices > 16:
        assert not search(CostCache(cache.work, cache.cluster.with_devices(devices - 8))).ranked


def test_shorter_sequence_is_suggested_if_it_fits():
    work = build_workload("llama-8b", sequence=1 << 20, batch=8)
    assert "--sequence " in str(infeasible_error(CostCache(work, resolve_cluster("h100:8"))))


def test_model_that_the_decoder_cannot_train_is_explained_without_a_run_file():
    result = make_plan(untrainable_workload(), resolve_cluster("h100:8x4"))
    assert result.explanation.measurement[0].startswith("Train 20 steps.")


def test_rejected_plan_is_called_more_complex_only_if_it_is():
    result = cached_plan("llama-8b", "h100:8")
    plan = result.chosen
    simple = next(each for each in result.search.ranked if complexity(each) <= complexity(plan) and each is not plan)
    faster = replace(simple, phases={"forward": 0.9 * plan.seconds})
    assert "complex" not in compare_plans(plan, faster)
    memory = faster.peak_memory
    activations = memory.activations + 0.99 * plan.job.cluster.device.memory - memory.total
    risky = replace(faster, memory_by_rank=[replace(memory, activations=activations)])
    assert memory_risk(risky) > memory_risk(plan)
    assert f"faster, but with a risk of {format_percent(memory_risk(risky))} that it does not fit" in compare_plans(
        plan, risky
    )
    complex_plan = next(each for each in result.search.ranked if complexity(each) > complexity(plan))
    assert "faster, but more complex" in compare_plans(
        plan, replace(complex_plan, phases={"forward": 0.9 * plan.seconds})
    )


def test_suggested_larger_device_is_not_a_slower_variant():
    """An H100 with 96 GB and 500 W has more memory than an H100, and is slower."""
    message = str(infeasible_error(cost_cache("llama-70b", "h100:8")))
    assert "the same number of " in message
    assert "500w" not in message


def test_one_sample_is_singular():
    assert (count_samples(1), count_samples(2048)) == ("1 sample", "2,048 samples")
    work = build_workload("llama-8b", ("--layout.replicate=2",), batch=2)
    sentences = mechanism(estimate(PlannedJob.from_config(work.base_config, resolve_cluster("h100:2"))))
    assert "each replica processes 1 sample per step" in sentences[0]


def test_trainer_line_names_the_generation_of_the_profile():
    work = build_workload("llama-8b")
    assert trainer_text(for_trainer(work, "deepspeed")) == (
        "deepspeed: Megatron-DeepSpeed 2022 bf16, without flash attention"
    )
    assert trainer_text(for_trainer(work, "torchtitan")) == "torchtitan: torchtitan 2025 compiled"
    assert trainer_text(work) == "meshwright"
