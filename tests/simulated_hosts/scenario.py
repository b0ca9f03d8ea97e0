"""The job and the cluster of a simulated schedule, drawn from its seed. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Scenario:
    """What a job looks like, and how fast the machines under it are. Times are seconds."""

    hosts: int = 3
    spares: int = 0
    min_hosts: int = 3
    ranks_per_host: int = 1
    host_timeout: float = 15.0
    form_timeout: float = 60.0
    hang_timeout: float = 60.0
    rendezvous_timeout: float = 60.0
    grace_period: float = 30.0
    observation: float = 6.0
    """How long the beat counter of a holder is observed."""
    grow: bool = True
    restarts: int = 1000
    """Restarts without progress after which the job gives up."""
    steps: int = 60
    step_seconds: float = 0.5
    checkpoint_every: int = 10
    start_seconds: float = 2.0
    """From the start of a rank to its rendezvous; each rank takes between half of it and all of it."""
    restore_seconds: float = 1.0
    write_seconds: float = 1.0
    publish_seconds: float = 0.5
    """The longest time between the check of the fence and the publication."""
    kill_seconds: float = 0.2
    """From a kill to the end of the process."""
    fail_seconds: float = 2.0
    """The longest time after which a rank notices that the process of a peer has ended."""
    latency: float = 0.002
    jitter: float = 0.002
    store_seconds: float = 0.02
    """The longest time of an operation of the store."""
    clock_rate: float = 0.01
    """How far the rate of a clock may be from 1."""
    supervisor_start_seconds: float = 2.0
    """From the start of a supervisor, or from its kill, to its first look at the lease."""

    poll_seconds: float = 0.0
    """How long a leader collects messages before it handles them; for many hosts."""

    @property
    def names(self) -> list[str]:
        return [f"h{index}" for index in range(self.hosts + self.spares)]


def draw_scenario(random: Random) -> Scenario:
    hosts = random.choice((2, 2, 3, 3, 4))
    min_hosts = hosts if random.random() < 0.5 else random.randint(1, hosts)
    host_timeout = random.choice((4.0, 6.0, 10.0, 15.0))
    return Scenario(
        hosts=hosts,
        spares=random.choice((0, 0, 1, 2)),
        min_hosts=min_hosts,
        ranks_per_host=random.choice((1, 2)),
        host_timeout=host_timeout,
        form_timeout=random.choice((20.0, 30.0)),
        hang_timeout=random.choice((15.0, 25.0)),
        rendezvous_timeout=20.0,
        grow=random.random() < 0.7,
        steps=random.choice((20, 30, 40)),
        step_seconds=random.uniform(0.2, 1.0),
        checkpoint_every=random.choice((2, 5, 8)),
        start_seconds=random.uniform(0.2, 3.0),
        restore_seconds=random.uniform(0.0, 2.0),
        write_seconds=random.uniform(0.0, 3.0),
        publish_seconds=random.choice((0.05, 0.5, 3.0)),
        kill_seconds=random.choice((0.02, 0.3)),
        fail_seconds=random.choice((0.2, 3.0)),
        latency=random.choice((0.0005, 0.01, 0.1)),
        jitter=random.choice((0.0005, 0.01, 0.2)),
        store_seconds=random.choice((0.005, 0.05, 0.5)),
        supervisor_start_seconds=random.uniform(0.5, 4.0),
    )
