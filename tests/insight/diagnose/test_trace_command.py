"""`meshwright diagnose TRACE...`: text for a terminal of 80 columns, JSON, folders and mistakes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from meshwright.base.cli.main import main
from meshwright.base.terminal.console import make_console
from meshwright.errors import ConfigError
from meshwright.insight.diagnose.trace.diagnose import diagnose_traces
from meshwright.insight.terminal.diagnosis_text import show_trace_diagnosis
from tests.insight.diagnose.synthetic_traces import TraceBuilder, training_trace


def shown(*paths: Path, width: int = 80) -> str:
    stream = io.StringIO()
    show_trace_diagnosis(diagnose_traces(paths), make_console(stream, width))
    return stream.getvalue()


def test_the_text_has_the_finding_its_evidence_the_change_and_the_breakdown(tmp_path: Path) -> None:
    text = shown(training_trace(5).write(tmp_path / "trace.json.gz"))
    first = text.splitlines()[0]
    assert first.startswith("communication: partial overlap")
    assert first.endswith("of the time to win, high confidence")
    assert max(map(len, text.splitlines())) <= 80
    for words in ("evidence", "exposed communication per step", "change", "check", "Where the time goes", "62.5%"):
        assert words in text, words


def test_control_characters_of_a_trace_do_not_reach_the_terminal(tmp_path: Path) -> None:
    trace = training_trace(3)
    metadata = {"Collective name": "allreduce", "Process Group Description": "mesh_\x1b[31mred"}
    for event in trace.events:
        if event["name"].startswith("nccl"):
            event["args"] |= metadata
    assert "\x1b" not in shown(trace.write(tmp_path / "\x1b[2Jtrace.json"))


def test_a_damaged_trace_is_noted(tmp_path: Path) -> None:
    path = training_trace(50).write(tmp_path / "trace.json")
    path.write_bytes(path.read_bytes()[:-3000])
    assert "note: trace.json: the trace is truncated after" in shown(path, width=120)


def test_a_folder_of_traces_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        training_trace(3, rank).write(tmp_path / f"rank-{rank}.json.gz")
    (tmp_path / "notes.txt").write_text("no trace")
    main(["diagnose", str(tmp_path), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert result["findings"][0]["cause"] == "communication"


def test_the_rank_of_a_trace_may_be_in_its_name(tmp_path: Path) -> None:
    traces = [training_trace(3, None).write(tmp_path / f"job_rank{rank}.json") for rank in (5, 3)]
    assert [rank.rank for rank in diagnose_traces(traces).ranks] == [3, 5]


def test_mistakes_are_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("no trace")
    for argument in ("empty", "text.json", "missing.json"):
        with pytest.raises(SystemExit) as exit:
            main(["diagnose", str(tmp_path / argument)])
        assert exit.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("meshwright: ")
        assert error.count("\n") == 1
        assert "expected" in error


def test_a_trace_of_annotations_only_is_no_healthy_program(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.add("user_annotation", "main", 0, 10)
    with pytest.raises(ConfigError, match="has no kernels, operators or collectives; expected a trace"):
        shown(trace.write(tmp_path / "trace.json"))


def test_rank_that_is_not_judged_has_no_shares(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.add("cpu_op", "aten::mm", 0, 10)
    text = shown(trace.write(tmp_path / "trace.json"))
    assert text.startswith("not judged: no device events\n")
    assert "%" not in text


def test_two_runs_are_no_traces(tmp_path, capsys):
    (tmp_path / "events").mkdir()
    with pytest.raises(SystemExit) as exit_code:
        main(["diagnose", str(tmp_path), str(tmp_path)])
    assert exit_code.value.code == 2
    assert "is a run folder among 2 paths; expected one run folder, or traces only" in capsys.readouterr().err
