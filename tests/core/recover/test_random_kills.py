"""SIGKILL at random times, to a rank, all ranks, the supervisor or all processes, does not change the result."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.records.incidents import read_heartbeats, read_incidents
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.checkpoint.unsharded import state_digest
from meshwright.core.checkpoint.verify import find_damage
from tests.core.recover.recovery_runs import losses
from tests.kit.small_run import SMALL, step_records

SAVING = ["--checkpoint.seconds=0.15", "--checkpoint.overhead=1", "--checkpoint.keep=2", "--eval.every=0"]
COMMAND = [sys.executable, "-m", "meshwright", "train", "--restarts=1000", *SMALL, *SAVING]


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    with open(folder.with_suffix(".log"), "ab") as log:
        return subprocess.Popen([*COMMAND, f"--steps={steps}", "--run", str(folder)], stdout=log, stderr=log)


def live_rank_pids(folder: Path) -> list[int]:
    """The pids of the live ranks of the newest attempt."""
    run = RunFolder(folder)
    pages = read_heartbeats(run, run.last_attempt()).values()
    return [page.pid for page in pages if page.is_alive]


def below(pid: int) -> list[int]:
    """The descendants of a process."""
    try:
        text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return []
    return [each for child in map(int, text.split()) for each in (child, *below(child))]


def newest(folder: Path) -> int:
    return next((entry.step for entry in list_published(open_run_store(RunFolder(folder)))), -1)


def kill(kind: str, job: subprocess.Popen[bytes], folder: Path, rng: random.Random) -> None:
    ranks = live_rank_pids(folder)
    match kind:
        case "rank":
            victims = [rng.choice(ranks)] if ranks else []
        case "ranks":
            victims = ranks
        case "supervisor":
            victims = [job.pid]
        case _:
            victims = [job.pid, *below(job.pid)]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def run_with_kills(folder: Path, steps: int, kills: int, seed: int) -> list[str]:
    """A run that is killed `kills` times, each time after a new checkpoint and a random delay."""
    rng, kills_done = random.Random(seed), []
    job = start(folder, steps)
    try:
        while True:
            reached, wait = newest(folder), rng.uniform(0.05, 0.6)
            end = time.monotonic() + 60
            while job.poll() is None and newest(folder) <= reached and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(wait)
            if job.poll() is not None and job.returncode >= 0:
                assert job.returncode == 0, folder.with_suffix(".log").read_text()[-3000:]
                return kills_done
            if len(kills_done) < kills:
                kind = rng.choice(["rank", "ranks", "supervisor", "all"])
                children = below(job.pid)
                kill(kind, job, folder, rng)
                kills_done.append(kind)
                if kind in ("supervisor", "all"):
                    job.wait(timeout=10)
                    assert gone(children), f"seed {seed}: {kind} left a process behind"
                    job = start(folder, steps)
    finally:
        job.kill()
        job.wait()


def gone(pids: list[int]) -> bool:
    """Whether the kernel ends the processes within seconds of their parent."""
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/stat").exists() and "Z" not in state(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "Z"


def check(tmp_path: Path, steps: int, kills: int, seed: int) -> None:
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    assert start(undisturbed, steps).wait(timeout=200) == 0
    kills_done = run_with_kills(disturbed, steps, kills, seed)
    assert len(kills_done) == kills, f"seed {seed}: the run ended after {kills_done}"
    assert losses(disturbed) == losses(undisturbed), f"seed {seed}"
    assert sorted(step_records(disturbed)) == list(range(steps)), f"seed {seed}"
    digests = []
    for folder in (disturbed, undisturbed):
        entries = list_published(open_run_store(RunFolder(folder)))
        assert not [damage for entry in entries for damage in find_damage(entry)]
        assert entries[0].step == steps
        digests.append(state_digest(entries[0]))
    assert digests[0] == digests[1], f"seed {seed}"
    incidents = read_incidents(RunFolder(disturbed))
    assert incidents[-1].outcome == "complete"
    assert len(incidents) >= kills / 2


@pytest.mark.long
def test_ten_random_kills_change_neither_result_nor_events(tmp_path):
    check(tmp_path, 400, 10, seed=20)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_fifty_random_kills_change_neither_result_nor_events(tmp_path):
    check(tmp_path, 2000, 50, seed=21)
