"""`plan --replay`: published runs are predicted with a bounded error, and what cannot be predicted is excluded."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwright.errors import ConfigError
from meshwright.planner.calibration.published import published_software
from meshwright.planner.calibration.published.published_runs import parse_run, read_published_runs
from meshwright.planner.calibration.replay import percentile_90, rank_sweep, replay, replay_run
from meshwright.planner.display.replay_text import show_replay
from meshwright.planner.workload import trainer_profiles

PUBLISHED_RUNS = Path(__file__).parents[2] / "examples" / "published_runs.json"
"""One in seven of the collected runs, two full sweeps, and the runs that report memory classes or ran out of memory."""
SCORE_KEYS = [
    "source",
    "runs",
    "timed",
    "median",
    "percentile_90",
    "mean",
    "source_left_out",
    "device_left_out",
    "inside",
    "memory_runs",
    "memory_median",
    "memory_percentile_90",
    "memory_bias",
    "out_of_memory",
    "out_of_memory_found",
    "completed_runs",
    "false_out_of_memory",
    "sweeps",
    "tau",
    "regret",
    "max_regret",
]


@pytest.fixture(scope="module")
def replayed() -> dict[str, Any]:
    return replay(PUBLISHED_RUNS)


def scores(replayed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {score["source"]: score for score in replayed["scores"]}


def test_replay_json_keys_do_not_change(replayed: dict[str, Any]) -> None:
    assert list(replayed) == ["file", "scores", "left_out", "records"]
    assert all(list(score) == SCORE_KEYS for score in replayed["scores"])
    record_keys = ["id", "software", "assumed", "derived", "seconds", "memory", "fits", "phases"]
    assert all(list(record) == record_keys for record in replayed["records"])


def test_step_time_error_of_fully_stated_runs_is_bounded(replayed: dict[str, Any]) -> None:
    score = scores(replayed)["fully stated"]
    assert score["timed"] >= 40
    assert score["median"] <= 0.05
    assert score["percentile_90"] <= 0.2


def test_eighty_percent_interval_contains_about_eighty_percent(replayed: dict[str, Any]) -> None:
    assert 0.72 <= scores(replayed)["all"]["inside"] <= 0.95


def test_layouts_of_the_same_work_are_ranked_as_measured(replayed: dict[str, Any]) -> None:
    score = scores(replayed)["bigscience"]
    assert score["sweeps"] >= 2
    assert score["tau"] >= 0.55  # one of three sweeps has a run that took as long for fewer samples as for more


def test_excluded_runs_have_a_reason(replayed: dict[str, Any]) -> None:
    excluded = replayed["left_out"]
    assert excluded
    assert all(excluded.values())
    assert not set(excluded) & {record["id"] for record in replayed["records"]}


def shown(replayed: dict[str, Any], width: int) -> str:
    output = io.StringIO()
    show_replay(replayed, Console(file=output, width=width))
    return output.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_replay_tables_fit_the_terminal_without_truncation(replayed: dict[str, Any], width: int) -> None:
    text = shown(replayed, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for heading in ("median", "percentile", "mean", "80 %", "memory", "OOM", "sweeps", "(tau)", "regret"):
        assert heading in text
    total = next(line for line in text.splitlines() if line.startswith("fully stated"))
    assert f"{100 * scores(replayed)['fully stated']['median']:.1f}%" in total


def test_long_source_is_wrapped_not_truncated(replayed: dict[str, Any]) -> None:
    source = "an-organization-with-a-long-name/a-repository-of-runs"
    text = shown({**replayed, "scores": [replayed["scores"][0] | {"source": source}]}, 80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def run_row(**changes: Any) -> dict[str, Any]:
    rows = json.loads(PUBLISHED_RUNS.read_text())
    return next(row for row in rows if row["id"].startswith("mosaic")) | changes


def test_run_that_took_twice_as_long_is_outside_its_interval() -> None:
    replayed = replay_run(parse_run(run_row(), "right"))
    assert replayed.inside_interval
    assert replayed.error is not None
    twice = {"reported": {"step_time_s": 2 * (replayed.run.seconds or 0)}, "derived": {}}
    slower = replay_run(parse_run(run_row(**twice), "slower"))
    assert not slower.inside_interval
    assert slower.error is not None
    assert slower.error < -0.4


def test_kendall_tau_and_regret_of_a_wrong_order() -> None:
    replayed = replay_run(parse_run(run_row(), "one"))
    assert replayed.run.seconds
    double_batch = 2 * replayed.run.job.batch.global_
    assert parse_run(run_row(global_batch=double_batch), "longer").seconds is not None
    half_the_time = {"reported": {"step_time_s": replayed.run.seconds / 2}, "derived": {}}
    swapped = parse_run(run_row(global_batch=double_batch, **half_the_time), "swapped")
    assert rank_sweep([replayed, replay_run(swapped)]) == (-1.0, 1.0)


@pytest.mark.parametrize(
    "text",
    ["", "{", "{}", "[]", "[1, 2", "nothing", "[" * 100_000],
    ids=["empty", "torn", "no list", "no run", "torn list", "no json", "deep"],
)
def test_file_that_is_not_a_list_of_runs_is_a_one_line_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_published_runs(path)
    assert "\n" not in str(raised.value)


def test_run_on_an_unknown_device_or_without_a_size_is_excluded(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    without_width = {key: value for key, value in run_row()["model"].items() if key != "hidden"}
    rows = [run_row(id="unknown device", gpu="TPUv9"), run_row(id="no width", model=without_width)]
    path.write_text(json.dumps(rows))
    runs, excluded = read_published_runs(path)
    assert not runs
    assert list(excluded) == ["unknown device", "no width"]
    assert "does not state 'hidden'" in excluded["no width"]


RECORDS_WITHOUT_ID: list[Any] = [
    (None, "record 1 is not valid: it is None and not an object"),
    (5, "record 1 is not valid: it is 5"),
    ([], r"record 1 is not valid: it is \[\]"),
    ({}, "record 1 is not valid: id is None"),
    (run_row(id=5), r"record 1 \(5\) is not valid: id is 5"),
    (run_row(id="x" * 300), "id is 'x.*expected a text of at most 256 characters"),
    (run_row(id="first"), r"record 1 \('first'\) is not valid: an earlier record has the same id"),
]


@pytest.mark.parametrize(("row", "message"), RECORDS_WITHOUT_ID)
def test_file_with_a_record_without_an_id_of_its_own_is_refused(tmp_path: Path, row: Any, message: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([run_row(id="first"), row]))
    with pytest.raises(ConfigError, match=message) as raised:
        read_published_runs(path)
    assert "\n" not in str(raised.value)


INVALID_RUNS: list[tuple[dict[str, Any], str]] = [
    ({"id": "empty"}, "source is None, expected text"),
    (run_row(model={"hidden": "wide"}), "hidden = 'wide' is not an integer"),
    (run_row(gpus=-8), "gpus = -8 is out of range"),
    (run_row(gpus=True), "gpus is True"),
    (run_row(global_batch=0), "global_batch = 0 is out of range"),
    (run_row(micro_batch=-1), "micro_batch = -1 is out of range"),
    (run_row(model=run_row()["model"] | {"layers": 10**18}), "layers = 1000000000000000000 is out of range"),
    (run_row(model=run_row()["model"] | {"experts": 8, "moe_ffn": 64, "topk": -3}), "topk = -3 is out of range"),
    (run_row(layout={"dp": 0}), "dp = 0 is out of range"),
    (run_row(layout=[]), r"layout is \[\], expected an object"),
    (run_row(reported={"step_time_s": -1}), "step_time_s = -1 is not a possible measurement"),
    (run_row(reported={"step_time_s": "fast"}), "step_time_s = 'fast' is not a possible measurement"),
    (run_row(derived=[1]), r"derived is \[1\], expected an object"),
    (run_row(notes=["a"]), r"notes is \['a'\], expected text"),
    (run_row(notes="x" * 5000), "notes has more than 4,096 characters"),
    (run_row(precision=16), "precision is 16, expected text"),
    (run_row(recompute=[]), r"recompute is \[\], expected text, true or false"),
    (run_row(quality_flags=[["a"]]), "quality_flags is .* expected at most 64 texts"),
    (run_row(flags={"a": 1}), "flags is .* expected text or a list of texts"),
    (run_row(model=run_row()["model"] | {"attention": 5}), "attention is 5, expected text"),
    (run_row(layout={"dp": 8, "sharding": 3}), "sharding is 3, expected text"),
]


@pytest.mark.parametrize(("row", "message"), INVALID_RUNS)
def test_record_that_is_not_valid_is_excluded_and_the_others_are_predicted(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([run_row(id="first"), row | {"id": "second"}]))
    replayed = replay(path)
    assert [record["id"] for record in replayed["records"]] == ["first"]
    assert re.match(f"its record is not valid: {message}", replayed["left_out"]["second"])
    assert "second: its record is not valid" in shown(replayed, 120)


@pytest.mark.parametrize(("row", "message"), INVALID_RUNS)
def test_file_without_a_valid_record_is_a_one_line_error(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([row | {"id": "second"}]))
    with pytest.raises(ConfigError, match=rf"record 0 \('second'\) is not valid: {message}") as raised:
        read_published_runs(path)
    assert "\n" not in str(raised.value)


def test_run_without_activation_checkpointing_mode_records_an_assumption() -> None:
    incomplete = run_row()
    del incomplete["recompute"]
    assert parse_run(incomplete, "incomplete").assumptions == ("full activation checkpointing, the least that fits",)
    assert not parse_run(run_row(), "complete").assumptions


def test_other_spellings_of_device_precision_and_sharding_are_parsed() -> None:
    plain = parse_run(run_row(), "plain")
    for gpu in ("NVIDIA H100-80", "H100-80GB", "h100-sxm5"):
        assert parse_run(run_row(gpu=gpu), gpu).job.cluster.device.name == "h100"
    assert parse_run(run_row(precision="amp_bf16"), "amp").job.precision == "bf16"
    assert parse_run(run_row(precision="NVFP4"), "fp4").job.precision == "fp4"
    layout = run_row()["layout"]
    assert parse_run(run_row(layout=layout | {"sharding": "ZeRO-3"}), "zero").job.sharding == "parameters"
    assert parse_run(run_row(layout={"dp": layout["dp"], "sharding": "zero3"}), "few").job.layout == plain.job.layout


def test_adding_a_trainer_is_one_profile_and_one_row_of_the_software_table(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = replace(trainer_profiles.TORCHTITAN, name="novel trainer", attention_efficiency=0.9)
    row = ("a-novel-repo", published_software.only(profile))
    monkeypatch.setattr(published_software, "SOFTWARE", (row, *published_software.SOFTWARE))
    assert parse_run(run_row(source="org/a-novel-repo README"), "novel").job.trainer.name == "novel trainer"


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile_90(range(1, 11)) == 9
    assert percentile_90(range(1, 12)) == 10
    assert percentile_90([7]) == 7
    assert percentile_90([]) is None
