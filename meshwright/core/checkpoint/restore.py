"""Restores the newest intact checkpoint into the state of a run, on any layout."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.base.block_sizes import BLOCK_SIZES, BlockSizes
from meshwright.base.checkpoint.format.index import CheckpointIndex, read_parts
from meshwright.base.checkpoint.format.regions import RegionTable, TensorRecord, TensorRegion
from meshwright.base.checkpoint.listing import CheckpointEntry, RunLineage, list_published, read_entry
from meshwright.base.checkpoint.manifest import Manifest
from meshwright.base.store.interface import Store
from meshwright.core import faults
from meshwright.core.checkpoint.dcp_planner import LocalShardLoadPlanner, as_planner_state, find_mismatches
from meshwright.core.checkpoint.shards import ShardReader
from meshwright.core.checkpoint.snapshots.candidates import RestoreCandidate, find_snapshots
from meshwright.core.checkpoint.state import CheckpointState
from meshwright.core.checkpoint.verify import (
    DIGEST_THREADS,
    WHOLE_FILE,
    Damage,
    find_damage,
    find_uncovered,
    part_damage,
)
from meshwright.core.parallel.local_shard import local_shard
from meshwright.core.parallel.world import World
from meshwright.core.store.memory.peer_store import PeerMemoryStore
from meshwright.errors import CheckpointError, IdentityError

MAX_LISTED_MISMATCHES = 3
"""The number of mismatched tensors that an error message names."""


@dataclass
class RestoreResult:
    """The checkpoint that was restored, and the damaged ones that were skipped."""

    manifest: Manifest
    name: str
    seconds: float
    owner_state: dict[str, Any] = field(default_factory=dict)
    """The non-tensor state of the owner that `restore` was called with."""
    skipped: list[tuple[str, list[Damage]]] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    """The hosts whose memory it was restored from; none for a published checkpoint."""
    published_step: int = -1
    """The step of the newest published checkpoint, -1 if there is none."""

    def source(self) -> dict[str, Any]:
        """Where the state came from, as fields of a record."""
        return {"hosts": self.hosts, "published_step": self.published_step}


def restore(
    store: Store,
    world: World,
    lineage: RunLineage,
    state: CheckpointState,
    validate: Callable[[Manifest], None],
    *,
    fallback: bool,
    on_damaged: Callable[[str, list[Damage]], None],
    owner: str = "",
    block_sizes: BlockSizes = BLOCK_SIZES,
    memory: PeerMemoryStore | None = None,
    on_incomplete: Callable[[int, str], None] = lambda _step, _reason: None,
    find_state_damage: Callable[[Manifest, dict[str, Any]], list[Damage]] = lambda _manifest, _state: [],
) -> RestoreResult | None:
    """Load the newest intact checkpoint, or a newer snapshot in the `memory` of the hosts, into `state`, in place; None
    if the run has neither.

    A checkpoint is verified before any tensor is overwritten; `find_state_damage` verifies the values beside the
    tensors, in the manifest and in the state of the owner. `validate` raises for the manifest of another run. A damaged
    checkpoint is reported to `on_damaged` and skipped or, without `fallback`, ends the run. A damaged snapshot is
    reported as well, and never ends the run; one that is not complete on the hosts that are left is not damaged.
    `owner` is the logical owner that this rank stands for.
    """
    start = time.monotonic()
    published = list_published(store, lineage)
    listed = [(entry.folder, entry.step, entry.attempt) for entry in published]
    candidates = [RestoreCandidate(*values) for values in world.broadcast_object(listed, "checkpoints")]
    newest = candidates[0].step if candidates else -1
    snapshots = find_snapshots(memory, world, lineage, published, on_incomplete) if memory is not None else []
    skipped: list[tuple[str, list[Damage]]] = []
    deleted: list[str] = []
    for folder, step, attempt, hosts in sorted(candidates + snapshots, key=RestoreCandidate.order, reverse=True):
        world.heartbeat.enter("restore", step)
        entry = read_entry(memory if hosts and memory is not None else store, folder, step, attempt)
        # The ranks share the verification of all files before any rank copies. Each rank then verifies what it reads.
        parts = local_parts(entry, world) if entry.manifest is not None else None
        found = find_damage(entry, parts, world.heartbeat.beat, block_sizes.io_bytes, DIGEST_THREADS)
        damage = first_damage_on_any_rank(world, found)
        if damage is None:
            index, owner_state, found = gather_index(entry, world, owner)
            assert entry.manifest is not None
            found += find_state_damage(entry.manifest, owner_state)
            damage = first_damage_on_any_rank(world, found)
        if damage is None:
            assert entry.manifest is not None
            validate(entry.manifest)
            check_tensors(entry, state, world)
            faults.fail_point("start.restore", step)
            try:
                load_tensors(entry, state, world, block_sizes.io_bytes, index)
            except CheckpointReadError as error:  # raised on every rank
                damage = error.damage
            else:
                faults.fail_point("start.restored", step)
                seconds = time.monotonic() - start
                return RestoreResult(entry.manifest, entry.name, seconds, owner_state, skipped, hosts, newest)
        if world.broadcast_object(entry.was_deleted, "deleted"):  # by retention, with all its files: not damaged
            deleted.append(entry.name)
            continue
        on_damaged(entry.name, [damage])
        if hosts:
            continue
        skipped.append((entry.name, [damage]))
        if not fallback:
            raise CheckpointError(
                f"checkpoint {entry.name} is damaged: {damage}", "try without --no-fallback to use an older checkpoint"
            )
    names = [entry.name for entry in list_published(store)] if not candidates else []
    other_runs = world.broadcast_object(names, "checkpoints of other runs")
    if other_runs:
        raise CheckpointError(
            f"none of {len(other_runs)} checkpoint(s) belongs to this run (the newest is {other_runs[0]}): "
            "identity.json was lost or changed",
            "try to put identity.json back, or begin a new run with --fresh",
        )
    if skipped:
        raise CheckpointError(
            f"none of {len(skipped)} checkpoint(s) is intact; the newest, {skipped[0][0]}: {skipped[0][1][0]}",
            "try to repair the storage, or begin a new run with --fresh",
        )
    if deleted:
        raise CheckpointError(
            f"checkpoint {deleted[0]} was deleted while it was restored, and there is no other one",
            "try to put it back, or begin a new run with --fresh",
        )
    return None


def check_tensors(entry: CheckpointEntry, state: CheckpointState, world: World) -> None:
    """Raise IdentityError on every rank unless the checkpoint has exactly the tensors of the model."""
    assert entry.manifest is not None
    mismatches = gather_mismatches(state, entry.manifest.tensors, world)
    if mismatches:
        listed = "; ".join(mismatches[:MAX_LISTED_MISMATCHES])
        rest = len(mismatches) - MAX_LISTED_MISMATCHES
        more = f" and {rest} more" if rest > 0 else ""
        raise IdentityError(f"checkpoint {entry.name} is of another model: {listed}{more}")


def gather_mismatches(state: CheckpointState, tensors: dict[str, TensorRecord], world: World) -> list[str]:
    """The differences between the state of all ranks and a checkpoint, the same list on every rank."""
    mismatches = find_mismatches(state, tensors)
    names = sorted(tensors)
    counts = world.all_reduce_ints(*(name in state for name in names), name="ranks per tensor").wait().tolist()
    mismatches += [f"{name} is only in the checkpoint" for name, count in zip(names, counts, strict=True) if not count]
    rows = world.all_gather_ints(len(mismatches), name="number of mismatches")
    ranks = [rank for rank, row in enumerate(rows) if row[0]]
    return world.broadcast_object(mismatches, "mismatches", ranks[0]) if ranks else []


def first_damage_on_any_rank(world: World, damage: list[Damage]) -> Damage | None:
    """The first damage that any rank has found, on every rank: either all ranks load a checkpoint or none does."""
    ranks = [rank for rank, row in enumerate(world.all_gather_ints(len(damage), name="damage count")) if row[0]]
    if not ranks:
        return None
    return Damage(**world.broadcast_object(damage[0].to_json() if damage else None, "damage", ranks[0]))


def local_parts(entry: CheckpointEntry, world: World) -> list[str]:
    """The parts that this rank reads for all ranks."""
    assert entry.manifest is not None
    return list(entry.manifest.parts)[world.rank :: world.size]


def gather_index(
    entry: CheckpointEntry, world: World, owner: str = ""
) -> tuple[CheckpointIndex, dict[str, Any], list[Damage]]:
    """The index of a checkpoint, the non-tensor state of an owner, and the damage that this rank has found.

    Every rank reads its share of the parts, one collective gives all of them to every rank, and every rank then checks
    that its share of the tensors is covered exactly once. Every rank must call it.
    """
    manifest = entry.manifest
    assert manifest is not None
    local = local_parts(entry, world)
    owned = [name for name, part in manifest.parts.items() if owner and part.owner == owner][:1]
    owner_state: dict[str, Any] = {}
    tables, damage = [], []
    for name, part in read_parts(entry.store, entry.folder, manifest, [*dict.fromkeys(local + owned)]):
        if isinstance(part, Exception):
            damage.append(part_damage(manifest, name, part))
            continue
        if name in local:
            tables.append(manifest.index_regions(name, part))
        if name in owned:
            owner_state = part.state
    encoded = torch.from_numpy(RegionTable.merge(tables).encode())
    rows = world.all_gather_array(encoded, "regions")
    table = RegionTable.merge([RegionTable.decode(row.numpy()) for row in rows])
    damage += find_uncovered(manifest, table, slice(world.rank, None, world.size))
    return CheckpointIndex(manifest, table), owner_state, damage


def local_regions(index: CheckpointIndex, state: CheckpointState) -> dict[str, tuple[TensorRegion, ...]]:
    """The regions that the local shards of this rank intersect."""
    shards = {name: local_shard(tensor) for name, tensor in state.items()}
    return {name: index.intersecting(name, shard.offset, shard.local.shape) for name, shard in shards.items()}


def load_tensors(
    entry: CheckpointEntry, state: CheckpointState, world: World, io_bytes: int, index: CheckpointIndex
) -> None:
    """Copy the tensors of a checkpoint into `state`; DCP reshards them."""
    reader = ShardReader(entry, local_regions(index, state), world.heartbeat.beat, io_bytes)
    try:
        with torch.no_grad():
            dcp.load(
                as_planner_state(state),
                storage_reader=reader,
                planner=LocalShardLoadPlanner(),
                no_dist=world.size == 1,
            )
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        damage = Damage(f"a file that rank {rank} reads", WHOLE_FILE, "the verified content", str(error))
        raise CheckpointReadError(entry.name, damage) from error


class CheckpointReadError(Exception):
    """A checkpoint was verified but could not be read afterwards."""

    def __init__(self, name: str, damage: Damage) -> None:
        super().__init__(f"checkpoint {name} is damaged: {damage}")
        self.damage = damage
