"""Reasons are made of the estimate's figures; the scale and the remedies of estimates that were made."""

from __future__ import annotations

import json

import pytest
from planned_cases import CASES, answered, desk, foreign

from meshwright.errors import ConfigError
from meshwright.io import format_bytes, format_seconds
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.calibration.prediction import prediction_record
from meshwright.planner.describe import describe_plan, exposed_seconds, merged_calls
from meshwright.planner.hardware.resolve_cluster import resolve_cluster
from meshwright.planner.search.explain import explain
from meshwright.planner.search.plan_result import as_json, make_plan
from meshwright.planner.search.scaling import critical_batch, serial_share
from meshwright.planner.search.search import CostCache, search
from meshwright.planner.search.suggestions import infeasible_error
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.workload_args import build_workload

FIVE = ("problem", "mechanism", "communication", "tradeoff", "measurement")


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_the_five_parts_hold_the_estimates_own_figures(model, cluster):
    whole = answered(model, cluster)
    chosen, told = whole.chosen, whole.explanation
    text = {part: " ".join(getattr(told, part)) for part in FIVE}
    assert all(text.values())
    assert format_bytes(chosen.job.cluster.device.memory) in text["problem"]
    assert whole.ladder[0].bottleneck.message in text["problem"] or whole.ladder[0].bottleneck.kind == "nothing"
    for axis in chosen.job.layout.axes:
        assert f"{axis} {getattr(chosen.job.layout, axis)}: " in text["mechanism"]
    for call in merged_calls(chosen):
        assert (
            f"{call.axis} {call.collective}: {call.calls:,.0f} x {format_bytes(call.message_bytes)}"
            in text["communication"]
        )
    assert format_seconds(chosen.seconds) in text["tradeoff"]
    assert f"{chosen.mfu:.1%}" in text["tradeoff"]
    assert f"{format_seconds(chosen.interval_low)} to {format_seconds(chosen.interval_high)}" in text["measurement"]
    assert "meshwright train PLAN.toml --steps 20" in text["measurement"]
    for other in whole.found.ranked[1:3]:
        assert f"Not {describe_plan(other.job)}: " in text["tradeoff"]


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_the_four_questions_and_ten_times_the_size_are_answered(model, cluster):
    questions = answered(model, cluster).explanation.questions
    assert len(questions) == 5
    assert all(question.endswith("?") and told.endswith(".") for question, told in questions.items())
    assert any(digit.isdigit() for digit in questions["What breaks first at 10x?"])


def test_a_run_is_explained_without_a_search():
    work = build_workload("llama-8b")
    run = PlannedJob.from_config(work.base_config, resolve_cluster("h100:2"))
    told = explain(estimate(run))
    assert "replicate 2: " in told.mechanism[0]
    assert len(told.questions) == 4


def test_a_sentence_has_a_figure_in_it():
    told = answered("llama-70b", "h100:8x16").explanation
    for part in FIVE:
        for sentence in getattr(told, part):
            assert any(letter.isdigit() for letter in sentence), sentence


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_a_prediction_adds_up_and_survives_json(model, cluster):
    chosen = answered(model, cluster).chosen
    record = json.loads(json.dumps(prediction_record(chosen)))
    assert record["seconds"] == pytest.approx(sum(record["phases"].values()))
    assert record["low"] <= record["seconds"] <= record["high"]
    assert record["memory"]["total"] == chosen.peak_memory.total
    assert record["exposed_seconds"] == pytest.approx(exposed_seconds(chosen))
    assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"])
    assert sum(row["exposed_seconds"] for row in record["traffic"]) == pytest.approx(record["exposed_seconds"])


def test_the_whole_answer_survives_json():
    whole = answered("llama-8b", "h100:8", scale=True)
    record = as_json(whole, 3)
    assert json.loads(json.dumps(record)) == record
    assert len(record["ranked"]) == 3
    assert record["plan"] == record["ranked"][0]
    assert [row["factor"] for row in record["scale"]["strong"]] == [1, 2, 4, 8, 16, 32, 64]


def test_the_scale_begins_at_the_plan_and_never_gains_more_than_devices():
    whole = answered("llama-8b", "h100:8", scale=True)
    scale = whole.scale
    assert scale is not None
    for rows in (scale.strong, scale.weak):
        assert rows[0].estimate is whole.chosen
        assert rows[0].efficiency == 1
        for row in rows:
            assert row.estimate is None or row.estimate.fits
            assert row.estimate is None or row.estimate.job.layout.ranks == row.devices
            assert row.estimate is None or row.estimate.job.batch.global_ == row.batch
    assert [row.batch for row in scale.weak] == [512 * row.factor for row in scale.weak]
    assert 0 <= scale.serial_fraction <= 1


def test_amdahls_share_is_found_again():
    whole = answered("llama-8b", "h100:8", scale=True)

    class Fake:
        def __init__(self, taken):
            self.seconds = taken

    class Line:
        def __init__(self, factor, share):
            self.factor, self.estimate = factor, Fake(share + (1 - share) / factor)

    assert whole.scale is not None
    for share in (0.0, 0.05, 0.5, 1.0):
        assert serial_share([Line(factor, share) for factor in (1, 2, 4, 8)]) == pytest.approx(share)


def test_the_critical_batch_is_given_or_said_to_be_assumed():
    model = build_workload("llama-8b").model
    assert critical_batch(model, 4e6) == (4e6, "critical batch 4 M tokens, as given")
    tokens, told = critical_batch(model)
    assert 1e6 < tokens < 2e7
    assert "assumed" in told
    assert "arXiv:2001.08361" in told


@pytest.mark.parametrize(
    ("model", "cluster", "words", "said"),
    [
        ("llama-405b", "h100:8", (), "does not fit: the lightest plan ("),
        ("llama-8b", "h100:8", ("--layout.tensor=3",), "layout.tensor = 1, 2, 4, 8"),
        ("llama-8b", "h100:8x2", ("--layout.tensor=16",), "layout.tensor = 16 does not divide 8 kv heads"),
        ("llama-8b", "h100:8x8", ("--layout.pipeline=64",), "more stages than 32 layers"),
        ("llama-8b", "h100:8", ("--layout.expert=2",), "layout.expert = 2 does not divide 0 experts"),
        ("llama-8b", "h100:8", ("--batch.micro=3",), "--batch.micro=3"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_with_what_could(model, cluster, words, said):
    with pytest.raises(ConfigError) as refused:
        make_plan(build_workload(model, words), resolve_cluster(cluster))
    assert said in str(refused.value)
    assert "allowed: " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_devices_that_a_refusal_names_do_and_a_node_less_does_not():
    at = desk("llama-70b", "h100:8")
    told = str(infeasible_error(at))
    devices = int(told.partition("allowed: ")[2].split(" devices")[0].split(" ")[-1].replace(",", ""))
    assert devices > 8
    assert search(CostCache(at.work, at.cluster.with_devices(devices))).ranked
    if devices > 16:
        assert not search(CostCache(at.work, at.cluster.with_devices(devices - 8))).ranked


def test_a_shorter_sequence_is_named_where_it_would_do():
    work = build_workload("llama-8b", sequence=1 << 20, batch=8)
    told = str(infeasible_error(CostCache(work, resolve_cluster("h100:8"))))
    assert "--sequence " in told


def test_a_foreign_model_is_explained_without_a_run():
    whole = make_plan(foreign(), resolve_cluster("h100:8x4"))
    assert whole.explanation.measurement[0].startswith("Train 20 steps of it.")
