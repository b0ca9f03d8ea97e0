"""Jobs on several hosts under faults: the run ends with the bits of an undisturbed one, and incidents name the host."""

from __future__ import annotations

import signal
import time

import pytest

from tests.core.recover.hosts.host_jobs import HOST_TIMEOUT, HostJob, golden_run
from tests.kit.host_namespaces import require_network_hosts
from tests.kit.network_hosts import Host, NetworkHosts

RANKS = 2
long = pytest.mark.long
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def _allowed():
    require_network_hosts()


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return golden_run(tmp_path_factory.mktemp("golden") / "run", RANKS)


@pytest.fixture
def network():
    with NetworkHosts(3, resolves_names=False) as network:
        yield network


@pytest.fixture
def job(network, tmp_path):
    """Two hosts with a rank each, and a spare."""
    return HostJob(network, tmp_path / "run", 2, RANKS)


def others(network: NetworkHosts, *hosts: Host) -> list[Host]:
    return [host for host in network if host not in hosts]


@pytest.mark.parametrize("role", ["member", pytest.param("leader", marks=long)])
def test_spare_replaces_a_killed_host_and_the_run_ends_bit_for_bit(network, job, golden, role):
    victim = job.start(*network).wait_for_host(role)
    victim.kill()
    assert job.finish(*others(network, victim)) == [0, 0]
    job.judge(golden)
    lost = job.incidents()[0]
    assert lost.host == victim.name
    if role == "member":
        assert (lost.outcome, lost.rank, lost.error_type) == ("failed", 1, "HostLost")
        assert f"host {victim.name} (rank 1) is lost: its connection has ended" in lost.message


@pytest.mark.parametrize("role", [pytest.param("member", marks=long), "leader"])
def test_host_without_power_is_found_by_its_silence(network, job, golden, role):
    victim = job.start(*network).wait_for_host(role)
    victim.power_off()
    began = time.monotonic()
    job.wait_until(lambda: job.attempts() > 1, 60)
    assert time.monotonic() - began < 5 * HOST_TIMEOUT
    assert job.finish(*others(network, victim)) == [0, 0]
    job.judge(golden)
    assert job.incidents()[0].host == victim.name


@pytest.mark.parametrize("role", ["leader", pytest.param("member", marks=long)])
def test_isolated_host_is_replaced_and_returns_when_the_partition_heals(network, job, golden, role):
    victim = job.start(*network).wait_for_host(role)
    network.isolate(victim)
    job.wait_until(lambda: job.attempts() > 1 and job.steps_in_attempt(job.attempts()) > 2)
    network.heal()
    assert job.finish(*network) == [0, 0, 0]
    job.judge(golden)


@long
@pytest.mark.parametrize("direction", ["to the leader", "from the leader"])
def test_host_with_a_link_that_is_cut_one_way_is_replaced(network, job, golden, direction):
    victim = job.start(*network).wait_for_host("member")
    leader = job.leader()
    network.cut(*((victim, leader) if direction == "to the leader" else (leader, victim)))
    job.wait_until(lambda: job.attempts() > 1 and job.steps_in_attempt(job.attempts()) > 2)
    network.heal()
    assert job.finish(*network) == [0, 0, 0]
    job.judge(golden)


@long
@pytest.mark.parametrize("role", ["leader", "member"])
def test_stopped_host_that_continues_with_an_old_attempt_is_fenced(network, job, golden, role):
    victim = job.start(*network).wait_for_host(role)
    victim.stop()
    job.wait_until(lambda: job.attempts() > 1 and job.steps_in_attempt(job.attempts()) > 2)
    victim.resume()
    assert job.finish(*network) == [0, 0, 0]
    job.judge(golden)


@long
def test_half_of_the_supervisors_are_started_again(network, job, golden):
    victim = job.start(*network).wait_for_host("member")
    victim.kill()
    spare = next(host for host in others(network, victim) if host is not job.leader())
    spare.kill()
    job.start(victim, spare)
    assert job.finish(*network) == [0, 0, 0]
    job.judge(golden)


@long
def test_every_host_is_killed_and_the_same_command_resumes(network, job, golden):
    job.start(*network).wait_for_host("leader")
    for host in network:
        host.kill()
    assert job.start(*network).finish(*network) == [0, 0, 0]
    job.judge(golden)


@long
def test_delay_and_loss_change_nothing_but_the_time(network, job, golden):
    for one in network:
        for other in others(network, one):
            network.degrade(one, other, delay=0.02, loss=0.01, seed=7)
    assert job.start(*network).finish(*network, seconds=200) == [0, 0, 0]
    job.judge(golden)
    assert job.attempts() == 1


@long
def test_signal_to_one_host_stops_all_after_a_checkpoint_and_the_job_resumes(network, job, golden):
    victim = job.start(*network).wait_for_host("member")
    job.supervisors[victim.name].send_signal(signal.SIGTERM)
    assert job.finish(*network) == [143, 143, 143]
    stopped = job.incidents()[-1]
    assert (stopped.outcome, stopped.exit_code) == ("stopped", 143)
    done = job.steps_done()
    assert stopped.checkpoint_step == done
    job.use_secret("another secret for another job")
    assert job.start(*network).finish(*network) == [0, 0, 0]
    job.judge(golden)


@long
def test_job_shrinks_to_fewer_hosts_and_grows_when_one_returns(network, tmp_path, golden):
    job = HostJob(network, tmp_path / "run", 2, RANKS, "--launch.min_hosts=1")
    one, other = network[0], network[1]
    victim = job.start(one, other).wait_for_host("member")
    victim.kill()
    job.wait_until(lambda: job.attempts() > 1 and job.steps_in_attempt(2) > 2)
    job.start(victim)
    assert job.finish(one, other) == [0, 0]
    assert [incident.outcome for incident in job.incidents()] == ["failed", "resized", "complete"]
    job.judge_samples(golden)


@long
def test_job_that_cannot_continue_says_which_hosts_are_there(network, tmp_path):
    job = HostJob(network, tmp_path / "run", 2, RANKS, "--launch.rendezvous_timeout=8")
    one, other = network[0], network[1]
    victim = job.start(one, other).wait_for_host("member")
    rest = one if victim is other else other
    victim.kill()
    assert job.finish(rest) == [8]
    assert f"1 of 2 host(s) are ready ({rest.name})" in job.log(rest)


@long
def test_second_job_in_the_same_run_folder_is_refused(network, job, golden):
    job.start(network[0], network[1]).wait_for_host("leader")
    second = HostJob(network, job.folder.root, 2, RANKS)
    second.use_secret("another secret for another job")
    assert second.start(network[2]).finish(network[2]) == [9]
    assert "is held by process" in second.log(network[2])
    assert job.finish(network[0], network[1]) == [0, 0]
    job.judge(golden)


@long
def test_four_hosts_of_two_ranks_survive_the_loss_of_two(tmp_path, tmp_path_factory):
    golden = golden_run(tmp_path_factory.mktemp("golden") / "run", 8)
    with NetworkHosts(6, resolves_names=False) as network:
        job = HostJob(network, tmp_path / "run", 4, 8)
        job.start(*network).wait_for_host("leader").power_off()
        job.wait_until(lambda: job.attempts() > 1 and job.steps_in_attempt(job.attempts()) > 2)
        victim = job.wait_for_host("member")
        victim.kill()
        alive = [host for host in network if host.name not in {incident.host for incident in job.incidents()}]
        alive = [host for host in alive if host is not victim]
        assert set(job.finish(*alive, seconds=200)) == {0}
        job.judge(golden)
