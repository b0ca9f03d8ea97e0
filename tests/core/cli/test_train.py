"""Tests of `meshwright train` as a process: signals, a second job, a killed rank, torchrun, output to a pipe."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.base.cli import main
from meshwright.base.records.events import read_events
from meshwright.base.records.heartbeat import read_heartbeat
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.recover.supervisor import newest_checkpoint_step

BIN = Path(sys.executable).parent
SMALL = [
    "--model.layers=1",
    "--model.width=32",
    "--model.ffn=32",
    "--data.kind=synthetic",
    "--data.sequence=16",
    "--launch.device=cpu",
]


STARTED_JOBS: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def kill_started_jobs():
    """Kills the jobs that a failed test leaves behind."""
    yield
    for job in STARTED_JOBS:
        job.kill()
    STARTED_JOBS.clear()


def start_job(folder: Path, *args: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*prefix, str(BIN / "meshwright"), "train", "--run", str(folder), *SMALL, *args]
    pipe = subprocess.PIPE
    STARTED_JOBS.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True))
    return STARTED_JOBS[-1]


def wait_for_steps(folder: Path, count: int, seconds: float = 120, attempt: int = 1) -> None:
    path = folder / "events" / "rank-00000.jsonl"
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists() and sum(e["kind"] == "step" and e["attempt"] == attempt for e in read_events(path)) >= count:
            return
        time.sleep(0.05)
    raise TimeoutError(f"no {count} steps in {seconds} s")


def descendants(pid: int) -> list[int]:
    """Returns the ids of all descendants of a process."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parent = {int(a): int(b) for a, b in (line.split() for line in table.splitlines())}
    result, frontier = [], [pid]
    while frontier:
        frontier = [child for child, above in parent.items() if above in frontier]
        result += frontier
    return result


def rank_pid(run: Path, rank: int) -> int:
    """Returns the process of a rank of the first attempt."""
    reading = read_heartbeat(RunFolder(run).heartbeat(1, rank))
    assert reading is not None
    return reading.pid


def all_ended(pids: list[int], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(
            Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
            for pid in pids
        ):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_every_rank_before_the_same_step_with_exit_code_130_or_143(tmp_path, number, code):
    job = start_job(tmp_path / "r", "--steps", "100000")
    wait_for_steps(tmp_path / "r", 5)
    below = descendants(job.pid)
    assert len(below) == 4  # the fork server, two ranks and the guard of their descendants
    os.kill(job.pid, number)
    out, err = job.communicate(timeout=120)
    assert job.returncode == code
    assert f"stopped by signal {int(number)} before step" in err
    last = [
        [e["step"] for e in read_events(tmp_path / "r" / "events" / f"rank-0000{r}.jsonl") if e["kind"] == "step"][-1]
        for r in (0, 1)
    ]
    assert last[0] == last[1]
    assert all_ended(below)


@pytest.mark.parametrize("delay", [0.0, 0.3, 1.0, 2.0])
def test_signal_during_startup_stops_the_run(tmp_path, delay):
    job = start_job(tmp_path / "r", "--steps", "100000")
    while not (tmp_path / "r" / "attempts" / "0001" / "lease.json").exists():
        time.sleep(0.01)
    time.sleep(delay)
    below = descendants(job.pid)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 130, err
    assert "meshwright: stopped by signal 2 before" in err
    assert all_ended(below)


def ignores(pid: int, number: int) -> bool:
    """Whether the kernel discards a signal to a process."""
    mask = re.search(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> number - 1 & 1)


def test_job_that_starts_with_sigint_ignored_leaves_it_ignored_and_sigterm_stops_it(tmp_path):
    """A shell starts `meshwright train &` of a script so: Ctrl-C is then for the processes in the foreground."""
    job = start_job(tmp_path / "r", "--steps", "100000", prefix=("sh", "-c", 'trap "" INT; exec "$@"', "sh"))
    wait_for_steps(tmp_path / "r", 5)
    processes = [job.pid, *descendants(job.pid)]
    assert all(ignores(pid, signal.SIGINT) for pid in processes)
    for pid in processes:
        os.kill(pid, signal.SIGINT)
    done = sum(event["kind"] == "step" for event in read_events(tmp_path / "r" / "events" / "rank-00000.jsonl"))
    wait_for_steps(tmp_path / "r", done + 5)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 143
    [step] = re.findall(r"stopped by signal 15 before step (\d+)", err)
    assert newest_checkpoint_step(RunFolder(tmp_path / "r")) == int(step)


def test_signal_to_one_rank_stops_all_ranks(tmp_path):
    job = start_job(tmp_path / "r", "--steps", "100000")
    wait_for_steps(tmp_path / "r", 5)
    os.kill(rank_pid(tmp_path / "r", 1), signal.SIGTERM)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 143, err


def test_killed_rank_ends_the_run_with_exit_code_8_and_is_reported(tmp_path):
    job = start_job(tmp_path / "r", "--steps", "100000", "--restarts", "0")
    wait_for_steps(tmp_path / "r", 5)
    below = descendants(job.pid)
    os.kill(rank_pid(tmp_path / "r", 1), signal.SIGKILL)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 8
    assert re.search(r"rank 1 was killed by signal 9 \(SIGKILL\)", err.splitlines()[0])
    assert all_ended(below)


def test_ranks_end_when_the_supervisor_is_killed_and_the_run_folder_is_usable_again(tmp_path):
    job = start_job(tmp_path / "r", "--steps", "100000")
    wait_for_steps(tmp_path / "r", 5)
    below = descendants(job.pid)
    job.kill()
    job.communicate(timeout=120)
    assert all_ended(below)
    second = start_job(tmp_path / "r", "--steps", "100000")
    wait_for_steps(tmp_path / "r", 2, attempt=2)
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=120)
    attempts = {e["attempt"] for e in read_events(tmp_path / "r" / "events" / "rank-00000.jsonl")}
    assert attempts == {1, 2}


