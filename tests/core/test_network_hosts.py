"""Tests of the hosts that are made of network namespaces, and of the faults between them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from meshwright.base.records.heartbeat import process_stat
from tests.kit.host_namespaces import PREFIX, folder_of, ip, namespaces
from tests.kit.network_hosts import NetworkHosts, remove_stale, require_network_hosts

ROOT = Path(__file__).parents[2]
SILENCE = 0.3
"""Seconds after which a datagram that has not arrived does not arrive: undisturbed ones take microseconds."""
TIMEOUT = 20.0


@pytest.fixture(scope="module")
def shared_network():
    require_network_hosts()
    with NetworkHosts(3) as network:
        yield network


@pytest.fixture
def network(shared_network):
    """Three hosts without faults and processes."""
    yield shared_network
    shared_network.heal()
    for host in shared_network:
        shared_network.limit(host, None)
        host.power_on()
        host.kill()


def arrives(source, target, wait: float = TIMEOUT) -> bool:
    """Whether a datagram of the source reaches the target."""
    with target.socket(socket.SOCK_DGRAM) as receiver, source.socket(socket.SOCK_DGRAM) as sender:
        receiver.bind((target.address, 0))
        receiver.settimeout(wait)
        sender.sendto(b"datagram", receiver.getsockname())
        try:
            return receiver.recv(100) == b"datagram"
        except TimeoutError:
            return False


def is_dropped(source, target) -> bool:
    return not arrives(source, target, wait=SILENCE)


@contextmanager
def connection(source, target):
    """The two ends of a TCP connection."""
    with ExitStack() as sockets:
        server = sockets.enter_context(target.socket())
        server.bind((target.address, 0))
        server.listen()
        client = sockets.enter_context(source.socket())
        client.settimeout(TIMEOUT)
        server.settimeout(TIMEOUT)
        client.connect(server.getsockname())
        accepted = sockets.enter_context(server.accept()[0])
        accepted.settimeout(TIMEOUT)
        yield client, accepted


def transfer_seconds(source, target, size: int) -> float:
    with connection(source, target) as (client, accepted):

        def send() -> None:
            with suppress(OSError):  # the assertion below reports what has not arrived
                client.sendall(bytes(size))

        thread = threading.Thread(target=send)
        start = time.monotonic()
        thread.start()
        received = 0
        while received < size and (block := accepted.recv(1 << 20)):
            received += len(block)
        seconds = time.monotonic() - start
        thread.join()
        assert received == size
    return seconds


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def ticks(host, **options) -> subprocess.Popen:
    """A process that writes a byte every 10 ms."""
    code = "import os, time\nwhile True: os.write(1, b'.'); time.sleep(0.01)"
    return host.run(python(code), stdout=subprocess.PIPE, bufsize=0, **options)


def test_every_host_reaches_every_other_host(network):
    assert all(arrives(source, target) for source in network for target in network)


def test_a_process_knows_the_name_the_address_and_the_boot_id_of_its_host(network):
    code = (
        "import os, socket\n"
        "print(socket.gethostname(), socket.gethostbyname(socket.gethostname()), socket.gethostbyname('host2'))\n"
        "print(os.environ['MESHWRIGHT_HOST_NAME'], os.environ['MESHWRIGHT_HOST_ADDRESS'], os.environ['EXTRA'])\n"
        "print(open('/proc/sys/kernel/random/boot_id').read())\n"
    )
    boots = set()
    for host in network:
        first, second, boot = host.output(python(code), env={"EXTRA": "extra"}).split("\n")[:3]
        assert first.split() == [host.name, host.address, network[2].address]
        assert second.split() == [host.name, host.address, "extra"]
        boots.add(boot)
    with open("/proc/sys/kernel/random/boot_id") as file:
        boots.add(file.read().strip())
    assert len(boots) == 4
    assert socket.gethostname() != "host2"


def test_started_process_has_the_pid_of_its_popen(network):
    with network[0].run(python("import os; print(os.getpid())"), stdout=subprocess.PIPE, text=True) as process:
        assert int(process.communicate(timeout=TIMEOUT)[0]) == process.pid


def test_partition_drops_both_directions_until_healed(network):
    network.partition(network[0], network[1])
    assert is_dropped(network[0], network[1])
    assert is_dropped(network[1], network[0])
    assert arrives(network[0], network[2])
    assert arrives(network[2], network[1])
    network.heal()
    assert arrives(network[0], network[1])
    assert arrives(network[1], network[0])


def test_partition_of_groups_leaves_the_links_within_a_group(network):
    network.partition(network[0], network.hosts[1:])
    assert is_dropped(network[0], network[1])
    assert is_dropped(network[2], network[0])
    assert arrives(network[1], network[2])


def test_cut_drops_one_direction_only(network):
    network.cut(network[0], network[1])
    assert is_dropped(network[0], network[1])
    assert arrives(network[1], network[0])


def test_one_way_cut_leaves_the_other_direction_to_hosts_that_have_not_yet_resolved_an_address():
    require_network_hosts()
    with NetworkHosts(2) as fresh:
        fresh.cut(fresh[0], fresh[1])
        assert arrives(fresh[1], fresh[0])
        assert is_dropped(fresh[0], fresh[1])


def test_isolated_host_reaches_only_itself(network):
    network.isolate(network[1])
    for other in (network[0], network[2]):
        assert is_dropped(network[1], other)
        assert is_dropped(other, network[1])
    assert arrives(network[1], network[1])
    assert arrives(network[0], network[2])


def test_partition_interrupts_an_existing_connection_and_healing_continues_it(network):
    with connection(network[0], network[1]) as (client, accepted):
        client.sendall(b"before")
        assert accepted.recv(100) == b"before"
        network.partition(network[0], network[1])
        client.sendall(b"during")
        accepted.settimeout(SILENCE)
        with pytest.raises(TimeoutError):
            accepted.recv(100)
        network.heal()
        accepted.settimeout(TIMEOUT)
        assert accepted.recv(100) == b"during"


def test_limit_slows_both_directions_of_one_host(network):
    size = 1 << 20
    network.limit(network[0], 10)
    network.limit(network[1], 80)
    # The ratio of the rates is 8; a busy machine makes the faster transfer slower.
    faster = transfer_seconds(network[1], network[2], size)
    sent = transfer_seconds(network[0], network[2], size)
    received = transfer_seconds(network[2], network[0], size)
    assert min(sent, received) > 2 * faster
    network.limit(network[0], None)
    assert transfer_seconds(network[0], network[2], size) < sent / 2


def test_degraded_link_delays_one_direction(network):
    delay = 0.4
    network.degrade(network[0], network[1], delay=delay)
    with connection(network[0], network[1]) as (client, accepted):
        start = time.monotonic()
        client.sendall(b"delayed")
        assert accepted.recv(100) == b"delayed"
        assert time.monotonic() - start >= delay
        start = time.monotonic()
        accepted.sendall(b"at once")
        assert client.recv(100) == b"at once"
        assert time.monotonic() - start < delay
    network.heal()
    with connection(network[0], network[1]) as (client, accepted):
        start = time.monotonic()
        client.sendall(b"healed")
        assert accepted.recv(100) == b"healed"
        assert time.monotonic() - start < delay


def received_datagrams(source, target, count: int) -> list[int]:
    with target.socket(socket.SOCK_DGRAM) as receiver, source.socket(socket.SOCK_DGRAM) as sender:
        receiver.bind((target.address, 0))
        receiver.settimeout(SILENCE)
        for number in range(count):
            sender.sendto(number.to_bytes(4, "little"), receiver.getsockname())
        numbers = []
        with suppress(TimeoutError):
            while True:
                numbers.append(int.from_bytes(receiver.recv(100), "little"))
        return numbers


def test_lossy_link_loses_the_datagrams_of_its_seed_and_tcp_repairs_its_losses():
    require_network_hosts()
    with NetworkHosts(2) as network:  # its own: frames of other tests would take random numbers of the seed
        source, target = network
        assert received_datagrams(source, target, 200) == list(range(200))
        received = []
        for seed in (1, 1, 2):
            network.degrade(source, target, loss=0.3, seed=seed)
            received.append(received_datagrams(source, target, 200))
        first, again, other = received
        assert first == again != other
        assert 0.5 * 200 < len(first) < 0.9 * 200
        network.degrade(source, target, loss=0.05, seed=3)
        transfer_seconds(source, target, 1 << 20)


def test_cut_of_a_degraded_link_drops_everything(network):
    network.degrade(network[0], network[1], delay=0.01)
    assert arrives(network[0], network[1])
    network.cut(network[0], network[1])
    assert is_dropped(network[0], network[1])


def test_kill_ends_all_processes_of_a_host_and_no_others(network):
    here = [network[0].run(["sh", "-c", "sleep 60 & sleep 60"]) for _ in range(2)]
    there = network[1].run(["sleep", "60"])
    network[0].kill()
    assert network[0].processes() == []
    assert [process.wait(TIMEOUT) for process in here] == [-signal.SIGKILL] * 2
    assert there.poll() is None


def test_stopped_host_continues_where_it_was(network):
    with ticks(network[0]) as process:
        assert os.read(process.stdout.fileno(), 1) == b"."
        network[0].stop()
        assert process_stat(process.pid)["state"] == "T"
        os.set_blocking(process.stdout.fileno(), False)
        with suppress(BlockingIOError):
            while os.read(process.stdout.fileno(), 1 << 16):
                pass
        time.sleep(0.1)
        with pytest.raises(BlockingIOError):
            os.read(process.stdout.fileno(), 1)
        os.set_blocking(process.stdout.fileno(), True)
        network[0].resume()
        assert os.read(process.stdout.fileno(), 1) == b"."
        network[0].kill()


def test_peers_of_killed_processes_see_the_end_and_those_of_a_powered_off_host_do_not(network):
    code = (
        "import socket, sys, time\n"
        "client = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "client.sendall(b'here')\n"
        "time.sleep(60)\n"
    )
    for end in (network[0].kill, network[0].power_off):
        with network[1].socket() as server:
            server.bind((network[1].address, 0))
            server.listen()
            server.settimeout(TIMEOUT)
            process = network[0].run([*python(code), network[1].address, str(server.getsockname()[1])])
            with server.accept()[0] as accepted:
                accepted.settimeout(TIMEOUT)
                assert accepted.recv(100) == b"here"
                end()
                assert process.wait(TIMEOUT) == -signal.SIGKILL
                if network[0].is_on:
                    assert accepted.recv(100) == b""
                else:
                    accepted.settimeout(SILENCE)
                    with pytest.raises(TimeoutError):
                        accepted.recv(100)


def test_powered_off_host_boots_again_with_its_address_its_faults_and_another_boot_id(network):
    boot = ["cat", "/proc/sys/kernel/random/boot_id"]
    before = network[0].output(boot)
    network.cut(network[0], network[1])
    network.degrade(network[2], network[0], delay=0.01)
    network[0].power_off()
    with pytest.raises(RuntimeError, match="host0 is powered off"):
        network[0].run(["true"])
    network[0].power_on()
    assert network[0].output(boot) != before
    assert is_dropped(network[0], network[1])
    assert arrives(network[1], network[0])
    assert arrives(network[2], network[0])


def traces(name: str) -> list[str]:
    return [*(entry for entry in namespaces() if entry.startswith(name)), *([name] if folder_of(name).exists() else [])]


def test_two_networks_exist_at_once_and_leave_nothing_behind():
    require_network_hosts()
    links = ip("-brief", "link")
    with NetworkHosts(2) as first, NetworkHosts(2) as second:
        second.partition(*second)
        first.degrade(first[0], first[1], delay=0.001)
        second[0].power_off()
        assert arrives(*first)
        pids = [host.run(["sleep", "60"]).pid for host in (first[0], first[1], second[1])]
        pids.append(first.relay.pid)
        assert ip("-brief", "link") == links
    assert traces(first.name) == traces(second.name) == []
    assert [process_stat(pid) for pid in pids] == [{}] * 4


def test_a_failure_in_the_context_or_while_hosts_are_made_leaves_nothing_behind(monkeypatch):
    require_network_hosts()
    network = NetworkHosts(2)
    processes = []

    def interrupted() -> None:
        with network:
            processes.append(network[0].run(["sleep", "60"]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert processes[0].poll() == -signal.SIGKILL
    assert traces(network.name) == []
    network = NetworkHosts(2)
    monkeypatch.setattr(network[1], "mac", "wrong")
    with pytest.raises(RuntimeError, match="invalid lladdr"):
        network.__enter__()
    assert traces(network.name) == []


def test_namespaces_of_a_killed_process_are_removed_and_those_of_this_one_are_not(network):
    code = (
        "import os, signal\n"
        "from tests.kit.network_hosts import NetworkHosts\n"
        "with NetworkHosts(2) as network:\n"
        "    sleeper = network[0].run(['sleep', '60'], stdout=-3)\n"
        "    network.degrade(network[0], network[1], delay=0.001)\n"
        "    print(network.name, sleeper.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == -signal.SIGKILL
    name, pid = done.stdout.decode().split()
    assert name.startswith(PREFIX)
    assert len(traces(name)) == 4
    assert process_stat(int(pid))
    assert {entry for entry in remove_stale() if entry.startswith(name)} == {
        name,
        f"{name}-0",
        f"{name}-1",
        f"{name}-switch",
    }
    assert traces(name) == []
    assert not process_stat(int(pid))
    assert len(traces(network.name)) == 5
