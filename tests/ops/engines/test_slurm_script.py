"""The batch script of SLURM, and what follows when its supervisors end: exit codes, requeues, excluded nodes."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from meshwright.base.cli.main import EXIT_CODES as EXIT_CODES_TEXT
from meshwright.base.cli.main import main
from meshwright.base.records.failures import FINAL_EXIT_CODES
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import ConfigError
from meshwright.ops.engines.blamed_hosts import blamed_hosts
from meshwright.ops.engines.exit_codes import EXIT_CODES, action_of
from meshwright.ops.engines.slurm import launch_slurm
from meshwright.ops.engines.slurm_exit import decide, end_of_start, exit_code_of_run, read_decisions
from tests.ops.engines.engine_runs import write_run_file


def script_of(tmp_path: Path, **options) -> str:
    launched = launch_slurm(write_run_file(tmp_path), tmp_path / "my run", write=tmp_path / "job", **options)
    assert launched.job == ""
    return launched.files[0].read_text()


def directives(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_script_is_valid_bash_and_has_one_supervisor_per_node(tmp_path):
    script = script_of(tmp_path, hosts=2, spares=1, time="1-00:00:00", partition="gpu")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    found = directives(script)
    assert (found["nodes"], found["ntasks-per-node"], found["time"]) == ("3", "1", "1-00:00:00")
    assert found["signal"] == "TERM@90"
    assert {"requeue", "no-kill"} <= set(found)
    assert "--launch.hosts=2" in script
    assert shlex.quote(str(tmp_path / "my run")) in script


def test_job_without_spares_leaves_a_lost_node_to_slurm(tmp_path):
    assert "no-kill" not in directives(script_of(tmp_path, hosts=2))
    assert "no-kill" in directives(script_of(tmp_path, hosts=2, overrides=["--launch.min_hosts=1"]))


def test_notice_before_the_time_limit_follows_the_grace_period(tmp_path):
    assert directives(script_of(tmp_path, overrides=["--launch.grace_period=120"]))["signal"] == "TERM@180"


def test_gpus_are_requested_per_node_unless_the_run_is_on_cpus(tmp_path):
    assert "gpus-per-node" not in directives(script_of(tmp_path))
    assert directives(script_of(tmp_path, overrides=["--launch.device=auto"]))["gpus-per-node"] == "2"


def test_own_model_and_settings_reach_the_command_of_every_host(tmp_path):
    script = script_of(tmp_path, overrides=["--optimizer.lr=0.01"], entry_points={"model": "module:build"})
    assert "--model=module:build --optimizer.lr=0.01" in script


def test_ranks_share_the_cores_of_whole_nodes_or_those_that_are_asked_for(tmp_path):
    whole, part = (directives(script_of(tmp_path, **options)) for options in ({}, {"cpus": 12}))
    assert ("exclusive" in whole, "cpus-per-task" in whole) == (True, False)
    assert ("exclusive" in part, part["cpus-per-task"]) == (False, "12")


@pytest.mark.parametrize("engine", ["slurm", "kubernetes", "ray"])
def test_code_of_an_update_and_callbacks_reaches_the_command_of_every_host(engine, tmp_path, capsys):
    names = {"optimizer": "m:optimizer", "schedule": "m:schedule", "callbacks": "m:log", "reward": "m:score"}
    options = [word for name, text in names.items() for word in (f"--{name}", text)]
    image = ["--image", "i"] if engine == "kubernetes" else []
    files = [str(write_run_file(tmp_path)), "--write", str(tmp_path / "job")]
    main(["launch", engine, *files, "--cpus", "7", "--json", *options, *image])
    text = Path(json.loads(capsys.readouterr().out)["files"][0]).read_text()
    assert all(f"--{name}={value}" in text for name, value in names.items())
    assert {"slurm": "cpus-per-task=7", "kubernetes": 'cpu: "7"', "ray": "cpus=7,"}[engine] in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpus": 0}, "--cpus 0 is out of range"),
        ({"hosts": 3}, "do not divide among launch.hosts = 3"),
        ({"hosts": 0}, "--hosts 0"),
        ({"partition": "a b"}, "--partition 'a b' is not a name"),
        ({"time": "1; rm"}, "--time '1; rm' is not a name"),
        ({"requeues": -1}, "--requeues -1"),
        ({"overrides": ["--model.width=-1"]}, "model.width"),
    ],
)
def test_options_that_make_no_job_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        script_of(tmp_path, **options)


def test_launch_without_sbatch_names_the_script_to_submit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch is not on this machine"):
        launch_slurm(write_run_file(tmp_path), tmp_path / "run")


def test_command_prints_the_files_as_json(tmp_path, capsys):
    main(["launch", "slurm", str(write_run_file(tmp_path)), "--write", str(tmp_path / "job"), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["files"] == [str(tmp_path / "job" / "job.sh")]
    assert printed["job"] is None
    assert stat.S_IMODE((tmp_path / "job" / "job.sh").stat().st_mode) == 0o644


def test_table_of_exit_codes_agrees_with_the_supervisor_and_the_help():
    assert {entry.code for entry in EXIT_CODES if entry.action == "fail"} == {*FINAL_EXIT_CODES, 130}
    assert all(str(entry.code) in EXIT_CODES_TEXT for entry in EXIT_CODES)
    assert [action_of(code) for code in (0, 143, 1, 5, 8, 137)] == ["done", "requeue", *["retry"] * 4]


def earlier(*steps: int, action: str = "retry", job: str = "7") -> list[dict]:
    return [{"job": job, "action": action, "checkpoint_step": step} for step in steps]


@pytest.mark.parametrize(
    ("code", "step", "before", "action"),
    [
        (0, 40, [], "done"),
        (2, -1, [], "fail"),
        (143, 10, [], "requeue"),
        (143, 10, earlier(10, 10, 10, 10, action="requeue"), "requeue"),
        (8, 10, earlier(10), "retry"),
        (8, 10, earlier(10, 10), "fail"),
        (8, 10, [*earlier(10), *earlier(10, action="requeue"), *earlier(10)], "fail"),
        (8, 15, earlier(10, 10), "retry"),  # it came further than after the earlier failures
        (8, 10, earlier(10, 10, job="6"), "retry"),
    ],
)
def test_decision_counts_failures_in_a_row_without_a_new_checkpoint(code, step, before, action):
    assert decide(code, step, before, "7", len(before), 2).action == action


def test_lost_task_does_not_hide_how_the_run_ended():
    assert exit_code_of_run(137, [{"outcome": "failed"}, {"outcome": "complete"}]) == 0
    assert exit_code_of_run(137, [{"outcome": "stopped", "exit_code": 143}]) == 143
    assert exit_code_of_run(5, [{"outcome": "failed", "exit_code": 8}]) == 5
    assert exit_code_of_run(2, []) == 2


def write_incidents(run: Path, *incidents: object) -> None:
    for number, incident in enumerate(incidents, 1):
        folder = run / "attempts" / f"{number:04d}"
        folder.mkdir(parents=True)
        (folder / "incident.json").write_text(incident if isinstance(incident, str) else json.dumps(incident))


def test_hosts_that_incidents_blame_often_are_named_and_untrusted_names_are_not(tmp_path):
    failed = {"outcome": "failed", "host": "node1"}
    hostile = {"outcome": "failed", "host": "x --all"}
    write_incidents(
        tmp_path, failed, {"outcome": "hang", "host": "node1"}, failed | {"host": "node2"}, hostile, hostile, "{", [],
        {"outcome": "complete", "host": "node2"}, {"outcome": "failed", "host": 3}, {"outcome": "failed"},
    )  # fmt: skip
    assert blamed_hosts(RunFolder(tmp_path), 2) == ["node1"]
    assert blamed_hosts(RunFolder(tmp_path), 1) == ["node1", "node2"]


class FakeSlurm:
    """Answers the commands that the end of a script runs."""

    def __init__(self, state: str = "RUNNING", nodes: str = "node1\nnode2\nnode3\n") -> None:
        self.state, self.nodes, self.commands = state, nodes, []

    def __call__(self, command) -> str:
        self.commands.append(" ".join(command))
        if command[0] == "sinfo":
            return self.nodes
        return f"JobId=7 JobName=x JobState={self.state} Reason=None" if "show" in command else ""


def end(tmp_path: Path, code: int, slurm: FakeSlurm, nodes: int = 1) -> int:
    args = Namespace(
        run=tmp_path / "run", code=code, after=0, record=tmp_path / "exits.jsonl", requeues=3, blame_limit=2
    )
    return end_of_start(args, {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(nodes)}, slurm)


def test_stopped_job_returns_to_the_queue_without_the_blamed_node(tmp_path):
    blamed = {"outcome": "failed", "host": "node1"}
    write_incidents(tmp_path / "run", blamed, blamed, {"outcome": "stopped", "exit_code": 143, "checkpoint_step": 9})
    slurm = FakeSlurm()
    assert end(tmp_path, 143, slurm) == 143
    assert slurm.commands[1] == "scontrol requeue 7"
    assert slurm.commands[-1] == "scontrol update JobId=7 ExcNodeList=node1"
    assert read_decisions(tmp_path / "exits.jsonl")[0]["checkpoint_step"] == 9


def test_blamed_node_is_kept_if_too_few_others_remain(tmp_path, capsys):
    blamed = {"outcome": "failed", "host": "node1"}
    write_incidents(tmp_path / "run", blamed, blamed)
    slurm = FakeSlurm()
    end(tmp_path, 8, slurm, nodes=3)
    assert not any("ExcNodeList" in command for command in slurm.commands)
    assert "too few other nodes to exclude node1" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "state"), [(143, "COMPLETING"), (143, "CANCELLED"), (143, "PENDING"), (7, "RUNNING")])
def test_job_that_slurm_ends_itself_or_that_is_final_is_not_requeued(tmp_path, code, state):
    slurm = FakeSlurm(state)
    assert end(tmp_path, code, slurm) == code
    assert not any("requeue" in command for command in slurm.commands)


def test_requeue_that_slurm_refuses_is_reported(tmp_path, capsys):
    def refuse(command):
        raise subprocess.CalledProcessError(1, command, stderr="Requested operation is presently disabled")

    assert end(tmp_path, 8, refuse) == 8
    assert "cannot return to the queue: Requested operation is presently disabled" in capsys.readouterr().err


def test_torn_record_of_decisions_is_skipped(tmp_path):
    (tmp_path / "exits.jsonl").write_text('{"job": "7", "action": "retry", "checkpoint_step": 5}\n{"job": "7", "act')
    assert len(read_decisions(tmp_path / "exits.jsonl")) == 1


def test_newest_attempt_is_printed_for_a_run_that_has_not_started(tmp_path):
    command = [sys.executable, "-m", "meshwright.ops.engines.slurm_exit", "newest", str(tmp_path / "absent")]
    assert subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout == "0\n"
