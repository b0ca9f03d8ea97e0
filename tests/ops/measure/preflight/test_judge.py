"""The judgement of a preflight: planted faults are named with their host, and a healthy job has no finding."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import permutations
from statistics import median

import pytest

from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.errors import ConfigError, PeerError
from meshwright.ops.preflight.expectations import Expectations
from meshwright.ops.preflight.judge import judge
from meshwright.ops.preflight.judgement.devices import median_of_others
from meshwright.ops.preflight.measurements import HostMeasurements, PairMeasurement, Reachability
from meshwright.ops.preflight.pair_schedule import schedule_pairs
from meshwright.ops.preflight.report import PreflightReport
from tests.ops.measure.preflight.planted_hosts import (
    GIB,
    LIMITS,
    VERSIONS,
    change_device,
    change_disk,
    change_rank,
    healthy_job,
    slow_host,
    slow_pairs,
)

PLANNED = Expectations(hosts=4, checkpoint_bytes=100 * GIB, kept_checkpoints=4, rank_bytes=20 * GIB)


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("per_host", [1, 8])
def test_healthy_job_has_no_finding(hosts, per_host):
    if hosts * per_host == 1:
        per_host = 2
    report = judge(healthy_job(hosts, per_host), replace(PLANNED, hosts=hosts))
    assert report.findings == ()
    assert report.suspect_hosts == ()
    assert report.exit_code == 0
    report.raise_if_failed()


JOB = healthy_job()
FAULTS = {
    "slow GPU": (change_device(JOB, 5, matmul_rate=400e12), "matmul rate", "host host-2, rank 5", "slow", "host-2"),
    "slow link": (slow_pairs(JOB, ("host-1", "host-3")), "link", "host-1 - host-3", "slow", ""),
    "slow host": (slow_host(JOB, "host-2"), "host", "host host-2", "slow", "host-2"),
    "other torch": (
        change_rank(JOB, 6, versions=VERSIONS | {"torch": "2.12.1"}),
        "torch",
        "host host-3",
        "differs",
        "host-3",
    ),
    "clock off by an hour": (
        change_rank(JOB, 2, clock_offset=3600.0),
        "wall clock",
        "host host-1",
        "differs",
        "host-1",
    ),
    "full disk": (change_disk(JOB, 4, free_bytes=3 * GIB), "free space", "host host-2", "broken", "host-2"),
    "different code": (
        change_rank(JOB, 2, versions=VERSIONS | {"code": "0dd"}),
        "code",
        "host host-1",
        "differs",
        "host-1",
    ),
    "run folder that is not shared": (
        change_disk(JOB, 6, folder_id="token host-3", won=True),
        "run folder",
        "host host-3",
        "differs",
        "host-3",
    ),
    "low memlock": (
        change_rank(JOB, 2, limits=replace(LIMITS, locked_memory=64 << 10)),
        "locked memory",
        "host host-1",
        "differs",
        "host-1",
    ),
    "half the memory taken": (
        change_device(JOB, 3, free_memory=40.0 * GIB),
        "free memory",
        "host host-1, rank 3",
        "differs",
        "host-1",
    ),
}


@pytest.mark.parametrize(("job", "name", "where", "verdict", "host"), FAULTS.values(), ids=FAULTS)
def test_planted_fault_is_the_only_finding_and_is_named(job, name, where, verdict, host):
    report = judge(job, PLANNED)
    [finding] = report.findings
    assert (finding.name, finding.where, finding.verdict, finding.host) == (name, where, verdict, host)
    assert finding.recommendation
    assert finding.expected != finding.found
    suspects = () if not host or finding.advisory else (host,)
    assert report.suspect_hosts == suspects
    assert report.exit_code == {"slow": 0, "differs": 0 if finding.advisory else 2, "broken": 8}[verdict]


@pytest.mark.parametrize("host", [0, 1, 2])
def test_slow_host_of_three_is_named(host):
    report = judge(slow_host(healthy_job(3), f"host-{host}"))
    assert [finding.where for finding in report.findings] == [f"host host-{host}"]


def test_two_slow_hosts_and_a_slow_link_are_told_apart():
    job = slow_host(slow_host(healthy_job(8), "host-2"), "host-5")
    report = judge(slow_pairs(job, ("host-0", "host-7")))
    assert {finding.where for finding in report.findings} == {"host host-2", "host host-5", "host-0 - host-7"}
    assert report.suspect_hosts == ("host-2", "host-5")


def test_network_that_is_slow_everywhere_names_no_host():
    cluster = resolve_cluster("h100:2x4")
    job = replace(JOB, pairs=tuple(replace(pair, bandwidth=2e9) for pair in JOB.pairs), groups=())
    report = judge(job, Expectations(cluster=cluster))
    assert {finding.name for finding in report.findings} == {"link"}
    assert len(report.findings) == len(job.pairs)
    assert all("(planner)" in finding.expected for finding in report.findings)
    assert report.suspect_hosts == ()


def test_one_pair_is_compared_with_the_planner():
    job = replace(healthy_job(2), groups=())
    assert judge(job, Expectations(cluster=resolve_cluster("h100:2x2"))).findings == ()
    slow = slow_pairs(job, ("host-0", "host-1"))
    assert judge(slow).findings == ()  # there is nothing to compare it with
    [finding] = judge(slow, Expectations(cluster=resolve_cluster("h100:2x2"))).findings
    assert finding.where == "host-0 - host-1"


def test_network_of_a_cluster_inferred_from_the_device_is_not_compared():
    slow = slow_pairs(replace(healthy_job(2), groups=()), ("host-0", "host-1"))
    assert judge(slow, Expectations(cluster=resolve_cluster("h100:2x2"), inferred=True)).findings == ()


def test_slow_latency_of_a_host_names_it():
    pairs = tuple(replace(pair, latency=0.02) if "host-1" in pair.hosts else pair for pair in JOB.pairs)
    assert judge(replace(JOB, pairs=pairs)).suspect_hosts == ("host-1",)


def test_slow_collective_names_the_host_that_no_other_group_has():
    groups = tuple(
        replace(group, seconds=2e-3) if group.axis == "shard" and group.ranks == (4, 5) else group
        for group in JOB.groups
    )
    [finding] = judge(replace(JOB, groups=groups)).findings
    assert (finding.check, finding.where, finding.host) == ("collectives", "ranks 4, 5", "host-2")


def test_whole_host_of_slow_devices_is_named_among_two():
    job = healthy_job(2, 8)
    for rank in range(8, 16):
        job = change_device(job, rank, matmul_rate=300e12)
    assert judge(job).suspect_hosts == ("host-1",)
    assert len(judge(job).findings) == 8


def test_one_device_is_compared_with_the_planner():
    job = change_device(healthy_job(1, 1), 0, matmul_rate=300e12)
    assert judge(job).findings == ()
    [finding] = judge(job, Expectations(cluster=resolve_cluster("h100"), inferred=True)).findings
    assert "(planner)" in finding.expected


def test_memory_that_is_too_small_for_the_state_is_broken():
    [finding] = judge(change_device(JOB, 3, free_memory=10.0 * GIB), PLANNED).findings
    assert finding.verdict == "broken"
    assert judge(JOB, replace(PLANNED, rank_bytes=100 * GIB)).suspect_hosts == ()  # every host is too small


def test_disk_that_is_full_for_every_host_excludes_none():
    job = JOB
    for rank in (0, 2, 4, 6):
        job = change_disk(job, rank, free_bytes=0)
    report = judge(job)
    assert report.exit_code == 8
    assert report.suspect_hosts == ()


def test_folder_that_cannot_be_written_is_broken():
    report = judge(change_disk(JOB, 2, error="Read-only file system", folder_id=""))
    assert [(row.name, row.found) for row in report.findings] == [("run folder", "Read-only file system")]
    assert report.exit_code == 8


def test_file_system_on_which_two_hosts_publish_one_name_is_broken():
    report = judge(change_disk(JOB, 2, won=True))
    assert {row.name for row in report.findings} == {"publish if absent"}
    assert report.exit_code == 8


def test_clock_that_is_off_on_the_host_of_rank_0_is_named():
    job = JOB
    for rank in range(2, 8):
        job = change_rank(job, rank, clock_offset=-3600.0)
    assert [row.where for row in judge(job).findings] == ["host host-0"]


def test_missing_rank_is_broken():
    job = replace(JOB, ranks=JOB.ranks[:7], missing_ranks=(7,), pairs=(), groups=(), not_measured="rank 7 is missing")
    report = judge(job, PLANNED)
    assert (report.findings[0].where, report.exit_code) == ("rank(s) 7", 8)
    assert "rank 7 is missing" in report.remarks[-1]


def test_missing_host_is_broken():
    report = judge(healthy_job(3), PLANNED)
    assert (report.findings[0].name, report.findings[0].found[0], report.exit_code) == ("number of hosts", "3", 8)


def test_two_hosts_with_one_name_differ():
    job = change_rank(healthy_job(2), 1, boot="another")
    assert [row.name for row in judge(job).findings] == ["host name"]


def test_failed_report_raises_the_error_of_its_exit_code():
    with pytest.raises(PeerError, match="free space of host host-2 broken") as broken:
        judge(FAULTS["full disk"][0], PLANNED).raise_if_failed()
    assert broken.value.exit_code == 8
    with pytest.raises(
        ConfigError, match=r"torch of host host-3 differs: expected 2\.13\.0, found 2\.12\.1"
    ) as differs:
        judge(FAULTS["other torch"][0], PLANNED).raise_if_failed()
    assert differs.value.exit_code == 2


def test_measurements_survive_json():
    assert HostMeasurements.from_json(JOB.to_json()) == JOB
    record = judge(JOB, PLANNED).to_json()
    assert record["findings"] == []
    assert len(record["rows"]) == len(judge(JOB, PLANNED).rows)


def test_judgement_needs_no_torch():
    modules = "judge, measurements, pair_schedule, expectations, report"
    code = f"import sys; from meshwright.ops.preflight import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_host_that_no_other_host_reaches_is_broken():
    names = JOB.hosts
    reached = tuple(
        Reachability(source, target, "no route to host" if target == "host-1" else "")
        for source, target in permutations(names, 2)
    )
    report = judge(replace(JOB, reached=reached, pairs=(), groups=(), not_measured="hosts cannot connect"))
    assert [(row.name, row.where) for row in report.findings] == [("connections", "host host-1")]
    assert (report.exit_code, report.suspect_hosts) == (8, ("host-1",))


def test_connection_that_fails_in_one_direction_is_a_broken_link():
    reached = tuple(
        Reachability(source, target, "refused" if (source, target) == ("host-0", "host-3") else "")
        for source, target in permutations(JOB.hosts, 2)
    )
    report = judge(replace(JOB, reached=reached))
    assert [(row.name, row.where) for row in report.findings] == [("connection", "host-0 - host-3")]
    assert report.suspect_hosts == ()


def test_median_of_others_is_that_of_the_remaining_values():
    values = [4.0, 1.0, 3.0, 3.0, 9.0, 2.0]
    for count in range(2, 7):
        for own in set(values[:count]):
            others = list(values[:count])
            others.remove(own)
            assert median_of_others(sorted(values[:count]), own) == median(others)
    assert median_of_others([1.0], 1.0) is None


def test_slow_host_of_512_is_named_by_a_sample_of_its_pairs():
    hosts = healthy_job(512, 8, meets=False)
    schedule = schedule_pairs(512, 3.5, "cuda")
    names = hosts.hosts
    pairs = [
        PairMeasurement(names[first], names[second], 4e9 if 40 in (first, second) else 40e9, 12e-6, 1 << 20)
        for pairs in schedule.rounds
        for first, second in pairs
    ]
    report: PreflightReport = judge(replace(hosts, pairs=tuple(pairs)))
    assert report.suspect_hosts == ("host-40",)
    assert [row.where for row in report.findings] == ["host host-40"]
