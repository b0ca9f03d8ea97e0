"""The liveness probe, and the secret of a start: both read only the run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.base.records.heartbeat import Heartbeat
from meshwright.base.records.run_folder import RunFolder
from meshwright.ops.engines.probe import check, main, ranks_of_this_host, state_file
from meshwright.ops.engines.start_supervisor import secret_of_start


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path_factory, monkeypatch):
    """What probes remember is in a folder of the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("probe")))


def beating_rank(run: Path) -> Heartbeat:
    """A heartbeat of this process."""
    folder = RunFolder(run)
    folder.attempt(1).mkdir(parents=True)
    return Heartbeat(folder.heartbeat(1, 0))


def age(run: Path, seconds: float) -> None:
    """Makes what the last probe saw older."""
    state = json.loads(state_file(run).read_text())
    for entry in state.values():
        entry["since"] -= seconds
    state_file(run).write_text(json.dumps(state))


def test_rank_without_progress_fails_the_probe_and_one_that_beats_passes(tmp_path, capsys):
    heartbeat = beating_rank(tmp_path)
    heartbeat.enter("forward", 3)
    assert main([str(tmp_path), "--limit", "60"]) == 0
    age(tmp_path, 100)
    assert main([str(tmp_path), "--limit", "60"]) == 1
    assert "heartbeat-00000: no progress for 100 s, step 3, forward" in capsys.readouterr().err
    heartbeat.beat()
    assert main([str(tmp_path), "--limit", "60"]) == 0


def test_rank_that_waits_for_another_one_passes(tmp_path):
    beating_rank(tmp_path).set_waiting(True)
    assert main([str(tmp_path), "--limit", "60"]) == 0
    age(tmp_path, 100)
    assert main([str(tmp_path), "--limit", "60"]) == 0


def test_ranks_of_other_hosts_and_ended_ranks_do_not_count(tmp_path):
    folder = RunFolder(tmp_path)
    folder.attempt(1).mkdir(parents=True)
    imports = "from pathlib import Path; from meshwright.base.records.heartbeat import Heartbeat"
    code = f"{imports}; Heartbeat(Path({str(folder.heartbeat(1, 0))!r}))"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert ranks_of_this_host(folder) == {}
    assert main([str(tmp_path), "--limit", "0"]) == 0


def test_run_that_has_not_started_and_a_damaged_state_pass(tmp_path):
    assert main([str(tmp_path / "absent"), "--limit", "60"]) == 0
    beating_rank(tmp_path)
    file = state_file(tmp_path)
    file.parent.mkdir(exist_ok=True)
    file.write_text("[")
    assert main([str(tmp_path), "--limit", "60"]) == 0
    assert check({"a": 1}, {"a": {"beats": 1, "since": "x"}}, 5.0) == {"a": {"beats": 1, "since": 5.0}}
    assert check({"a": 1}, {"a": {"beats": 1, "since": 9.0}}, 5.0)["a"]["since"] == 5.0  # the host has restarted


def test_secret_of_a_start_changes_after_a_stop_and_not_after_a_failure(tmp_path):
    folder = RunFolder(tmp_path)

    def end(attempt: int, outcome: str) -> str:
        folder.attempt(attempt).mkdir(parents=True)
        folder.incident(attempt).write_text(json.dumps({"outcome": outcome}))
        return secret_of_start(b"secret", folder)

    first = secret_of_start(b"secret", folder)
    assert end(1, "failed") == first
    stopped = end(2, "stopped")
    assert stopped != first
    assert end(3, "complete") == stopped
    assert secret_of_start(b"other", folder) != stopped


def test_start_becomes_the_command_and_passes_the_derived_secret(tmp_path):
    secret = tmp_path / "data"
    secret.write_text("s" * 64)
    (tmp_path / "secret").symlink_to(secret)  # Kubernetes mounts a Secret as a link
    code = "import os; print(os.environ['MESHWRIGHT_JOB_SECRET'], 'MESHWRIGHT_JOB_SECRET_FILE' in os.environ)"
    start = [sys.executable, "-m", "meshwright.ops.engines.start_supervisor", str(tmp_path / "secret")]
    environment = os.environ | {"MESHWRIGHT_JOB_SECRET_FILE": "/absent"}
    done = subprocess.run(
        [*start, str(tmp_path / "run"), sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == [secret_of_start(b"s" * 64, RunFolder(tmp_path / "run")), "False"]
