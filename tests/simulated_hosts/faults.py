"""Faults of hosts, network and store. Each one strikes at its time and heals by itself. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from meshwright.base.records.failures import Failure
from tests.simulated_hosts.cluster import HostCluster
from tests.simulated_hosts.network import Path
from tests.simulated_hosts.training import NOW

Heal = Callable[[], None]


def draw_seconds(cluster: HostCluster, random: Random) -> float:
    """How long a fault lasts: briefly, about as long as the timeouts, or longer than all of them."""
    timeout = cluster.scenario.host_timeout
    low, high = random.choice(((0.1, 2.0), (0.4 * timeout, 0.8 * timeout), (0.8 * timeout, 2.0 * timeout)))
    return random.uniform(low, high)


def draw_host(cluster: HostCluster, random: Random) -> str:
    """A host; often the one that leads, because it matters most."""
    leader = cluster.leader
    return leader.host if leader is not None and random.random() < 0.4 else random.choice(sorted(cluster.hosts))


def lose_power(cluster: HostCluster, random: Random) -> Heal:
    name = draw_host(cluster, random)
    cluster.power_off(name)

    def heal() -> None:
        cluster.power_on(name)
        cluster.start_supervisor(name)

    return heal


def kill_supervisor(cluster: HostCluster, random: Random) -> Heal:
    name = draw_host(cluster, random)
    cluster.kill_supervisor(name)
    return lambda: cluster.start_supervisor(name)


def restart_half(cluster: HostCluster, random: Random) -> Heal:
    names = random.sample(sorted(cluster.hosts), max(1, len(cluster.hosts) // 2))
    for name in names:
        cluster.kill_supervisor(name)

    def heal() -> None:
        for name in names:
            cluster.start_supervisor(name)

    return heal


def kill_leader_at_instant(cluster: HostCluster, random: Random) -> Heal:
    """Kills the leader between two messages, or between two operations of the store."""
    cluster.kill_at_instants.add(cluster.instants + random.randint(1, 60))

    def heal() -> None:
        cluster.kill_at_instants.clear()
        for name in cluster.hosts:
            cluster.start_supervisor(name)

    return heal


def crash_rank(cluster: HostCluster, random: Random) -> Heal:
    ranks = cluster.hosts[draw_host(cluster, random)].ranks
    if ranks is not None:
        ranks.end(Failure(ranks.placement.first_rank, "Killed", "was killed by signal 9 (SIGKILL)", 8, NOW))
    return lambda: None


def hang_rank(cluster: HostCluster, random: Random) -> Heal:
    ranks = cluster.hosts[draw_host(cluster, random)].ranks
    if ranks is not None and ranks.runs and ranks.group.formed and not ranks.group.finishing:
        ranks.group.hung = True
    return lambda: None


def cut_paths(cluster: HostCluster, paths: list[Path]) -> Heal:
    for path in paths:
        cluster.network.cut_path(path)

    def heal() -> None:
        for path in paths:
            cluster.network.restore_path(path)

    return heal


def partition(cluster: HostCluster, random: Random) -> Heal:
    """Separates some hosts from the others, in both directions."""
    names = sorted(cluster.hosts)
    side = set(random.sample(names, random.randint(1, len(names) - 1)))
    return cut_paths(cluster, [(a, b) for a in names for b in names if (a in side) != (b in side)])


def partition_one_way(cluster: HostCluster, random: Random) -> Heal:
    """A host can send and not receive, or the reverse."""
    name, sends = draw_host(cluster, random), random.random() < 0.5
    others = [other for other in sorted(cluster.hosts) if other != name]
    return cut_paths(cluster, [(other, name) if sends else (name, other) for other in others])


def cut_one_path(cluster: HostCluster, random: Random) -> Heal:
    sender, receiver = random.sample(sorted(cluster.hosts), 2)
    return cut_paths(cluster, [(sender, receiver)])


def delay_messages(cluster: HostCluster, random: Random) -> Heal:
    name, seconds = draw_host(cluster, random), random.uniform(0.2, 0.8 * cluster.scenario.host_timeout)
    paths = [path for other in sorted(cluster.hosts) if other != name for path in ((name, other), (other, name))]
    for path in paths:
        cluster.network.extra[path] = seconds

    def heal() -> None:
        for path in paths:
            cluster.network.extra.pop(path, None)

    return heal


def cut_store(cluster: HostCluster, names: list[str]) -> Heal:
    for name in names:
        cluster.store.unavailable[name] = cluster.store.unavailable.get(name, 0) + 1
        cluster.hosts[name].without_store_until = float("inf")

    def heal() -> None:
        for name in names:
            cluster.store.unavailable[name] -= 1
            if not cluster.store.unavailable[name]:
                del cluster.store.unavailable[name]
                cluster.hosts[name].without_store_until = cluster.loop.now + 1.0

    return heal


def separate_from_store(cluster: HostCluster, random: Random) -> Heal:
    return cut_store(cluster, [draw_host(cluster, random)])


def store_outage(cluster: HostCluster, _random: Random) -> Heal:
    return cut_store(cluster, sorted(cluster.hosts))


def pause_processes(cluster: HostCluster, random: Random) -> Heal:
    supervisor, ranks = random.choice(((True, False), (False, True), (True, True)))
    return cluster.pause(draw_host(cluster, random), supervisor, ranks)


def break_connection(cluster: HostCluster, random: Random) -> Heal:
    """A connection breaks: both ends learn of it, one end, or none."""
    ends = [end for end in cluster.network.ends if end.open and end.peer.open]
    if ends:
        random.choice(ends).break_(random.random() < 0.5, random.random() < 0.5)
    return lambda: None


def end_slowly(cluster: HostCluster, random: Random) -> Heal:
    """Killed processes of a host take long to end, as they do while a device or a file system does not answer."""
    host = cluster.hosts[draw_host(cluster, random)]
    host.slow_kill = random.uniform(0.5, 2.0 * cluster.scenario.host_timeout)
    host.disturbed_until = float("inf")
    kill_supervisor = cluster.loop.random.random() < 0.3
    if not kill_supervisor and host.ranks is not None:
        host.ranks.end(Failure(host.ranks.placement.first_rank, "Killed", "was killed (SIGKILL)", 8, NOW))

    def heal() -> None:
        host.disturbed_until = cluster.loop.now + host.slow_kill
        host.slow_kill = 0.0

    return heal


def pause_before_publication(cluster: HostCluster, random: Random) -> Heal:
    """The host of rank 0 stops between the check of the fence and the publication, often until others take over."""
    scenario = cluster.scenario
    cluster.pause_before_publication = random.uniform(1.0, 2.0 * (scenario.host_timeout + scenario.observation))

    def heal() -> None:
        cluster.pause_before_publication = 0.0

    return heal


FAULTS: dict[str, Callable[[HostCluster, Random], Heal]] = {
    "lose power": lose_power,
    "kill supervisor": kill_supervisor,
    "restart half": restart_half,
    "kill leader at an instant": kill_leader_at_instant,
    "crash rank": crash_rank,
    "hang rank": hang_rank,
    "partition": partition,
    "partition one way": partition_one_way,
    "cut one path": cut_one_path,
    "delay messages": delay_messages,
    "separate from store": separate_from_store,
    "store outage": store_outage,
    "pause": pause_processes,
    "pause before publication": pause_before_publication,
    "break connection": break_connection,
    "end slowly": end_slowly,
}
"""All faults that heal, by name."""
