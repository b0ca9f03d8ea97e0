"""Hosts that are lost between two checkpoints: the job continues from the memory of the hosts that are left."""

from __future__ import annotations

import time

import pytest

from meshwright import train
from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.core.checkpoint.verify import find_damage
from tests.core.recover.hosts.loopback_hosts import OPTIONS, STEPS, LoopbackJob
from tests.kit.small_run import small_config

HANG = "step.fetch:rank1:hang@step14,step.fetch:slow=0.1"
"""Rank 1 stays in step 14: the checkpoint of step 10 is published, and so is a later snapshot."""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> str:
    """The digest of the parameters of an undisturbed run."""
    folder = tmp_path_factory.mktemp("golden") / "run"
    return train(small_config(*OPTIONS, steps=STEPS), run=folder, quiet=True).digest


@pytest.fixture
def job(tmp_path):
    job = LoopbackJob(tmp_path / "run", "--checkpoint.memory_every=1", "--checkpoint.overhead=1")
    yield job
    job.end()


def start_until_snapshot(job: LoopbackJob, *spares: str) -> int:
    """Starts the job and returns the step of its newest snapshot, which is newer than its checkpoint."""
    for host in ("a", "b", *spares):
        job.start(host, HANG)
    job.wait_until(lambda: job.ranks_are_at(14))
    job.wait_until(lambda: max(job.snapshots(), default=0) > 10)
    newest = 0
    while newest != max(job.snapshots()):  # the last one may be in flight
        newest = max(job.snapshots())
        time.sleep(2)
    return newest


def test_spare_continues_from_memory_after_a_host_is_lost(job, golden):
    step = start_until_snapshot(job, "c")
    placed = job.events("start")[0]["hosts"]
    member = next(name for name in "abc" if name != job.leader() and name in str(placed))
    job.kill(member)
    codes = job.finish()
    assert set(codes.values()) == {0}, job.all_logs()
    (restored,) = job.events("restored")
    assert (restored["step"], restored["published_step"]) == (step, 10)
    assert restored["hosts"] == [job.leader()]
    shown = f"from the memory of host {job.leader()} at step {step}; the newest checkpoint is of step 10"
    assert shown in job.log(job.leader())
    assert job.events("end")[0]["parameters_digest"] == golden
    published = list_published(open_run_store(job.folder))
    assert [entry.step for entry in published] == [20, 10]
    assert published[0].manifest.parent == published[1].manifest.digest
    assert not any(find_damage(entry) for entry in published)
    assert len(job.snapshots()) <= 2, "those of the killed host, until the next job starts"


@pytest.mark.long
def test_job_continues_from_the_checkpoint_if_both_hosts_are_lost(job, golden):
    start_until_snapshot(job)
    job.kill("a", "b")
    job.start("c")
    job.start("d")
    assert job.finish() == {"c": 0, "d": 0}, job.all_logs()
    (restored,) = job.events("restored")
    assert (restored["step"], restored["hosts"]) == (10, [])
    assert job.events("end")[0]["parameters_digest"] == golden
    assert not job.snapshots()
