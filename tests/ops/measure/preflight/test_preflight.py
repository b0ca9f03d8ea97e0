"""A preflight end to end: ranks with host names of their own on this machine, injected faults, torchrun, command."""

from __future__ import annotations

import io
import json
import multiprocessing as mp
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

import meshwright
from meshwright.base.cli import main
from meshwright.base.config import load_config
from meshwright.base.records.failures import RanksFailed
from meshwright.core.launch.ranks import run_ranks
from meshwright.ops.preflight.judge import judge
from meshwright.ops.preflight.preflight_text import show_preflight
from meshwright.ops.preflight.run import preflight_report
from tests.kit.small_run import small_config
from tests.ops.measure.preflight.planted_hosts import healthy_job, slow_host

TORCHRUN = Path(sys.executable).with_name("torchrun")


def on_hosts(world, config, folders, seconds):
    """A rank on a host of its own."""
    os.environ["MESHWRIGHT_HOST_NAME"] = f"node-{world.rank}"
    return preflight_report(world, config, folders[world.rank], len(folders), None, seconds)


def check_hosts(folders, fault="", seconds=1.0, monkeypatch=None):
    """Runs a preflight of one rank per host."""
    if monkeypatch is not None:
        monkeypatch.setenv("MESHWRIGHT_FAULT", fault)
    config = small_config(ranks=len(folders))
    reports = run_ranks(on_hosts, len(folders), config, folders, seconds)
    assert all(report == reports[0] for report in reports)
    return reports[0]


def test_every_check_is_made_on_every_host(tmp_path):
    report = check_hosts([tmp_path / "run"] * 3)
    measured = report.measurements
    assert measured.hosts == ("node-0", "node-1", "node-2")
    assert {pair.hosts for pair in measured.pairs} == {("node-0", "node-1"), ("node-0", "node-2"), ("node-1", "node-2")}
    assert all(pair.bandwidth > 0 and pair.latency > 0 for pair in measured.pairs)
    assert [(group.axis, group.collective, group.ranks) for group in measured.groups] == [
        ("replicate", "all_reduce", (0, 1, 2))
    ]
    for rank in measured.ranks:
        assert rank.device.matmul_rate > 0
        assert rank.device.free_memory > 0
        assert rank.disk.publishes_once
        assert rank.disk.write_rate > 0
        assert rank.limits.open_files > 0
    assert sum(rank.disk.won for rank in measured.ranks) == 1
    checks = {(row.check, row.name) for row in report.rows}
    assert {check for check, _ in checks} == {
        "hosts", "versions", "clock", "disk", "device", "network", "collectives", "limits",
    }  # fmt: skip
    assert report.exit_code == 0  # the machine may be busy, and a rank slow
    assert not list(tmp_path.iterdir())  # what was written is removed


def test_rank_that_is_slow_at_matmuls_is_named(tmp_path, monkeypatch):
    report = check_hosts([tmp_path / "run"] * 2, "preflight.matmul:rank1:slow=0.2", monkeypatch=monkeypatch)
    slow = [row for row in report.findings if row.name == "matmul rate"]
    assert [(row.where, row.verdict) for row in slow] == [("host node-1, rank 1", "slow")]
    assert "node-1" in report.suspect_hosts
    assert report.exit_code == 0


def test_host_with_slow_messages_is_named_by_all_of_its_pairs(tmp_path, monkeypatch):
    report = check_hosts([tmp_path / "run"] * 3, "preflight.send:rank2:slow=0.1", 2.0, monkeypatch)
    slow = [row for row in report.findings if row.check == "network"]
    assert [(row.name, row.where) for row in slow] == [("host", "host node-2")]
    assert "node-2" in report.suspect_hosts


def test_host_with_another_run_folder_is_named(tmp_path):
    folders = [tmp_path / "shared", tmp_path / "shared", tmp_path / "local"]
    report = check_hosts(folders)
    differing = [row for row in report.findings if row.verdict == "differs"]
    assert [(row.name, row.where) for row in differing] == [("run folder", "host node-2")]
    assert report.exit_code == 2


