"""Tests of `meshwright report`: bytes match the prediction, one byte of difference is reported, any folder is safe."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from meshwright import train
from meshwright.base.cli import main
from meshwright.base.history import event_tail
from meshwright.base.io import format_seconds
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import ConfigError
from meshwright.insight.report.compared_figures import NEWEST_STEPS
from meshwright.insight.report.report_text import show_report
from meshwright.insight.report.run_report import build_report
from tests.kit.fake_machine import write_machine
from tests.kit.small_run import small_config

COUNTED = {"peak_total": 1, "peak": 3}
PIPED = ("--layout.pipeline=2", "--batch.micro=2", "--model.layers=4")
LAYOUTS = {
    "ddp": (),
    "fsdp": ("--layout.shard=parameters",),
    "pipeline": PIPED,
    "experts": ("--layout.expert=2", "--model.experts=4"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run per layout, on a machine with a measurement."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_HOME", str(home))
        write_machine(home)
        folder = tmp_path_factory.mktemp("runs")
        for name, overrides in LAYOUTS.items():
            train(small_config(*overrides, steps=6), run=folder / name, quiet=True)
    return folder


@pytest.fixture
def run(runs, tmp_path):
    """A copy of a run that a test may change."""
    shutil.copytree(runs / "ddp", tmp_path / "run")
    return tmp_path / "run"


def report(folder):
    return build_report(RunFolder(Path(folder)))


def shown(folder, width=140):
    text = io.StringIO()
    show_report(report(folder), Console(file=text, width=width, highlight=False))
    return text.getvalue()


def events(folder, rank=0):
    return folder / "events" / f"rank-{rank:05d}.jsonl"


def append(folder, *records, rank=0):
    with open(events(folder, rank), "a") as file:
        for record in records:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


def change(folder, kind, alter, rank=0):
    """Alters every record of a kind."""
    lines = [json.loads(line) for line in events(folder, rank).read_text().splitlines()]
    for line in lines:
        if line["kind"] == kind:
            alter(line)
    events(folder, rank).write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


@pytest.mark.parametrize("name", LAYOUTS)
def test_counted_bytes_of_a_run_equal_the_prediction(name, runs):
    result = report(runs / name)
    assert result.mismatches == []
    assert {rank for pair in result.communication for rank in pair.ranks} == {0, 1}
    assert {pair.axis for pair in result.communication} - {"control"}
    assert "communicated bytes as predicted" in result.verdict
    assert result.status == "attempt 1, 6 of 6 steps done, complete"
    assert result.steps == 4  # the first one and the counted one are left out
    held = result.row("memory", "tensors")
    assert held.predicted == pytest.approx(held.measured, rel=0.1)
    for state in ("parameter", "gradient", "optimizer"):
        row = result.row("memory", f"{state}, rank 0")
        assert row.measured == row.predicted


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_figure_has_a_prediction_and_an_error(name, runs):
    result = report(runs / name)
    for figure in ("step time", "tokens/s", "MFU"):
        row = result.row("step", figure)
        assert row.error == pytest.approx(row.predicted / row.measured - 1)
    assert result.row("phases", "forward + backward").error is not None
    parts = [
        result.row("phases", phase) for phase in ("forward + backward", "exposed comm (sync)", "update", "fetch + copy")
    ]
    assert sum(part.predicted for part in parts) == pytest.approx(result.row("step", "step time").predicted)
    assert result.within_interval in (True, False)
    text = shown(runs / name)
    assert text.startswith("step time ")
    assert "DIFFERENT" not in text


def test_pipeline_is_compared_with_its_schedule(runs):
    result = report(runs / "pipeline")
    live = [row for row in result.rows if row.figure.startswith("in flight")]
    assert [(row.measured, row.predicted) for row in live] == [(2, 2), (1, 1)]
    assert result.row("pipeline", "idle").predicted == pytest.approx(
        1 / 9, abs=1e-4
    )  # 8 micro-batches through 2 stages
    assert result.row("experts", "imbalance") is None


def test_expert_imbalance_is_reported(runs):
    assert report(runs / "experts").row("experts", "imbalance").measured >= 1


@pytest.mark.parametrize("rank", [0, 1])
def test_one_byte_of_difference_is_found(rank, run, capsys):
    main(["report", str(run), "--strict"])

    def alter(record):
        next(row for row in record["communication"] if row["axis"] == "replicate")["message_bytes"] += 1

    change(run, "counters", alter, rank)
    [mismatch] = report(run).mismatches
    assert str(mismatch).startswith(f"rank {rank}: replicate all_reduce: ")
    assert "DIFFERENT" in shown(run)
    main(["report", str(run)])
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run), "--strict"])
    assert ended.value.code == 1
    assert "BYTES DIFFER in 1 of 4 rows" in capsys.readouterr().out


def test_one_byte_of_difference_in_expert_all_to_all_is_found(runs, tmp_path):
    shutil.copytree(runs / "experts", tmp_path / "run")

    def alter(record):
        next(row for row in record["communication"] if row["axis"] == "expert")["message_bytes"] -= 1

    change(tmp_path / "run", "counters", alter, 1)
    [mismatch] = report(tmp_path / "run").mismatches
    assert str(mismatch).startswith("ranks 0, 1 together: expert all_to_all: ")


def test_report_json_has_every_figure(runs, capsys):
    main(["report", str(runs / "ddp"), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["bytes_equal"] is True
    assert {row["figure"] for row in answer["figures"]} >= {"step time", "tokens/s", "tensors", "exposed comm (sync)"}
    assert answer["communication"][0]["equal"] is True


@pytest.mark.parametrize(
    ("name", "mechanism"),
    {
        "ddp": "Replicate 2: each replica",
        "fsdp": "Shard 2: parameters",
        "pipeline": "Pipeline 2: 4 layers over 2 ranks",
        "experts": "Expert 2: 4 experts per layer",
    }.items(),
)
def test_page_of_a_run_explains_its_layout(name, mechanism, runs):
    result = report(runs / name)
    page = result.to_html()
    assert mechanism in page
    assert f"Step time: {format_seconds(result.row('step', 'step time').measured)}, predicted" in page
    assert "Timeline of a step" in page
    assert result.measurements.steps[0].exposed_source == "host waits"


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch], ids=["nothing", "empty", "file"])
def test_report_of_something_else_than_a_run_folder_is_one_line(make, tmp_path, capsys):
    make(tmp_path / "thing")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "thing")])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"meshwright: {tmp_path}/thing is not a run folder; expected a folder that meshwright train wrote\n"
    )


def test_report_of_a_run_without_a_step(run):
    shutil.rmtree(run / "events")
    result = report(run)
    assert result.verdict == "no step measured; bytes not counted; memory not compared"
    assert result.status.startswith("attempt 1, no step done, complete")
    assert shown(run)


def test_report_of_a_run_in_progress(run):
    kept = [line for line in events(run).read_text().splitlines() if '"step":4' not in line and '"step":5' not in line]
    events(run).write_text("\n".join(line for line in kept if '"kind":"end"' not in line) + '\n{"kind":"st')
    (run / "attempts" / "0001" / "incident.json").unlink()
    result = report(run)
    assert result.status == "attempt 1, 4 of 6 steps done, no end recorded: its processes are gone"
    assert result.steps == 2
    events(run).write_text("\n".join(kept[:2]) + "\n")
    assert report(run).verdict.startswith(
        "no step measured; communicated bytes as predicted"
    )  # as the other rank counted them


def test_report_of_a_run_that_a_callback_stopped(run):
    change(run, "end", lambda record: record.update(stopped="a callback"))
    (run / "attempts" / "0001" / "incident.json").unlink()
    assert report(run).status == "attempt 1, 6 of 6 steps done, stopped"


def test_report_of_a_failed_run_has_its_incident(run):
    change(run, "end", lambda record: record.update(kind="other"))
    incident = {"attempt": 1, "outcome": "failed", "message": "rank 1 was killed by signal 9\nmore"}
    (run / "attempts" / "0001" / "incident.json").write_text(json.dumps(incident))
    assert report(run).status == "attempt 1, 6 of 6 steps done, failed: rank 1 was killed by signal 9"


def test_report_uses_the_last_attempt(run):
    start = json.loads(events(run).read_text().splitlines()[0])
    made = [json.loads(line) for line in events(run).read_text().splitlines() if '"kind":"step"' in line][-1]
    steps = [made | {"attempt": 2, "step": step, "seconds": 2.0, "counted": step == 5} for step in range(4, 9)]
    append(run, start | {"attempt": 2}, {"kind": "restored", "attempt": 2, "step": 4}, *steps)
    result = report(run)
    assert (result.attempt, result.steps, result.row("step", "step time").measured) == (2, 3, 2.0)
    assert "the prediction was made for attempt 1" in result.notes
    assert result.communication == []  # nothing of this attempt was counted
    assert "bytes not counted" in result.verdict


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("[" * 100_000, "more than 64 levels"),
        ("[1]", ""),
        (
            '{"plan": {"layout": 3}, "communication_exact": {"0": 1}, "seconds": "x", "memory": []}',
            "the prediction has no layout",
        ),
        ('{"notes": "x", "phases": [], "state_memory_exact": {"0": 7}, "low": 1e999, "high": NaN}', ""),
    ],
)
def test_report_without_a_valid_prediction_has_the_measurements(run, text, note):
    (run / "plan.json").unlink()
    if text is not None:
        (run / "plan.json").write_text(text)
    result = report(run)
    assert note in " ".join(result.notes)
    assert result.row("step", "step time").measured > 0
    assert "not predicted; bytes not predicted" in result.verdict
    assert shown(run)


def test_predicted_layout_out_of_range_is_not_compared(run):
    plan = json.loads((run / "plan.json").read_text())
    for degrees in (
        {"replicate": 1 << 60},
        {"replicate": 3},
        {"expert": 5},
        dict.fromkeys(("tensor", "shard"), 60_000),
    ):
        (run / "plan.json").write_text(json.dumps(plan | {"plan": {"layout": plan["plan"]["layout"] | degrees}}))
        result = report(run)
        assert result.communication == []
        assert "communication volume is not compared" in " ".join(result.notes)


def test_untrusted_records_are_read_within_bounds(run, monkeypatch):
    change(run, "end", lambda record: record.update(kind="other"))
    for bad in (
        {"kind": "step", "step": 9, "seconds": "soon"},
        {"kind": "step", "step": -1, "seconds": 1.0},
        {"kind": "step", "step": 9, "seconds": float("inf")},
        {"kind": "step", "step": 9, "seconds": 1.0, "phases": [1], "pipeline": 3, "experts": {"imbalance": "x"}},
        {"kind": "counters", "step": 9, "communication": [{}] * 5000, "memory": {}},
        {"kind": "counters", "step": 9, "communication": [3, {"message_bytes": "x"}], "memory": COUNTED},
        {"kind": "restored", "step": [1]},
    ):  # fmt: skip
        append(run, bad)
    with open(events(run), "ab") as file:
        file.write(b'{"kind":"step",' + b"x" * (3 << 20) + b"\n\xff\xfe\n[[[[\n")
        file.write(b'{"kind":"counters",' + b"[" * 50_000 + b"\n")
    assert shown(run)
    os.remove(events(run, 1))
    os.mkfifo(events(run, 1))  # nobody writes to it: a reader that opens it must not wait
    assert set(report(run).measurements.steps) == {0}
    for path in (run / "plan.json", run / "attempts" / "0001" / "incident.json"):
        path.unlink()
        os.mkfifo(path)
    assert "plan.json cannot be read: not a regular" in " ".join(shown(run).split())
    monkeypatch.setattr(event_tail, "MAX_FILE_BYTES", 2000)
    assert report(run).verdict.startswith("no step measured")


def test_control_characters_in_records_do_not_reach_the_terminal(run):
    change(run, "counters", lambda record: record["communication"][0].update(axis="\x1b[2J[red]x"))
    text = shown(run)
    assert "\x1b" not in text
    assert "?[2J[red]x" in text


def test_report_memory_does_not_grow_with_the_records(run):
    step = [line for line in events(run).read_text().splitlines() if '"kind":"step"' in line][-1]
    with open(events(run), "a") as file:
        for _ in range(20):
            file.write((step + "\n") * 1000)
    result = report(run)
    assert result.steps == len(result.measurements.steps[0]) == NEWEST_STEPS


class ScaledInput(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.factor * x


def test_custom_model_is_predicted(tmp_path):
    data = [(torch.ones(1).numpy() * x, torch.ones(1).numpy() * 2 * x) for x in range(1, 65)]
    config = small_config("--eval.holdout=0", steps=4)
    train(
        config,
        model=ScaledInput(),
        loss=lambda out, y: ((out - y) ** 2).sum(),
        source=data,
        run=tmp_path / "r",
        quiet=True,
    )
    result = report(tmp_path / "r")
    assert "custom model" not in " ".join(result.notes)
    assert "communicated bytes as predicted" in result.verdict
    page = result.to_html()
    assert "Layout: replicate 2." in page
    assert "meshwright plan --model ranks the layouts of a custom model" in page


def test_report_imports_no_torch(runs):
    arguments = ["report", str(runs / "ddp"), "--html", str(runs / "ddp.html")]
    code = f"import sys; from meshwright.base.cli import main; main({arguments!r})\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_report_of_a_dangling_link_raises(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="is not a run folder"):
        report(tmp_path / "link")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("width", [80, 120])
def test_report_tables_fit_the_terminal_without_ellipsis(name, width, runs):
    text = shown(runs / name, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "forward + backward" in text
