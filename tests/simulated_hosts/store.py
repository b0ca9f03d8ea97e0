"""The virtual store that all hosts share: leases, beat counters, incidents and checkpoints. Torch-free.

Which checkpoints count is decided by the real fence (`AttemptFence`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from meshwright.base.checkpoint.listing import AttemptFence, CheckpointEntry, checkpoint_folder
from meshwright.base.checkpoint.manifest import Manifest
from meshwright.base.records.incidents import Incident
from meshwright.base.store.interface import Store
from meshwright.core.recover.hosts.election import LeaseView
from tests.simulated_hosts.events import EventLoop


@dataclass(frozen=True)
class StoredLease:
    """A lease as it is published."""

    attempt: int
    restart: int
    token: str
    host: str
    job: str
    address: str
    inherited: dict[str, str]
    time: float
    """When it was published (virtual time)."""
    listed: float = 0.0
    """When its holder listed the checkpoints that it inherits."""


@dataclass(frozen=True)
class SimulatedManifest:
    """What the simulation needs of a manifest."""

    digest: str
    parent: str
    first_step: int
    """The step of the parent: the samples of the steps since then belong to this checkpoint."""
    step: int
    time: float
    """When it was published (virtual time)."""


@dataclass
class SharedStore:
    """The content of the store. Each publication is atomic, and happens once."""

    loop: EventLoop
    leases: list[StoredLease] = field(default_factory=list)
    beats: dict[int, int] = field(default_factory=dict)
    incidents: dict[int, Incident] = field(default_factory=dict)
    checkpoints: list[CheckpointEntry] = field(default_factory=list)
    unavailable: dict[str, int] = field(default_factory=dict)
    """How many faults separate each host from the store."""
    too_few_hosts: list[float] = field(default_factory=list)
    on_change: list[Callable[[], None]] = field(default_factory=list)
    """Called after every publication."""

    @property
    def too_few_hosts_at(self) -> float | None:
        """When a leader first gave up because too few hosts had joined."""
        return self.too_few_hosts[0] if self.too_few_hosts else None

    def is_available(self, host: str) -> bool:
        return host not in self.unavailable

    @property
    def newest(self) -> StoredLease | None:
        return self.leases[-1] if self.leases else None

    def view_newest_lease(self) -> LeaseView | None:
        """As `recover.lease.view_newest_lease`."""
        if (lease := self.newest) is None:
            return None
        outcome, exit_code, final = "", 0, False
        if (incident := self.incidents.get(lease.attempt)) is not None:
            outcome, exit_code, final = incident.outcome, incident.job_exit_code, incident.ends_job
        beats = self.beats.get(lease.attempt, "")
        return LeaseView(lease.attempt, lease.token, lease.job, lease.address, beats, outcome, exit_code, final)

    def inherited(self) -> dict[str, str]:
        """As `recover.lease.publish_if_free` records it."""
        return {entry.name: entry.manifest.digest for entry in self.list_published() if entry.manifest is not None}

    def publish_lease(self, lease: StoredLease) -> bool:
        """Publishes a lease unless its attempt has one."""
        if any(known.attempt == lease.attempt for known in self.leases):
            return False
        self.leases.append(lease)
        self.loop.note(lease.host, f"takes the lease of attempt {lease.attempt}, inherits {len(lease.inherited)}")
        self._changed()
        return True

    def fence(self) -> AttemptFence:
        """As `checkpoint.listing.read_fence`."""
        newest = self.newest
        return AttemptFence(newest.attempt, newest.inherited) if newest is not None else AttemptFence(0, {})

    def list_published(self) -> list[CheckpointEntry]:
        """As `checkpoint.listing.list_published`: newest first, without those that are fenced off."""
        fence = self.fence()
        admitted = [entry for entry in self.checkpoints if fence.admits(entry)]
        return sorted(admitted, key=lambda entry: (entry.step, entry.attempt), reverse=True)

    def publish_checkpoint(self, attempt: int, step: int, parent: str, first_step: int) -> str | None:
        """Publishes a manifest unless it exists; returns its digest."""
        folder = checkpoint_folder(step, attempt)
        if any(entry.folder == folder for entry in self.checkpoints):
            return None
        digest = f"{step}.{attempt}.{len(self.checkpoints)}"
        manifest = SimulatedManifest(digest, parent, first_step, step, self.loop.now)
        nowhere, content = cast(Store, None), cast(Manifest, manifest)
        self.checkpoints.append(CheckpointEntry(nowhere, folder, step, attempt, content))
        self.loop.note(f"attempt {attempt}", f"publishes the checkpoint of step {step}")
        self._changed()
        return digest

    def write_incident(self, incident: Incident) -> None:
        self.incidents[incident.attempt] = incident
        if "host(s) are ready" in incident.message:
            self.too_few_hosts.append(self.loop.now)
        self.loop.note(f"attempt {incident.attempt}", f"{incident.outcome} {incident.exit_code} {incident.message}")
        self._changed()

    def _changed(self) -> None:
        for call in self.on_change:
            call()


def manifest_of(entry: CheckpointEntry) -> SimulatedManifest:
    content: Any = entry.manifest
    return cast(SimulatedManifest, content)