def test_disk_that_is_full_is_broken(tmp_path, monkeypatch):
    report = check_hosts([tmp_path / "run"] * 2, "preflight.write:rank1:enospc", monkeypatch=monkeypatch)
    broken = [row for row in report.findings if row.verdict == "broken"]
    assert [(row.name, row.where) for row in broken] == [("run folder", "host node-1")]
    assert "No space left on device" in broken[0].found
    assert report.exit_code == 8
    assert not list(tmp_path.iterdir())


def test_rank_that_dies_during_the_preflight_ends_it(tmp_path, monkeypatch):
    with pytest.raises(RanksFailed):
        check_hosts([tmp_path / "run"] * 2, "preflight.matmul:rank1:kill", monkeypatch=monkeypatch)


def start_agents(tmp_path, names, *options, environment=None):
    """One torchrun agent per host, each with one rank; returns (exit code, output) of each rank's host."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    agents = []
    for node, name in enumerate(names):
        rendezvous = [f"--nnodes={len(names)}", "--nproc-per-node=1", f"--node-rank={node}"]
        rendezvous += ["--master-addr=localhost", f"--master-port={port}"]
        command = [str(TORCHRUN), *rendezvous, "-m", "meshwright", "preflight", "--run-dir", str(tmp_path / "run")]
        variables = (
            os.environ | {"OMP_NUM_THREADS": "1", "MESHWRIGHT_HOST_NAME": name} | (environment or {}).get(node, {})
        )
        agents.append(
            subprocess.Popen([*command, "--seconds", "1", *options], env=variables, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
        )  # fmt: skip
    try:
        outputs = [agent.communicate(timeout=150) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, *output) for agent, output in zip(agents, outputs, strict=True)]


def test_torchrun_on_two_hosts_names_the_slow_one(tmp_path):
    fault = {node: {"MESHWRIGHT_FAULT": "preflight.matmul:rank1:slow=0.2"} for node in range(2)}
    (code, out, err), (other, silent, _) = start_agents(
        tmp_path, ["node-a", "node-b"], "--hosts", "2", "--json", environment=fault
    )
    assert (code, other) == (0, 0), err
    record = json.loads(out)
    assert "node-b" in record["suspect_hosts"]
    assert ("matmul rate", "host node-b, rank 1") in {(row["name"], row["where"]) for row in record["findings"]}
    assert record["measurements"]["pairs"][0]["bandwidth"] > 0
    assert silent == ""


def run_as_ranks(tmp_path, changes, size=None, options=()):
    """Processes with the variables of torchrun, one per host; returns the report of rank 0, and the exit codes.

    `changes` has, by rank, a function that changes the process before it starts.
    """
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    context = mp.get_context("fork")
    processes = []
    for rank, change in enumerate(changes):
        variables = {"RANK": rank, "WORLD_SIZE": size or len(changes), "LOCAL_RANK": 0, "MASTER_PORT": port}
        variables |= {"MASTER_ADDR": "localhost", "MESHWRIGHT_HOST_NAME": f"node-{rank}", "GLOO_SOCKET_IFNAME": "lo"}
        args = (variables, change, tmp_path, options)
        processes.append(context.Process(target=be_rank_of_torchrun, args=args))
        processes[-1].start()
    for process in processes:
        process.join(60)
        process.kill()
    output = (tmp_path / "out-0").read_text()
    return json.loads(output) if output else None, [process.exitcode for process in processes]


def be_rank_of_torchrun(variables, change, tmp_path, options):
    os.environ |= {name: str(value) for name, value in variables.items()}
    with (tmp_path / f"out-{variables['RANK']}").open("w") as out:
        os.dup2(out.fileno(), 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        change()
        try:
            main(["preflight", "--run", str(tmp_path / "run"), "--seconds", "1", "--json", *options])
            code = 0
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()
        os._exit(code)


def do_nothing():
    pass


def test_host_that_others_cannot_reach_is_broken(tmp_path):
    """The second host announces an address of a network that does not exist (RFC 5737)."""
    wrong = partial(os.environ.__setitem__, "MESHWRIGHT_HOST_ADDRESS", "192.0.2.1")
    record, codes = run_as_ranks(tmp_path, [do_nothing, wrong])
    assert codes == [8, 8]
    assert [(row["name"], row["where"]) for row in record["findings"]] == [("connections", "host node-1")]
    assert "192.0.2.1" in record["findings"][0]["found"]
    assert record["suspect_hosts"] == ["node-1"]


def test_host_with_another_torch_is_named_and_not_measured(tmp_path):
    other = partial(setattr, torch, "__version__", "2.12.0")
    record, codes = run_as_ranks(tmp_path, [do_nothing, other])
    assert codes == [2, 2]
    [finding] = record["findings"]
    assert (finding["name"], finding["where"], finding["found"]) == ("torch", "host node-1", "2.12.0")
    assert "cannot measure together" in record["remarks"][-1]
    assert record["measurements"]["pairs"] == []


def test_rank_that_does_not_join_is_broken(tmp_path):
    options = ["--launch.rendezvous_timeout=2", "--hosts", "3"]
    record, codes = run_as_ranks(tmp_path, [do_nothing, do_nothing], size=3, options=options)
    assert codes == [8, 8]
    assert ("ranks", "rank(s) 2") in {(row["name"], row["where"]) for row in record["findings"]}
    assert "did not join within 2 s" in record["remarks"][-1]


def test_ranks_of_one_host_and_several_axes(tmp_path):
    """Two hosts of two ranks: a group of the first ranks of the hosts, and groups within and across hosts."""
    config = load_config(overrides=["--layout.tensor=2", "--layout.replicate=2", "--launch.device=cpu"])
    [report, *_] = run_ranks(on_two_hosts, 4, config, tmp_path / "run")
    groups = {(group.axis, group.collective, group.ranks) for group in report.measurements.groups}
    within = {("tensor", name, ranks) for name in ("all_gather", "reduce_scatter") for ranks in ((0, 1), (2, 3))}
    assert groups == within | {("replicate", "all_reduce", (0, 2)), ("replicate", "all_reduce", (1, 3))}
    assert [rank.disk is not None for rank in report.measurements.ranks] == [True, False, True, False]


def on_two_hosts(world, config, folder):
    os.environ["MESHWRIGHT_HOST_NAME"] = f"node-{world.rank // 2}"
    return preflight_report(world, config, folder, 2, None, 1.0)


def test_command_prints_a_table_and_leaves_no_file(tmp_path, capsys):
    main(["preflight", "--run", str(tmp_path / "new" / "run"), "--seconds", "1", "--layout.replicate=2"])
    out = capsys.readouterr().out
    assert "1 host, 2 ranks" in out
    assert "matmul rate" in out
    assert not (tmp_path / "new").exists()


def test_function_returns_the_report(tmp_path):
    report = meshwright.preflight(small_config(ranks=1), run=tmp_path / "run", seconds=1)
    assert report.exit_code == 0
    assert len(report.measurements.ranks) == 1
    assert report.measurements.pairs == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "0.5"], "--seconds 0.5 is out of range"),
        (["--hosts", "2", "--ranks", "2"], "the hosts of a job share a secret"),
        (["--cluster", "h1000"], "cluster 'h1000' is unknown"),
    ],
)
def test_invalid_options_are_refused_before_ranks_start(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["preflight", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_text_names_the_finding_what_to_do_and_the_host_to_leave_out():
    console = Console(file=io.StringIO(), width=100)
    show_preflight(judge(slow_host(healthy_job(), "host-2")), console)
    text = console.file.getvalue()
    assert "slow  host host-2: host" in text
    assert "switch port of the host" in text
    assert "hosts to leave out: host-2" in text
    console = Console(file=io.StringIO(), width=100)
    show_preflight(judge(healthy_job()), console)
    assert "nothing is slow, broken or different" in console.file.getvalue()
