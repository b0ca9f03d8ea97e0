"""What published runs took is predicted, with an error that is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import ConfigError
from meshwright.planner.calibration.published_runs import parse_run, read_published_runs
from meshwright.planner.calibration.replay import rank_sweep, replay, replay_run

PUBLISHED = Path(__file__).parents[2] / "examples" / "published_runs.json"
"""One in seven of the collected runs, two whole sweeps, and those that report classes of memory or ran out of it."""


@pytest.fixture(scope="module")
def replayed() -> dict[str, Any]:
    return replay(PUBLISHED)


def scores(replayed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["source"]: one for one in replayed["scores"]}


def test_fully_stated_runs_are_predicted_within_ten_percent(replayed: dict[str, Any]) -> None:
    found = scores(replayed)["fully stated"]
    assert found["timed"] >= 40
    assert found["median"] <= 0.05
    assert found["ninth"] <= 0.2
    assert found["alone"] <= 0.16  # with the constants of other software


def test_intervals_hold_four_of_five(replayed: dict[str, Any]) -> None:
    assert 0.72 <= scores(replayed)["all"]["inside"] <= 0.95


def test_layouts_of_the_same_work_are_ranked_as_they_were(replayed: dict[str, Any]) -> None:
    found = scores(replayed)["bigscience"]
    assert found["sweeps"] >= 2
    assert found["tau"] >= 0.55  # in the mean; one of three has a run that took as long for fewer samples as for more


def test_what_cannot_be_predicted_is_left_out_with_a_reason(replayed: dict[str, Any]) -> None:
    left = replayed["left_out"]
    assert left
    assert all(left.values())
    assert not set(left) & {row["id"] for row in replayed["records"]}


def row(**changes: Any) -> dict[str, Any]:
    rows = json.loads(PUBLISHED.read_text())
    whole = next(one for one in rows if one["id"].startswith("mosaic"))
    return whole | changes


def test_a_run_that_took_twice_as_long_is_not_inside_its_interval() -> None:
    one = replay_run(parse_run(row(), "right"))
    assert one.inside_interval
    assert one.error is not None
    twice = {"reported": {"step_time_s": 2 * (one.run.seconds or 0)}, "derived": {}}
    wrong = replay_run(parse_run(row(**twice), "wrong"))
    assert not wrong.inside_interval
    assert wrong.error is not None
    assert wrong.error < -0.4


def test_ranking_notices_a_wrong_order() -> None:
    one = replay_run(parse_run(row(), "one"))
    assert one.run.seconds
    longer = parse_run(row(global_batch=2 * one.run.job.batch.global_), "longer")
    shorter_than_predicted = {"reported": {"step_time_s": one.run.seconds / 2}, "derived": {}}
    swapped = parse_run(row(global_batch=2 * one.run.job.batch.global_, **shorter_than_predicted), "swapped")
    assert longer.seconds is not None
    assert rank_sweep([one, replay_run(swapped)]) == (-1.0, 1.0)


@pytest.mark.parametrize(
    "text",
    ["", "{", "{}", "[1, 2", "nothing", "[" * 100_000],
    ids=["empty", "torn", "no list", "torn list", "no json", "deep"],
)
def test_a_file_that_is_no_list_of_records_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_published_runs(path)
    assert "\n" not in str(refused.value)


def test_records_of_a_stranger_are_left_out_not_followed(tmp_path: Path) -> None:
    strange: list[Any] = [
        None,
        5,
        {"id": "empty"},
        row(id="unknown device", gpu="TPUv9"),
        row(id="words", model={"layers": "many"}),
        row(id="no ranks", gpus=-8),
        row(id="no batch", global_batch=0),
        row(id="much", model=row()["model"] | {"layers": 10**18}),
        row(id="nothing", layout={"dp": 0}),
    ]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(strange))
    records, left = read_published_runs(path)
    assert not records
    assert len(left) == len(strange)


def test_a_record_without_what_matters_says_what_was_assumed() -> None:
    stated = row()
    del stated["recompute"]
    assert parse_run(stated, "one").assumptions
    assert not parse_run(row(), "other").assumptions


def test_words_of_other_records_are_understood() -> None:
    plain = parse_run(row(), "plain")
    for gpu in ("NVIDIA H100-80", "H100-80GB", "h100-sxm5"):
        assert parse_run(row(gpu=gpu), gpu).job.cluster.device.name == "h100"
    assert parse_run(row(precision="amp_bf16"), "amp").job.precision == "bf16"
    assert parse_run(row(precision="NVFP4"), "fp4").job.precision == "fp4"
    places = row()["layout"]
    assert parse_run(row(layout=places | {"sharding": "ZeRO-3"}), "zero").job.sharding == "parameters"
    assert parse_run(row(layout={"dp": places["dp"], "sharding": "zero3"}), "few").job.layout == plain.job.layout
    assert parse_run(row(layout=places | {"sharding": "of its own"}), "own").assumptions
