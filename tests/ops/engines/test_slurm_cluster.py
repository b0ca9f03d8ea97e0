"""Runs under a real SLURM: submitted, preempted, out of time, cancelled, or on a node that dies, a run ends with the
digest of an undisturbed one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from tests.ops.engines.engine_runs import ENVIRONMENT, final_digest, newest_step, write_run_file
from tests.ops.engines.slurm_cluster import SlurmCluster, wait_until

STEPS = 40
SLOW = "step.forward:rank0:slow=0.25x99"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class SubmittedJob:
    """A job that `meshwright launch slurm` has submitted."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *options: str, fault: str = SLOW, sbatch: str = "") -> None:
        self.cluster, self.folder, self.run = cluster, folder / "run.launch", folder / "run"
        launch = [sys.executable, "-m", "meshwright", "launch", "slurm", str(write_run_file(folder, STEPS))]
        write = ["--write", str(self.folder)] if sbatch else []
        self.environment = cluster.environment | ENVIRONMENT | {"MESHWRIGHT_FAULT": fault}
        done = subprocess.run(
            [*launch, "--run", str(self.run), "--json", *options, *write],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        launched = json.loads(done.stdout)
        self.number = launched["job"]
        if sbatch:
            command = ["sbatch", "--parsable", *sbatch.split(), launched["files"][0]]
            self.number = subprocess.run(
                command, env=self.environment, check=True, capture_output=True, text=True
            ).stdout.strip()

    @property
    def output(self) -> str:
        file = self.folder / f"job-{self.number}.out"
        return file.read_text() if file.exists() else ""

    @property
    def decisions(self) -> list[dict]:
        file = self.folder / "exits.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_checkpoint(self, step: int = 5) -> None:
        wait_until(lambda: newest_step(self.run) >= step, lambda: f"no checkpoint: {self.output}", 120)

    def assert_complete(self, digest: str, seconds: float = 200) -> None:
        state = self.cluster.wait_for(self.number, *ENDED, seconds=seconds)
        assert state == "COMPLETED", self.output
        assert final_digest(self.run, STEPS) == digest
        assert not list(self.folder.glob("secret.*"))


def test_submitted_run_completes_and_leaves_no_secret(slurm, tmp_path):
    """The short form of these tests, which `make test` runs too where SLURM is installed."""
    job = SubmittedJob(slurm, tmp_path, "--steps=4", fault="")
    wait_until(lambda: any(job.folder.glob("secret.*")) or job.decisions, "the job did not start", 30)
    for secret in job.folder.glob("secret.*"):
        assert secret.stat().st_mode & 0o777 == 0o600
    assert slurm.wait_for(job.number, *ENDED) == "COMPLETED", job.output
    assert [decision["action"] for decision in job.decisions] == ["done"]
    assert newest_step(job.run) == 4
    assert not list(job.folder.glob("secret.*"))


@pytest.mark.engines
def test_submitted_run_has_the_digest_of_one_without_an_engine(slurm, tmp_path, undisturbed):
    SubmittedJob(slurm, tmp_path, "--hosts", "2", fault="").assert_complete(undisturbed)


@pytest.mark.engines
def test_preempted_run_saves_a_checkpoint_and_continues_from_the_queue(slurm, tmp_path, undisturbed):
    job = SubmittedJob(slurm, tmp_path)
    job.wait_for_checkpoint()
    before = newest_step(job.run)
    urgent = slurm.run("sbatch", "--parsable", "-p", "high", "-N3", "-c4", "-o/dev/null", "--wrap", "sleep 1")
    slurm.wait_for(urgent, "COMPLETED")
    assert [decision["code"] for decision in job.decisions] == [143]
    assert newest_step(job.run) > before  # the checkpoint of the signal, not the last periodic one
    job.assert_complete(undisturbed)
    assert slurm.job(job.number)["Restarts"] == "1"
    assert [decision["action"] for decision in job.decisions] == ["requeue", "done"]


@pytest.mark.engines
def test_run_at_its_time_limit_saves_a_checkpoint_and_continues(slurm, tmp_path, undisturbed):
    # Of two minutes the notice of 60 s leaves less than 60 s, too few for 40 steps of 1.5 s.
    job = SubmittedJob(slurm, tmp_path, sbatch="--time=2 --signal=TERM@60", fault="step.forward:rank0:slow=1.5x99")
    job.assert_complete(undisturbed, seconds=480)
    stopped = [decision for decision in job.decisions if decision["action"] == "requeue"]
    assert [decision["action"] for decision in job.decisions] == ["requeue"] * len(stopped) + ["done"]
    assert any(0 < decision["checkpoint_step"] < STEPS for decision in stopped)


@pytest.mark.engines
def test_cancelled_run_saves_a_checkpoint_and_stays_cancelled(slurm, tmp_path):
    job = SubmittedJob(slurm, tmp_path)
    job.wait_for_checkpoint()
    before = newest_step(job.run)
    slurm.run("scancel", job.number)
    slurm.wait_for(job.number, "CANCELLED")
    wait_until(lambda: bool(job.decisions), lambda: job.output, 20)
    assert newest_step(job.run) > before
    wait_until(lambda: "SLURM ends the job itself" in job.output, lambda: job.output, 5)
    assert slurm.job(job.number)["Restarts"] == "0"


@pytest.mark.engines
def test_run_on_a_node_that_dies_continues_on_another(slurm, tmp_path, undisturbed):
    job = SubmittedJob(slurm, tmp_path)
    job.wait_for_checkpoint()
    first = slurm.job(job.number)["NodeList"]
    slurm.kill_node(first)
    wait_until(lambda: slurm.job(job.number)["Restarts"] == "1", lambda: str(slurm.job(job.number)), 60)
    job.assert_complete(undisturbed)
    assert slurm.job(job.number)["NodeList"] != first


@pytest.mark.engines
def test_final_error_is_not_requeued(slurm, tmp_path):
    job = SubmittedJob(slurm, tmp_path, fault="step.backward:rank0:nan@step7")
    assert slurm.wait_for(job.number, *ENDED) == "FAILED"
    assert slurm.job(job.number)["ExitCode"] == "7:0"
    assert [(entry["code"], entry["action"]) for entry in job.decisions] == [(7, "fail")]


@pytest.mark.engines
def test_failing_run_is_requeued_a_limited_number_of_times(slurm, tmp_path):
    job = SubmittedJob(slurm, tmp_path, "--requeues", "1", "--launch.restarts=0", fault="start.begin:rank1:killx99")
    assert slurm.wait_for(job.number, *ENDED) == "FAILED"
    assert [entry["action"] for entry in job.decisions] == ["retry", "fail"]
    assert "after 1 requeue(s) without a new checkpoint" in job.output


@pytest.mark.engines
def test_node_that_incidents_blame_is_excluded_on_requeue(slurm, tmp_path, undisturbed):
    """The first start is on node1 and its incidents blame it; the second one is on node2."""
    run = tmp_path / "run"
    write_run_file(tmp_path, STEPS)
    blame = tmp_path / "blame.py"
    blame.write_text(
        "import json, os, pathlib, sys\n"
        f"run = pathlib.Path({str(run)!r})\n"
        "if os.environ.get('SLURM_RESTART_COUNT', '0') == '0':\n"
        "    for attempt in ('0001', '0002'):\n"
        "        folder = run / 'attempts' / attempt\n"
        "        folder.mkdir(parents=True)\n"
        "        incident = {'outcome': 'failed', 'exit_code': 8, 'host': os.environ['MESHWRIGHT_HOST_NAME']}\n"
        "        (folder / 'incident.json').write_text(json.dumps(incident))\n"
        "    sys.exit(8)\n"
        "sys.argv[0:1] = []\n"
        "os.execv(sys.argv[0], sys.argv)\n"
    )
    launch = [sys.executable, "-m", "meshwright", "launch", "slurm", str(tmp_path / "small.toml"), "--run", str(run)]
    environment = slurm.environment | ENVIRONMENT
    subprocess.run([*launch, "--write", str(tmp_path / "job")], env=environment, check=True, timeout=60)
    script = tmp_path / "job" / "job.sh"
    script.write_text(script.read_text().replace('exec "$@"\' supervisor', f'exec {sys.executable} {blame} "$@"\' x'))
    number = subprocess.run(
        ["sbatch", "--parsable", "--nodelist=", str(script)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    slurm.wait_for(number, "RUNNING")
    first = slurm.job(number)["NodeList"]
    assert slurm.wait_for(number, *ENDED) == "COMPLETED", (tmp_path / "job" / f"job-{number}.out").read_text()
    assert slurm.job(number)["ExcNodeList"] == first
    assert slurm.job(number)["NodeList"] != first
    assert final_digest(run, STEPS) == undisturbed
    assert os.path.exists(run / "attempts" / "0003")


@pytest.mark.engines
def test_run_on_two_nodes_is_preempted_and_continues(slurm, tmp_path, undisturbed):
    job = SubmittedJob(slurm, tmp_path, "--hosts", "2")
    job.wait_for_checkpoint()
    urgent = slurm.run("sbatch", "--parsable", "-p", "high", "-N3", "-c4", "-o/dev/null", "--wrap", "sleep 1")
    slurm.wait_for(urgent, "COMPLETED")
    assert [decision["code"] for decision in job.decisions] == [143], job.output
    job.assert_complete(undisturbed)


@pytest.mark.engines
def test_spare_node_replaces_one_that_dies_and_the_job_stays_in_its_allocation(slurm, tmp_path, undisturbed):
    job = SubmittedJob(slurm, tmp_path, "--hosts", "2", "--spares", "1", "--launch.host_timeout=5")
    job.wait_for_checkpoint()
    fields = slurm.job(job.number)
    placed = next(iter(set(hosts_of_last_attempt(job.run)) - {fields["BatchHost"]}))
    slurm.kill_node(placed)
    job.assert_complete(undisturbed)
    assert slurm.job(job.number)["Restarts"] == "0", job.output
    assert placed not in hosts_of_last_attempt(job.run)


def hosts_of_last_attempt(run: Path) -> list[str]:
    """The hosts of the ranks, from the newest start record."""
    starts = [event for event in read_events(RunFolder(run).events(0)) if event["kind"] == "start"]
    return starts[-1]["hosts"]