def test_second_job_on_the_same_run_folder_exits_with_code_9(tmp_path):
    job = start_job(tmp_path / "r", "--steps", "100000")
    wait_for_steps(tmp_path / "r", 1)
    second = start_job(tmp_path / "r", "--steps", "100000")
    _, err = second.communicate(timeout=120)
    assert second.returncode == 9
    assert f"held by process {job.pid}" in err
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=120)


def test_output_without_a_terminal_has_one_plain_line_per_log_step(tmp_path):
    job = start_job(tmp_path / "r", "--steps", "6", "--log_every=2")
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    assert "\x1b" not in out
    assert [m[1] for m in re.finditer(r"^ +(\d+) of 6 steps done  loss", out, re.MULTILINE)] == ["1", "3", "5", "6"]
    assert "global 16 = micro 8 x data-parallel 2 x accumulation 1" in out
    assert str(tmp_path / "r") in out


def test_json_option_prints_one_event_per_line(tmp_path):
    out, err = start_job(tmp_path / "r", "--steps", "3", "--json").communicate(timeout=120)
    events = [json.loads(line) for line in out.splitlines()]
    assert [e["kind"] for e in events] == [
        "attempt_start",
        "start",
        "step",
        "step",
        "counters",
        "step",
        "eval",
        "checkpoint",
        "end",
        "attempt_end",
    ]


def test_invalid_token_file_is_one_line_with_exit_code_6(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"12345")
    job = start_job(tmp_path / "r", "--data.kind=tokens", f"--data.path={tmp_path / 'odd.bin'}")
    _, err = job.communicate(timeout=120)
    assert job.returncode == 6
    assert err.count("\n") == 1
    assert "is not a multiple of" in err


def test_run_folder_that_cannot_be_created_is_reported_with_exit_code_2(tmp_path):
    (tmp_path / "file").write_text("")
    job = start_job(tmp_path / "file" / "r")
    _, err = job.communicate(timeout=120)
    assert job.returncode == 2
    assert "cannot create the run folder" in err


def test_torchrun_gives_bitwise_the_same_parameters(tmp_path):
    rendezvous = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    job = ["-m", "meshwright", "train", "--run-dir", str(tmp_path / "torchrun"), *SMALL, "--steps", "4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [str(BIN / "torchrun"), *rendezvous, *job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    start_job(tmp_path / "own", "--steps", "4").communicate(timeout=120)
    digests = [
        list(read_events(tmp_path / name / "events" / "rank-00000.jsonl"))[-1]["parameters_digest"]
        for name in ("torchrun", "own")
    ]
    assert digests[0] == digests[1]
    assert "4 of 4 steps done" in done.stdout


def test_layout_with_another_number_of_ranks_than_torchrun_started_exits_with_code_2(tmp_path):
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    command = [str(BIN / "meshwright"), "train", "--run", str(tmp_path / "r"), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2
    assert "torchrun started 1 ranks, and the layout replicate 2 has 2; try " in done.stderr


def test_closed_output_pipe_does_not_end_the_training(tmp_path):
    job = start_job(tmp_path / "r", "--steps", "8", "--log_every=1")
    assert job.stdout is not None
    job.stdout.readline()
    job.stdout.close()
    assert job.wait(60) == 0
    assert [e["kind"] for e in read_events(tmp_path / "r" / "events" / "rank-00000.jsonl")][-1] == "end"


def test_steps_option_reaches_the_config(monkeypatch, tmp_path):
    """`--steps` on a finished run extends it, so the option must replace the value of the run file."""
    configs = []
    monkeypatch.setattr(
        "meshwright.core.api.train_with_fork_server", lambda config, *args, **kwargs: configs.append(config)
    )
    (tmp_path / "run.toml").write_text("steps = 5\n")
    main(["train", str(tmp_path / "run.toml"), "--steps", "9", "--run", str(tmp_path / "r")])
    main(["train", str(tmp_path / "run.toml"), "--run", str(tmp_path / "r")])
    assert [config.steps for config in configs] == [9, 5]
