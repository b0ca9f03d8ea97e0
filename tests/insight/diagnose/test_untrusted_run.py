"""A run folder from somebody else is diagnosed as far as its records go: no record makes the diagnosis fail."""

from __future__ import annotations

import json

import pytest

from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import ConfigError
from meshwright.insight.diagnose.finding import CAUSES
from meshwright.insight.diagnose.run.diagnose import diagnose_run
from meshwright.insight.diagnose.run.step_time import profiled_steps
from tests.insight.diagnose.synthetic_run import SyntheticRun

STRANGE = [None, -1, 0, 1e308, "x", [], {}, [[1], [2, 3]], True, "\x1b[31m"]


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_strange_values_in_records_and_plan(tmp_path, value):
    job = SyntheticRun(tmp_path, "--model.experts=4", "--layout.expert=2")
    job.start |= {"hosts": value, "device": value, "pipeline": value}
    job.fields = lambda _rank, step: {} if step % 2 else {"major_faults": value, "experts": value, "loss": value}
    job.communication = {"buckets": value, "message_bytes": value, "exposed_seconds": value}
    job.other_events = [
        {"kind": "experts", "step": 20, "loads": value, "dropped": value},
        {"kind": "counters", "step": 1, "communication": value, "memory": {"peak_total": value}},
        {"kind": "checkpoint", "step": 10, "bytes": value, "seconds": value, "stall_seconds": value},
    ]
    job.write_plan(seconds=value, phases=value, communication=value, flops=value, peak_flops=value, cluster=value)
    findings = diagnose_run(job.history())
    assert findings
    assert all(finding.cause in CAUSES for finding in findings)
    json.dumps([finding.to_json() for finding in findings], allow_nan=False)


@pytest.mark.parametrize("text", ["", "steps = -1", "[layout]\nreplicate = 1000000", "not toml", "model = 3"])
def test_strange_run_files(tmp_path, text):
    job = SyntheticRun(tmp_path)
    job.history()
    (job.folder / "run.toml").write_text(text)
    assert diagnose_run(RunHistory(RunFolder(job.folder)))


def test_other_layout_than_the_records_have(tmp_path):
    job = SyntheticRun(tmp_path, ranks=4)
    job.start["ranks"] = 2
    assert [finding.variant for finding in diagnose_run(job.history())] == ["too few steps"]


def test_phases_that_are_missing(tmp_path):
    job = SyntheticRun(tmp_path)
    job.phases = lambda _rank, _step: {"forward": float("nan")}
    job.waits = lambda _rank, _step: {"backward": 5.0}
    assert diagnose_run(job.history())


def test_steps_that_are_recorded_twice_or_out_of_order(tmp_path):
    job = SyntheticRun(tmp_path)
    job.history()
    path = RunFolder(job.folder).events(1)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[10:], *lines[:20], *lines[10:12]]))
    assert diagnose_run(RunHistory(RunFolder(job.folder)))


def test_profiles_are_read_once_and_never_through_a_link(tmp_path, monkeypatch):
    read: list[list[str]] = []

    def diagnose_traces(paths):
        read.append([path.name for path in paths])
        raise ConfigError("no trace", "expected a trace")

    monkeypatch.setattr(profiled_steps, "diagnose_traces", diagnose_traces)
    history = SyntheticRun(tmp_path).history()
    trace = history.folder.trace
    trace.mkdir(exist_ok=True)
    name = "rank-{:05d}.steps-10-12.a0001.json.gz".format
    (trace / name(0)).write_bytes(b"")
    (trace / name(1)).symlink_to("/etc/hostname")
    for _ in range(3):
        assert list(profiled_steps.find(history)) == []
    assert read == [[name(0)]]
    (trace / name(0)).write_bytes(b"more")
    assert list(profiled_steps.find(history)) == []
    assert len(read) == 2
