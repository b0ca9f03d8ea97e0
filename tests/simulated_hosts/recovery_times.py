"""How long many hosts take to notice that one is lost, and to run again: the real protocol, without faults beside it.
Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.simulated_hosts.cluster import HostCluster
from tests.simulated_hosts.events import EventLoop
from tests.simulated_hosts.scenario import Scenario

LOST, LEADS = "member", "leader"
"""Which host loses its power."""


@dataclass(frozen=True)
class RecoveryTimes:
    """Seconds of virtual time after a host has lost its power."""

    detected: float
    """The attempt is over, or another host has the lease."""
    started: float
    """The ranks of the next attempt run on every host."""
    messages: int


def measure_recovery(hosts: int, lost: str, scenario: Scenario, seed: int = 0) -> RecoveryTimes:
    """Takes the power from one of `hosts` hosts (one more is a spare) while they train."""
    scenario = replace(scenario, hosts=hosts, min_hosts=hosts, spares=1, steps=10**9, checkpoint_every=10**9)
    loop = EventLoop(seed)
    loop.max_events = float("inf")
    cluster = HostCluster(scenario, loop)
    for name in scenario.names:
        cluster.start_supervisor(name)
    limit = 10_000.0
    loop.run(limit, lambda: 1 in cluster.restored_at)
    first, leader = cluster.store.leases[0], cluster.leader
    group = cluster.group_of(1)
    assert leader is not None
    assert group is not None
    others = [name for name in group.placement.hosts if name != leader.host]
    victim = others[0] if lost == LOST and others else leader.host
    loop.run(loop.now + loop.random.uniform(1.0, 2.0), lambda: False)
    violations = cluster.invariants.violations
    assert not violations, violations[0]
    lost_at, sent = loop.now, cluster.network.messages
    cluster.power_off(victim)
    loop.run(limit, lambda: len(cluster.store.leases) > 1)
    detected = loop.now - lost_at

    def newer() -> bool:
        return any(attempt > first.attempt for attempt in cluster.restored_at)

    loop.run(limit, newer)
    assert newer(), f"{hosts} hosts do not train again after {limit:.0f} s"
    started = cluster.started_at[max(cluster.restored_at)] - lost_at
    return RecoveryTimes(detected, started, cluster.network.messages - sent)
