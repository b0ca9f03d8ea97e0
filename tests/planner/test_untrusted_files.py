"""Untrusted files and arguments of `plan`: a one-line error or an excluded run; nothing blocks or is overwritten."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.cli import main
from meshwright.base.hardware.resolve_cluster import measurement_file
from meshwright.base.io import finite
from meshwright.errors import ConfigError
from meshwright.planner.calibration.leave_one_out import MAX_GROUPS
from meshwright.planner.calibration.published.published_runs import parse_run, read_published_runs
from meshwright.planner.calibration.published.published_schedules import (
    MAX_FILE_PASSES,
    MAX_PASSES,
    MAX_STAGES,
    count_passes,
)
from meshwright.planner.calibration.published.unstated_settings import schedule_size
from meshwright.planner.calibration.replay import replay

PUBLISHED_RUNS = Path(__file__).parents[2] / "examples" / "published_runs.json"


def error_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    message = capsys.readouterr().err
    assert ended.value.code == 2
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize("args", [("plan", "{}"), ("plan", "tiny", "--cluster", "{}"), ("plan", "--replay", "{}")])
def test_plan_rejects_a_named_pipe_instead_of_blocking(tmp_path, capsys, args):
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    assert "not a regular file" in error_of(capsys, *(arg.format(pipe) for arg in args))


def test_measurement_does_not_replace_a_device_a_pipe_or_a_folder(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (Path("/dev/null"), pipe, tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(ConfigError):
            measurement_file(path)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("llama-8b", "--cluster", "h100:8x2", "--ranks", "12"), "do not fill nodes of 8"),
        (("tiny", "--batch", "9" * 20), "--batch"),
        (("tiny", "--sequence", "1" + "0" * 400), "--sequence"),
        (("tiny", "--html", "same.toml", "--out", "same.toml"), "--html same.toml"),
        (("--replay", "/etc/hostname"), "file of runs /etc/hostname is not JSON"),
    ],
)
def test_invalid_plan_arguments_are_a_one_line_error(capsys, args, message):
    assert message in error_of(capsys, "plan", *args)


def changed_run(**fields: Any) -> dict[str, Any]:
    """Returns a published run with other values; `a__b` is the field b of a."""
    rows = json.loads(PUBLISHED_RUNS.read_text())
    run = deepcopy(next(row for row in rows if row["id"].startswith("mosaic")))
    for path, value in fields.items():
        *parents, key = path.split("__")
        table = run
        for parent in parents:
            table = table[parent]
        table[key] = value
    return run | {"id": json.dumps(fields)[:80]}


IMPOSSIBLE_RUNS = [
    changed_run(gpus=float("inf")),
    changed_run(reported__tokens_per_s=float("nan"), derived={}),
    changed_run(derived__step_time_s=1e300),
    changed_run(layout__fsdp_degree=0.5),
    changed_run(layout__fsdp_degree=-3),
    changed_run(notes="inter-node 0 Gb/s"),
    changed_run(model__ffn=-1),
    changed_run(model__hidden=3.7),
    changed_run(model__vocab=1e308),
    changed_run(model__kv_heads=10**9),
    changed_run(layout__vpp=10**9),
    changed_run(layout__pp=1 << 24, global_batch=1 << 24),
    changed_run(reported__oom="false"),
    changed_run(reported__memory_gb="12"),
    changed_run(model__tied="none"),
    changed_run(model__gated="no"),
    changed_run(layout__sp="false"),
]


@pytest.mark.parametrize("run", IMPOSSIBLE_RUNS, ids=lambda run: run["id"])
def test_replay_refuses_or_excludes_an_impossible_run_with_a_reason(run, tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([run, changed_run(source="[/bold]")]))
    try:
        replayed = replay(path)
    except ConfigError as error:
        assert "record 0 (" in str(error)
        return
    assert set(replayed["left_out"]) == {run["id"]}
    assert all(replayed["left_out"].values())
    assert len(replayed["records"]) == 1
    json.dumps(finite(replayed), allow_nan=False)


def test_replay_rejects_a_file_with_too_many_runs(tmp_path):
    path = tmp_path / "runs.json"
    path.write_text("[" + ",".join(["0"] * 6000) + "]")
    with pytest.raises(ConfigError, match="not a list of at most 5,000 runs"):
        read_published_runs(path)


PIPELINE = {"source": "Narayanan et al. 2021", "gpu": "A100-80"}
SLOW_RUNS = [
    ("10000 x 1", {"gpus": 10_000, "model__layers": 10_000, "model__params_b": None, "layout": {"pp": 10_000}}),
    ("256 x 9", {"gpus": 256, "model__layers": 2304, "model__params_b": None, "layout": {"pp": 256, "vpp": 9}}),
    ("16,777,216 micro-batches", {"gpus": 8, "layout": {"pp": 8}, "global_batch": 1 << 24, "micro_batch": 1}),
    ("topk = 16777216", {"model__experts": 256, "model__topk": 1 << 24, "model__moe_ffn": 64}),
]


@pytest.mark.parametrize(("reason", "fields"), SLOW_RUNS)
def test_replay_refuses_a_run_that_would_take_minutes_to_predict(reason, fields, tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([changed_run(**PIPELINE, **fields)]))
    with pytest.raises(ConfigError, match=f"record 0 .*{reason}.* out of range"):
        read_published_runs(path)


def test_stages_that_a_run_does_not_state_are_bounded():
    row = changed_run(
        source="NVIDIA/Megatron-LM 2024", gpus=8, layout={"pp": 8}, model__layers=8000, model__params_b=None
    )
    run = parse_run(row, "many layers")
    assert max(job.stages_per_rank for jobs in run.alternatives for job in jobs) * 8 <= MAX_STAGES


def pipeline_run(name: str, stages: int, micro_batches: int, **layout: Any) -> dict[str, Any]:
    """A run of one pipeline."""
    row = changed_run(gpus=stages, model__layers=260, model__params_b=None, global_batch=micro_batches)
    layout = {"pp": stages, "sharding": "none", "schedule": "1f1b"} | layout
    return row | PIPELINE | {"id": name, "micro_batch": 1, "layout": layout}


@pytest.mark.parametrize(
    ("layout", "micro_batches", "passes"),
    [({}, 4096, "196,608"), ({}, 1023, "261,888"), ({"schedule": "gpipe"}, 257, "65,792")],
)
def test_run_with_a_schedule_that_takes_seconds_is_excluded(layout, micro_batches, passes, tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([pipeline_run("large", 256, micro_batches, **layout), pipeline_run("one", 64, 512)]))
    runs, excluded = read_published_runs(path)
    assert [run.name for run in runs] == ["one"]  # the largest published pipeline
    assert f"its schedule has {passes} different passes" in excluded["large"]


def test_schedules_of_a_file_are_predicted_up_to_a_limit_of_passes(tmp_path):
    """Equal schedules count once; further ones are excluded before they are predicted."""
    path = tmp_path / "runs.json"
    rows = [pipeline_run(f"{copy} {stages}", stages, 4 * stages - 1) for stages in range(128, 118, -1) for copy in "ab"]
    path.write_text(json.dumps([*rows, pipeline_run("small", 1, 1)]))
    runs, excluded = read_published_runs(path)
    passes = {(run.job.layout.pipeline, run.job.batch.accumulation) for run in runs}
    assert sum(stages * count for stages, count in passes) <= MAX_FILE_PASSES
    assert [run.name for run in runs] == [
        "a 128",
        "b 128",
        "a 127",
        "b 127",
        "a 126",
        "b 126",
        "a 125",
        "b 125",
        "small",
    ]
    assert all("the schedules of the runs before it have" in reason for reason in excluded.values())


@pytest.mark.parametrize(("micro_batches", "stages"), [(511, {1}), (128, {1, 2})])
def test_stages_that_a_run_does_not_state_are_within_the_limit_of_passes(micro_batches, stages):
    row = pipeline_run("one", 128, micro_batches, schedule=None)
    run = parse_run(row | {"source": "NVIDIA/Megatron-LM 2024"}, "one")
    jobs = [run.job, *(job for jobs in run.alternatives for job in jobs)]
    assert {job.stages_per_rank for job in jobs} == stages
    assert max(count_passes(schedule_size(job)) for job in jobs) <= MAX_PASSES


def test_leave_one_out_of_many_sources_is_refused(tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([changed_run(source=f"source{number}/repo") for number in range(MAX_GROUPS + 1)]))
    with pytest.raises(ConfigError, match="expected runs of at most 64 sources"):
        replay(path, leaves_out=True)


def test_text_of_a_file_reaches_the_terminal_without_control_characters(tmp_path, capsys):
    escape, right_to_left = "\x1b[31mred\x07", "\u202e"
    path = tmp_path / "runs.json"
    rows = [
        changed_run(source=f"{escape}{right_to_left}/repo"),
        changed_run(notes=5) | {"id": f"id {escape}"},
        changed_run(gpu=escape) | {"id": "\ud800"},
    ]
    path.write_text(json.dumps(rows))
    for args in (("--json",), ()):
        main(["plan", "--replay", str(path), *args])
        shown = capsys.readouterr().out
        assert not [letter for letter in shown if letter != "\n" and not letter.isprintable()]
    assert "?[31mred?" in shown


def test_file_of_runs_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "runs.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps([changed_run()]).encode())
    assert len(read_published_runs(path)[0]) == 1


@pytest.mark.parametrize("key", ["step_time_s", "tokens_per_s", "mfu", "memory_gb", "oom"])
def test_null_is_a_figure_that_is_not_stated(key):
    row = changed_run()
    stated, null = (parse_run(row | {"reported": row["reported"] | more}, "run") for more in ({}, {key: None}))
    without = parse_run(
        row | {"reported": {name: row["reported"][name] for name in row["reported"] if name != key}}, "run"
    )
    assert (null.seconds, null.memory, null.out_of_memory) == (without.seconds, without.memory, without.out_of_memory)
    assert stated.seconds


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" + b"9" * 5000 + b"]", "has a number with too many digits"),
        (b"\xff", "is not JSON: it is not text in UTF-8"),
    ],
)
def test_numbers_with_too_many_digits_are_named_without_python(content, message, tmp_path):
    path = tmp_path / "runs.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        read_published_runs(path)
    assert not any(word in str(raised.value) for word in ("sys.", "codec"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--leave-one-out",), "--leave-one-out is for published runs"),
        (("tiny", "--leave-one-out"), "--leave-one-out is for published runs"),
        (("--replay", "{}", "--leave-one-out"), "--leave-one-out is for published runs"),
        (("tiny", "--replay", "{}"), "tiny is given"),
        (("--replay", "{}", "--cluster", "h100"), "--replay plans no model, but --cluster is given"),
        (("--replay", "{}", "--top", "5"), "but --top is given; try it without --top"),
        (("--replay", "{}", "--explain"), "but --explain is given"),
        (("--replay", "{}", "--scale"), "but --scale is given"),
        (("--replay", "{}", "--html", "page.html"), "but --html is given"),
        (("--replay", "{}", "--trainer", "meshwright"), "but --trainer is given"),
        (("--replay", "{}", "--layout.tensor=4"), "but --layout.tensor is given"),
        (("--replay", "{}", "--loss", "module:loss"), "but --loss is given"),
        (("tiny", "--critical-batch", "1e6"), "a critical batch is given without scaling; try it with --scale"),
        (
            ("tiny", "--scale", "--critical-batch", "1e-308"),
            "critical batch 1e-308 is out of range; expected 1 to 1e+18",
        ),
        (
            ("tiny", "--tokens", "1T", "--price", "1e308"),
            "price 1e+308 is out of range; expected a price of a GPU-hour",
        ),
        (("mixtral-8x7b", "--expert-load", ""), "the load of experts is empty; expected 1 to 8, or a run folder"),
        (("tiny", "--explain", "99"), "the list has 5 plans; expected 1 to 5"),
        (("tiny", "--trainer", "torchtitan", "--out", "{}/plan.toml"), "a plan for torchtitan cannot be written"),
        (("tiny", "--cluster", "a100:8"), "did you mean a100-40:8 or a100-80:8?"),
        (("tiny", "--cluster", "h100x8"), "did you mean h100:8?"),
        (("tiny", "--cluster", "h100:8x99999999"), "out of range"),
    ],
)
def test_options_that_would_be_ignored_are_refused_before_the_search(args, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("meshwright.planner.search.plan_result.search", lambda *_, **__: pytest.fail("it searched"))
    assert message in error_of(capsys, "plan", *(arg.format(tmp_path) for arg in args))


def test_home_folder_that_cannot_be_created_is_a_one_line_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path / "file" / "home"))
    assert "try --out FILE, or MESHWRIGHT_HOME=DIR" in error_of(capsys, "plan", "measure")
