"""Untrusted files and arguments of `plan`: a one-line error or an excluded run; nothing blocks or is overwritten."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.errors import ConfigError
from meshwright.io import finite
from meshwright.planner.calibration.published_runs import read_published_runs
from meshwright.planner.calibration.replay import replay
from meshwright.planner.hardware.resolve_cluster import measurement_file

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
