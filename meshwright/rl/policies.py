"""The policies that a learner publishes: the parameters of every version as a checkpoint in RUN/policies.

A policy comes into existence with its manifest, as every checkpoint does: a reader sees a complete policy or none. The
attempt in the name of the checkpoint is the timeline of the version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import torch

from meshwright.base.block_sizes import BLOCK_SIZES, BlockSizes
from meshwright.base.checkpoint.listing import (
    CHECKPOINTS_FOLDER,
    NAME_PATTERN,
    CheckpointEntry,
    RunLineage,
    checkpoint_folder,
    read_entry,
)
from meshwright.base.checkpoint.manifest import MANIFEST_FILE
from meshwright.base.config import CheckpointConfig
from meshwright.base.config.rl import RLConfig
from meshwright.base.io import sync_folder
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.interface import Store
from meshwright.base.store.object_store import ObjectStore
from meshwright.base.store.posix import PosixCalls, PosixStore
from meshwright.base.topology.layout import Layout
from meshwright.core import faults
from meshwright.core.checkpoint.retention import RetentionPolicy
from meshwright.core.checkpoint.saver import CheckpointMetadata, CheckpointSaver
from meshwright.core.checkpoint.state import CheckpointState
from meshwright.core.checkpoint.verify import find_damage
from meshwright.core.generate.load import check_base, from_bits, named_tensors
from meshwright.core.parallel.world import World
from meshwright.core.weights.checkpoint_tensors import CheckpointTensors
from meshwright.errors import CheckpointError
from meshwright.rl.generator.policy_model import PolicyModel
from meshwright.rl.version import PolicyVersion

POLICIES_FOLDER = "policies"


class PolicyUnavailable(CheckpointError):
    """A policy version is not published, or no longer."""


class DamagedPolicy(CheckpointError):
    """A published policy is not, byte for byte, what the learner has written, or does not fit the model."""


class UnsyncedCalls(PosixCalls):
    """System calls without fsync: a file outlives its process, and may be lost with the power of the machine."""

    def sync(self, file: int) -> None:
        pass

    def sync_folder(self, path: str) -> None:
        pass


def policies_outlive_power(config: RLConfig) -> bool:
    """Whether a resumed run needs policies that it cannot publish again from its checkpoint: the reference policy, and
    those of groups whose version is fixed.
    """
    return config.kl > 0 or (config.policy == "fixed" and config.staleness > 0)


def open_policy_store(folder: RunFolder, create: bool = False, durable: bool = True) -> Store:
    """Where the policies of a run are: RUN/policies, in its folder or its object store. A learner passes `create`, and
    `durable` if policies must outlive the power of the machine: every fsync delays the next rollouts.
    """
    if url := folder.url:
        return ObjectStore(f"{url.rstrip('/')}/{POLICIES_FOLDER}")
    root = folder.root / POLICIES_FOLDER
    if create:
        root.mkdir(exist_ok=True)
        sync_folder(folder.root)
    return PosixStore(root, None if durable else UnsyncedCalls())


class PolicyStore:
    """The published policies of a run, for those who read them."""

    def __init__(self, store: Store, run: str) -> None:
        """`run` is the id of the run: a policy of another one is refused."""
        self.store, self.run = store, run

    def versions(self) -> list[PolicyVersion]:
        """The published versions, oldest first."""
        names = [(version, folder) for version, folder in self._folders() if self._manifest_exists(folder)]
        return sorted(version for version, _ in names)

    def is_published(self, version: PolicyVersion) -> bool:
        return self._manifest_exists(checkpoint_folder(version.step, version.timeline))

    def is_intact(self, version: PolicyVersion) -> bool:
        """Whether a policy is, byte for byte, what a learner of this run has published."""
        try:
            self._find_intact(version, "")
        except CheckpointError:
            return False
        return True

    def remove(self, version: PolicyVersion) -> None:
        """Removes a policy; its manifest first, so that a crash in between leaves no partial policy."""
        folder = checkpoint_folder(version.step, version.timeline)
        if self._manifest_exists(folder):
            self.store.remove(f"{folder}/{MANIFEST_FILE}")
        faults.fail_point("retain.unpublished", version.step)
        with suppress(FileNotFoundError):  # removed by another process
            self.store.remove_folder(folder)

    @torch.no_grad()
    def load(self, version: PolicyVersion, model: PolicyModel, digest: str = "") -> str:
        """Copies a policy into a model, once every byte is verified, and returns its digest. With a `digest`, that of
        the learner's publication, any other policy is refused. After an error the weights of the model are undefined.
        """
        entry = self._find_intact(version, digest)
        assert entry.manifest is not None
        source = CheckpointTensors(entry, model.name_prefix)
        tensors = named_tensors(model.module)
        problem = find_mismatch(entry, source, {name: tuple(tensor.shape) for name, tensor in tensors})
        if problem:
            raise DamagedPolicy(f"policy {version} does not fit the model: {problem}", "expected the model of the run")
        saved = set(source.names)
        try:
            for name, tensor in tensors:
                if name in saved:
                    bits = source.read(name, (0,) * tensor.ndim, tensor.shape)
                    tensor.copy_(from_bits(bits, source.dtype(name)))
        except FileNotFoundError:
            raise unavailable(version, "was removed while it was read") from None
        if entry.manifest.base:
            check_base(entry, model.module, saved)
        return entry.manifest.digest

    def _find_intact(self, version: PolicyVersion, digest: str) -> CheckpointEntry:
        entry = read_entry(
            self.store, checkpoint_folder(version.step, version.timeline), version.step, version.timeline
        )
        if not entry.published:
            raise unavailable(version, "is not published")
        damage = find_damage(entry)
        if damage and entry.was_deleted:
            raise unavailable(version, "was removed while it was read")
        if damage or entry.manifest is None:
            raise DamagedPolicy(f"policy {version} is damaged: {damage[0]}", "try the next version")
        if entry.manifest.run != self.run:
            raise DamagedPolicy(
                f"policy {version} belongs to run {entry.manifest.run}, expected run {self.run}", "try another folder"
            )
        if digest and entry.manifest.digest != digest:
            raise DamagedPolicy(
                f"policy {version} has digest {entry.manifest.digest}, expected {digest} as the learner published it",
                "try the next version",
            )
        return entry

    def remove_except(self, needed: Collection[PolicyVersion]) -> list[PolicyVersion]:
        """Removes the policies before the newest needed one that are not needed, also incomplete ones, and returns the
        published ones. Later ones stay: the learner may be writing or may have published them meanwhile.
        """
        removed = []
        for version, folder in self._folders():
            if needed and version < max(needed) and version not in needed:
                if self._manifest_exists(folder):
                    removed.append(version)
                self.remove(version)
        return sorted(removed)

    def remove_incomplete(self, version: PolicyVersion) -> None:
        """Removes what a rank that was killed has left of a publication."""
        folder = checkpoint_folder(version.step, version.timeline)
        if not self._manifest_exists(folder) and self.store.list_names(folder):
            self.store.remove_folder(folder)

    def _folders(self) -> list[tuple[PolicyVersion, str]]:
        matches = [NAME_PATTERN.fullmatch(name) for name in self.store.list_names(CHECKPOINTS_FOLDER)]
        return [
            (PolicyVersion(int(match[2]), int(match[1])), f"{CHECKPOINTS_FOLDER}/{match[0]}")
            for match in matches
            if match is not None
        ]

    def _manifest_exists(self, folder: str) -> bool:
        return self.store.size(f"{folder}/{MANIFEST_FILE}") is not None


def find_mismatch(entry: CheckpointEntry, source: CheckpointTensors, shapes: dict[str, tuple[int, ...]]) -> str:
    """How the tensors of a policy differ from those of a model, '' if they do not. Only low-rank adaptation leaves
    tensors out.
    """
    assert entry.manifest is not None
    if unknown := sorted(set(source.names) - shapes.keys()):
        return f"it has {unknown[0]}, which the model does not have"
    if not entry.manifest.base and (missing := sorted(shapes.keys() - set(source.names))):
        return f"it does not have {missing[0]}"
    for name in source.names:
        if source.shape(name) != shapes[name]:
            return f"{name} has shape {source.shape(name)}, and that of the model has {shapes[name]}"
    return ""


def unavailable(version: PolicyVersion, problem: str) -> PolicyUnavailable:
    return PolicyUnavailable(f"policy {version} {problem}", "try the next version")


class NoRetention(RetentionPolicy):
    """Which policies are needed is known to the queue of rollouts, which removes the others."""

    def apply(self, progress: Callable[[], None] = lambda: None) -> list[str]:  # noqa: ARG002
        return []


class PolicyPublisher:
    """Publishes policies, on all ranks of any layout. Every rank calls every method at the same step."""

    def __init__(
        self,
        store: Store,
        world: World,
        lineage: RunLineage,
        attempt: int,
        attempt_fields: dict[str, Any],
        parameters: Callable[[], CheckpointState],
        layout: Layout | None = None,
        block_sizes: BlockSizes = BLOCK_SIZES,
        stall_timeout: float = 300.0,
    ) -> None:
        """`parameters` are those of the model and its buffers, without optimizer state, as `collect_state` names them;
        `attempt_fields` are the manifest fields of the run's checkpoints.
        """
        self.world, self.policies = world, PolicyStore(store, lineage.run)
        config = CheckpointConfig(mode="sync")
        self.saver = CheckpointSaver(
            config, store, world, lineage, attempt, attempt_fields, parameters, stall_timeout, layout, block_sizes
        )
        self.saver.retention = NoRetention(store, attempt, config.keep, config.keep_every, lineage)

    def publish(self, version: PolicyVersion) -> str:
        """Publishes the parameters as a version and waits until all ranks have; returns the digest, on rank 0. A
        version that is already published stays: a learner that resumes from the checkpoint of a step has its weights.
        """
        if self._is_published(version):
            return self._digest(version)
        self.saver.attempt = version.timeline
        fields: dict[str, Any] = {key: {} for key in ("data", "rng", "schedule", "scaler", "counters")}
        owner = str(self.world.rank)
        (result,) = self.saver.save(CheckpointMetadata(version.step, fields, owner, {}), wait=True)
        if result.error is not None:
            raise result.error
        return self.saver.parent if self.world.rank == 0 else ""

    def remove_damaged(self, version: PolicyVersion) -> None:
        """Removes a published policy that is damaged, or of another run, so that `publish` writes it again."""
        if self.world.rank == 0 and self.policies.is_published(version) and not self.policies.is_intact(version):
            self.policies.remove(version)

    def close(self) -> None:
        self.saver.close()

    def _is_published(self, version: PolicyVersion) -> bool:
        """The answer of rank 0, which removes what a killed attempt has left of the version."""
        published = False
        if self.world.rank == 0:
            self.policies.remove_incomplete(version)
            published = self.policies.is_published(version)
        return bool(self.world.broadcast_object(published, "published policy"))

    def _digest(self, version: PolicyVersion) -> str:
        folder = checkpoint_folder(version.step, version.timeline)
        entry = read_entry(self.policies.store, folder, version.step, version.timeline)
        return entry.manifest.digest if self.world.rank == 0 and entry.manifest is not None else ""
