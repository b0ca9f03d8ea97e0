"""Files and words of strangers: refused in one line, or left out; nothing waits, nothing is overwritten."""

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

PUBLISHED = Path(__file__).parents[2] / "examples" / "published_runs.json"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("words", [("plan", "{}"), ("plan", "tiny", "--cluster", "{}"), ("plan", "--replay", "{}")])
def test_a_pipe_is_no_file_to_wait_for(tmp_path, capsys, words):
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    assert "not a plain file" in refused(capsys, *(word.format(pipe) for word in words))


def test_a_device_or_a_pipe_is_never_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (Path("/dev/null"), pipe, tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(ConfigError):
            measurement_file(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama-8b", "--cluster", "h100:8x2", "--ranks", "12"), "no whole nodes of 8"),
        (("tiny", "--batch", "9" * 20), "--batch"),
        (("tiny", "--sequence", "1" + "0" * 400), "--sequence"),
        (("tiny", "--html", "same.toml", "--out", "same.toml"), "also written"),
        (("--replay", "/etc/hostname"), "no file of records"),
    ],
)
def test_words_that_cannot_be_are_one_line(capsys, words, said):
    assert said in refused(capsys, "plan", *words)


def changed(**fields: Any) -> dict[str, Any]:
    whole = deepcopy(next(row for row in json.loads(PUBLISHED.read_text()) if row["id"].startswith("mosaic")))
    for path, value in fields.items():
        *parents, last = path.split("__")
        inner = whole
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    return whole | {"id": json.dumps(fields)[:80]}


STRANGE = [
    changed(gpus=float("inf")),
    changed(reported__tokens_per_s=float("nan"), derived={}),
    changed(derived__step_time_s=1e300),
    changed(layout__fsdp_degree=0.5),
    changed(layout__fsdp_degree=-3),
    changed(notes="inter-node 0 Gb/s"),
    changed(model__ffn=-1),
    changed(model__hidden=3.7),
    changed(model__vocab=1e308),
    changed(model__kv_heads=10**9),
    changed(layout__vpp=10**9),
    changed(layout__pp=1 << 24, global_batch=1 << 24),
]


def test_a_record_that_cannot_be_is_left_out_with_its_reason(tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([*STRANGE, changed(source="[/bold]")]))
    found = replay(path)
    assert set(found["left_out"]) == {row["id"] for row in STRANGE}
    assert len(found["records"]) == 1
    json.dumps(finite(found), allow_nan=False)


def test_too_many_records_are_refused(tmp_path):
    path = tmp_path / "runs.json"
    path.write_text("[" + ",".join(["0"] * 6000) + "]")
    with pytest.raises(ConfigError):
        read_published_runs(path)
