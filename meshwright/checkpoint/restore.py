"""Where a run goes on from: the newest checkpoint that verifies. Verified before a single tensor is touched."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from meshwright import faults
from meshwright.checkpoint.listing import CheckpointEntry, RunLineage, list_published, read_entry
from meshwright.checkpoint.manifest import Manifest, TensorRecord
from meshwright.checkpoint.shards import LocalShardLoadPlanner, ShardReader, as_planner_state, find_mismatches
from meshwright.checkpoint.state import CheckpointState
from meshwright.checkpoint.verify import Damage, find_damage
from meshwright.errors import CheckpointError, IdentityError
from meshwright.parallel.world import World
from meshwright.store.interface import Store


@dataclass
class RestoreResult:
    """What was loaded, and what had to be passed over on the way."""

    manifest: Manifest
    name: str
    seconds: float
    skipped: list[tuple[str, list[Damage]]] = field(default_factory=list)


def restore(
    store: Store,
    world: World,
    lineage: RunLineage,
    state: CheckpointState,
    check: Callable[[Manifest], None],
    *,
    fallback: bool,
    say: Callable[[str, list[Damage]], None],
) -> RestoreResult | None:
    """Loads the newest intact checkpoint into `state`, in place; None where the run has none at all.

    `check` refuses a manifest of another run before anything is copied. A damaged checkpoint is said loudly and passed
    over, or, without fallback, ends the run.
    """
    start = time.monotonic()
    candidates = world.broadcast_object(
        [(e.folder, e.step, e.attempt) for e in list_published(store, lineage)], "checkpoints"
    )
    passed: list[tuple[str, list[Damage]]] = []
    for folder, step, attempt in candidates:
        world.heartbeat.enter("restore", step)
        entry = read_entry(store, folder, step, attempt)
        # Every file is verified by some rank before any rank copies; each then verifies again what it reads itself.
        own = sorted(entry.manifest.files)[world.rank :: world.size] if entry.manifest is not None else None
        found = find_damage(entry, own, world.heartbeat.beat)
        if worst := first_damage_on_any_rank(world, found):
            say(entry.name, [worst])
            passed.append((entry.name, [worst]))
            if not fallback:
                raise CheckpointError(
                    f"checkpoint {entry.name} is damaged: {worst}", "leave out --no-fallback to use an older one"
                )
            continue
        assert entry.manifest is not None
        check(entry.manifest)
        if differs := gather_mismatches(state, entry.manifest.tensors, world):
            more = f" and {len(differs) - 3} more" if len(differs) > 3 else ""
            raise IdentityError(f"checkpoint {entry.name} holds another model: {'; '.join(differs[:3])}{more}")
        faults.fail_point("start.restore", step)
        try:
            load_tensors(entry, state, world)
        except CheckpointReadError as error:  # heard by every rank alike
            say(entry.name, [error.damage])
            passed.append((entry.name, [error.damage]))
            if not fallback:
                raise CheckpointError(str(error)) from None
            continue
        faults.fail_point("start.restored", step)
        return RestoreResult(entry.manifest, entry.name, time.monotonic() - start, passed)
    foreign = world.broadcast_object(
        [entry.name for entry in list_published(store)] if not candidates else [], "foreign"
    )
    if foreign:
        raise CheckpointError(
            f"{len(foreign)} checkpoint(s) are there and none is this run's (the newest is {foreign[0]}): was "
            "identity.json lost or changed?",
            "put it back, or begin anew with --fresh",
        )
    if passed:
        raise CheckpointError(
            f"none of {len(passed)} checkpoint(s) is intact; the newest, {passed[0][0]}: {passed[0][1][0]}",
            "mend the storage, or begin anew with --fresh",
        )
    return None


def gather_mismatches(state: CheckpointState, tensors: dict[str, TensorRecord], world: World) -> list[str]:
    """How the model, of which each rank may hold a part alone, differs from a checkpoint: the same on every rank."""
    own = find_mismatches(state, tensors)
    names = sorted(tensors)
    holders = world.all_reduce_ints(*(name in state for name in names), name="holders of tensors").wait().tolist()
    own += [f"{name} is only in the checkpoint" for name, count in zip(names, holders, strict=True) if not count]
    finders = [rank for rank, row in enumerate(world.all_gather_ints(len(own), name="mismatches")) if row[0]]
    return world.broadcast_object(own, "mismatches told", speaker=finders[0]) if finders else []


def first_damage_on_any_rank(world: World, found: list[Damage]) -> Damage | None:
    """The first damage that any rank has found, told to all: either every rank loads a checkpoint or none does."""
    finders = [rank for rank, row in enumerate(world.all_gather_ints(len(found), name="damage")) if row[0]]
    if not finders:
        return None
    return Damage(**world.broadcast_object(found[0].to_json() if found else None, "damage told", speaker=finders[0]))


def load_tensors(entry: CheckpointEntry, state: CheckpointState, world: World) -> None:
    try:
        with torch.no_grad():
            dcp.load(
                as_planner_state(state),
                storage_reader=ShardReader(entry, world.heartbeat.beat),
                planner=LocalShardLoadPlanner(),
                no_dist=world.size == 1,
            )
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        raise CheckpointReadError(
            entry.name, Damage(f"as rank {rank} reads it", -1, "what was verified", str(error))
        ) from error


class CheckpointReadError(Exception):
    """A checkpoint that verified and could then not be read."""

    def __init__(self, name: str, damage: Damage) -> None:
        super().__init__(f"checkpoint {name} is damaged: {damage}")
        self.damage = damage
