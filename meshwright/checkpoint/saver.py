"""Saving while training goes on: a copy to host memory, then shards, digests, manifest and retention in a thread.

At most one save is in flight. Nothing is published unless every rank's copy is finite and replicas agree.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from meshwright import faults
from meshwright.checkpoint.listing import RunLineage, checkpoint_folder, read_fence
from meshwright.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, FileRecord, Manifest, TensorRecord
from meshwright.checkpoint.retention import RetentionPolicy
from meshwright.checkpoint.shards import LocalShardSavePlanner, ShardWriter, as_planner_state
from meshwright.checkpoint.state import CheckpointState
from meshwright.checkpoint.verify import shard_header, verify_file
from meshwright.config import CheckpointConfig
from meshwright.errors import BusyError, CheckpointError, MeshwrightError, NumericsError, PeerError, is_peer_loss
from meshwright.parallel.data_parallel.replica_check import ReplicaChecker, parameter_checksums
from meshwright.parallel.local_shard import LocalShard, local_shard
from meshwright.parallel.world import World
from meshwright.store.interface import Store
from meshwright.topology.layout import Layout

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process alone is no mistake


@dataclass(frozen=True)
class CheckpointMetadata:
    """What a manifest says beside tensors, at one step."""

    step: int
    shared_fields: dict[str, Any]
    """the manifest's fields data, rng, schedule, scaler and counters: the same on every rank"""
    owner: str
    owner_state: dict[str, Any]
    used_parameters: int = 0
    """a word of which parameters the last step used: nothing is published unless ranks agree on it"""


@dataclass
class SaveResult:
    """What became of a save."""

    step: int
    folder: str
    bytes: int = 0
    stall_seconds: float = 0.0
    seconds: float = 0.0
    skipped: int = 0
    deleted: list[str] = field(default_factory=list)
    retention_error: str = ""
    """why retention failed, if it did"""
    error: MeshwrightError | None = None

    def to_json(self) -> dict[str, Any]:
        facts = {key: value for key, value in vars(self).items() if key != "error"}
        return facts | {"stall_seconds": round(self.stall_seconds, 4), "seconds": round(self.seconds, 4)}


class HostStager:
    """Host copies of what this rank keeps, in buffers that are made once and reused."""

    def __init__(self, state: CheckpointState, layout: Layout, rank: int) -> None:
        blocks = {name: local_shard(tensor) for name, tensor in state.items()}
        pinned = any(block.local.is_cuda for block in blocks.values())
        self.host = {
            name: blocks[name].with_local(
                torch.zeros(blocks[name].local.shape, dtype=blocks[name].local.dtype, pin_memory=pinned)
            )
            for name in assign_shards(blocks, layout, rank)
        }
        self.replicas = ReplicaChecker({name: b for name, b in blocks.items() if is_replica_checked(name)}, layout)
        self.words = torch.zeros(len(self.replicas.names), dtype=torch.int64, pin_memory=pinned)
        """a word of every parameter that others hold too, kept by this rank or not: replicas are compared by them"""
        self.begun, self.copied = (torch.cuda.Event(enable_timing=True) if pinned else None for _ in range(2))

    @torch.no_grad()
    def copy(self, state: CheckpointState) -> dict[str, LocalShard]:
        """On CUDA the copies are queued before whatever comes next, and `wait` tells when they are there."""
        if self.begun is not None:
            self.begun.record()
        for name, host in self.host.items():
            host.local.copy_(local_shard(state[name]).local, non_blocking=True)
        if self.replicas.names:
            words = parameter_checksums(local_shard(state[name]).local for name in self.replicas.names)
            self.words.copy_(words, non_blocking=True)
        if self.copied is not None:
            self.copied.record()
        return self.host

    def wait(self) -> float:
        """The seconds of the device that the copies took."""
        if self.begun is None or self.copied is None:
            return 0.0
        self.copied.synchronize()
        return float(self.begun.elapsed_time(self.copied)) / 1e3


def is_replica_checked(name: str) -> bool:
    """Parameters, and biases of routers: other buffers differ between copies until the next pass."""
    return name.startswith("model/") or name.endswith("router.bias")


def assign_shards(blocks: Mapping[str, LocalShard], layout: Layout, rank: int) -> list[str]:
    """Which blocks this rank keeps. Of those that hold the same block one does: the largest first, each to whoever has
    the least so far, which all of them work out alike.
    """
    kept = []
    groups = {cut: layout.replica_group(rank, cut) for cut in {block.sharded_axes for block in blocks.values()}}
    loads = {cut: [0] * len(group) for cut, group in groups.items()}
    sizes = {name: prod(block.shape) * block.local.element_size() for name, block in blocks.items()}
    for name in sorted(blocks, key=lambda name: (-sizes[name], name)):
        group, load = groups[blocks[name].sharded_axes], loads[blocks[name].sharded_axes]
        # Buffers (BatchNorm's) differ between replicas until the next pass spreads those of rank 0: they are the run's.
        keeper = 0 if name.startswith("buffer/") else load.index(min(load))
        load[keeper] += sizes[name]
        if group[keeper] == rank:
            kept.append(name)
    return kept


class CheckpointSaver:
    """One rank's side of saving. Rank 0 has the `news`; every rank then calls `save` or `settle` at the same step."""

    def __init__(
        self,
        config: CheckpointConfig,
        store: Store,
        world: World,
        lineage: RunLineage,
        attempt: int,
        facts: dict[str, Any],
        state: Callable[[], CheckpointState],
        patience: float = 300.0,
        layout: Layout | None = None,
    ) -> None:
        """`facts` are the manifest's fields layout, identity and made_by; a save that has not moved for `patience`
        seconds is told. Without a `layout` every rank holds everything.
        """
        self.config, self.store, self.world, self.state = config, store, world, state
        self.lineage, self.attempt, self.facts = lineage, attempt, facts
        self.group = dist.new_group(backend="gloo") if world.size > 1 else None
        self.retention = RetentionPolicy(store, attempt, config.keep, config.keep_every, lineage)
        layout = layout or Layout(replicate=world.size)
        self.stager = HostStager(state(), layout, world.rank) if config.mode != "off" else None
        self.planner = LocalShardSavePlanner()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self.flying: Future[SaveResult] | None = None
        self.parent, self.ordinal, self.newest_step = "", 0, -1
        self.writer: ShardWriter | None = None
        self.begun = time.monotonic()
        self.stall_seconds = 0.0
        self.skipped = 0
        self.patience = patience
        self.moved, self.seen = 0, (0, time.monotonic())
        self.waits = False
        """whether this rank's part is done and the others' is not"""

    def poll(self, step: int) -> tuple[bool, bool]:
        """(whether to save once `step` steps are done, whether a save has ended that nobody has asked for). Rank 0
        alone says it and all hear it, so that all act on it at one step.
        """
        return self.due(step), self.flying is not None and self.flying.done()

    def due(self, step: int) -> bool:
        if self.config.mode == "off" or step == self.newest_step:
            return False
        waited = time.monotonic() - self.begun
        by_time = self.config.seconds and waited >= max(self.config.seconds, self.stall_seconds / self.config.overhead)
        by_steps = self.config.every and step % self.config.every == 0
        if not (by_time or by_steps):
            return False
        if self.flying is not None and not self.flying.done():
            self.skipped += 1
            self.begun = time.monotonic()  # counted once an interval
            return False
        return True

    def save(self, notes: CheckpointMetadata, wait: bool = False) -> list[SaveResult]:
        """Begins a save; gives what became of the one before, and of this one where it was waited for."""
        done = self.wait()  # rank 0 found its own ended; another rank's is at most a message behind
        self.begun = start = time.monotonic()
        self.seen = (self.moved, start)
        self.world.heartbeat.enter("save", notes.step)
        faults.fail_point("save.stage", notes.step)
        assert self.stager is not None
        staged = self.stager.copy(self.state())
        self.stall_seconds = time.monotonic() - start
        self.flying = self.thread.submit(self._run, notes, self.stager, staged)
        if wait or self.config.mode == "sync":
            done += self.wait()
            self.stall_seconds = done[-1].stall_seconds = time.monotonic() - start
        self.world.heartbeat.add({"save": self.stall_seconds})
        return done

    def wait(self) -> list[SaveResult]:
        """The save that is in flight, waited for. The page shows life as long as bytes move, and says so where only
        other ranks' bytes are still missing.
        """
        if self.flying is None:
            return []
        while not self.flying.done():
            with suppress(TimeoutError):
                self.flying.exception(timeout=0.2)
            self.world.heartbeat.set_waiting(self.waits)
            if self._moves():
                self.world.heartbeat.beat()
        self.world.heartbeat.set_waiting(False)
        saved, self.flying = self.flying.result(), None
        saved.stall_seconds = self.stall_seconds = max(self.stall_seconds, saved.stall_seconds)
        saved.skipped, self.skipped = self.skipped, 0
        if saved.error is None:
            self.newest_step = saved.step
        return [saved]

    def stall_warning(self) -> str:
        """Says so, once in `patience` seconds, where the save in flight does not move; no other begins meanwhile."""
        if self.flying is None or self.flying.done() or self._moves() or self.waits:
            return ""
        still = time.monotonic() - self.seen[1]
        if still < self.patience:
            return ""
        self.seen = (self.seen[0], time.monotonic())
        return f"the save that began {time.monotonic() - self.begun:.0f} s ago has not moved for {still:.0f} s"

    def _moves(self) -> bool:
        """Whether bytes went either way since the last time somebody asked."""
        moved = self.moved + (self.writer.written if self.writer else 0)
        if moved == self.seen[0]:
            return False
        self.seen = (moved, time.monotonic())
        return True

    def continue_from(self, manifest: Manifest) -> None:
        """The next checkpoint is the child of this one, which the run was restored from."""
        self.parent, self.ordinal, self.newest_step = manifest.digest, manifest.ordinal + 1, manifest.step

    def close(self) -> None:
        self.thread.shutdown(wait=True)

    def _run(self, notes: CheckpointMetadata, stager: HostStager, state: dict[str, LocalShard]) -> SaveResult:
        """The thread's whole work. Errors are an outcome: the training thread decides what they mean."""
        start = time.monotonic()
        saved = SaveResult(notes.step, checkpoint_folder(notes.step, self.attempt))
        try:
            saved.stall_seconds = stager.wait()
            self._agree(notes, state, stager)
            head = shard_header(self.lineage.run, self.lineage.timeline, notes.step, self.attempt, self.world.rank)
            self.writer = ShardWriter(
                self.store,
                saved.folder,
                self.world.rank,
                notes.step,
                head,
                (notes.owner, notes.owner_state),
                lambda files, tensors, owners: self._publish(notes, saved, files, tensors, owners),
                written=self._written,
            )
            dcp.save(
                as_planner_state(state),
                storage_writer=self.writer,
                planner=self.planner,
                process_group=self.group,
                no_dist=self.group is None,
            )
            self.waits = False
            self.ordinal += 1
            self._read_back(saved.folder, self.writer)
            if self.world.rank == 0:
                self._prune(saved)
        except MeshwrightError as error:
            saved.error = error
        except (Exception, CheckpointException) as error:  # noqa: BLE001  DCP's is no Exception
            saved.error = to_save_error(error, saved.folder)
        self.waits = False
        saved.seconds = time.monotonic() - start
        return saved

    def _written(self) -> None:
        """This rank's shard is durable: from here on it waits for the others'."""
        self.waits = True

    def _read_back(self, folder: str, writer: ShardWriter) -> None:
        """Every rank reads its own shard again; only then may older checkpoints go."""
        path = f"{folder}/{writer.file}"
        found = next(verify_file(self.store, path, writer.record, writer.chunk, self._progress), None)
        bad = [rank for rank, (flag,) in enumerate(self._gather(found is not None)) if flag]
        if bad:
            raise CheckpointError(
                f"rank {bad[0]}: {folder} reads back other than it was written: {found or 'its shard'}"
            )

    def _gather(self, *numbers: int) -> list[list[int]]:
        """Every rank's numbers, by rank, over the saver's own group."""
        own = torch.tensor(numbers, dtype=torch.int64)
        said = [own]
        if self.group is not None:
            said = [torch.zeros_like(own) for _ in range(self.world.size)]
            self.waits = True
            dist.all_gather(said, own, group=self.group)
            self.waits = False
        return [one.tolist() for one in said]

    def _prune(self, saved: SaveResult) -> None:
        """The checkpoint is there, whatever becomes of older ones."""
        self.retention.verified.add(saved.folder.rpartition("/")[2])
        try:
            saved.deleted = self.retention.apply(self._progress)
        except Exception as error:  # noqa: BLE001  of this rank alone: it must not make the save one that failed
            saved.retention_error = f"older checkpoints could not be deleted: {error}"

    def _progress(self) -> None:
        self.moved += 1

    def _agree(self, notes: CheckpointMetadata, state: dict[str, LocalShard], stager: HostStager) -> None:
        """Every rank learns the same verdict before any of them writes."""
        step = notes.step
        unsound = next((name for name, block in state.items() if not is_finite(name, block.local)), "")
        rows = self._gather(bool(unsound), notes.used_parameters, *stager.replicas.digests(stager.words))
        flags, digests = [row[0] for row in rows], [row[2:] for row in rows]
        if len({row[1] for row in rows}) > 1:
            raise NumericsError(
                f"step {step - 1}: ranks did not use the same parameters, and nothing was published",
                "set ddp.find_unused_parameters = true",
            )
        if bad := [rank for rank, flag in enumerate(flags) if flag]:
            where = unsound if self.world.rank == bad[0] else "its state"
            what = f"rank {bad[0]} step {step}: {where} is not finite"
            raise NumericsError(f"{what}, and was not published", "look at the steps before in events/")
        if odd := stager.replicas.find_mismatch(digests):
            raise odd.error(self.world.rank, step)

    def _publish(
        self,
        notes: CheckpointMetadata,
        saved: SaveResult,
        files: dict[str, FileRecord],
        tensors: dict[str, TensorRecord],
        owners: dict[str, dict[str, Any]],
    ) -> None:
        """On the coordinator, once every shard is durable."""
        self.waits = False
        faults.fail_point("save.before_manifest", notes.step)
        if (newest := read_fence(self.store).attempt) > self.attempt:
            raise BusyError(f"attempt {newest} has taken the run over: nothing of attempt {self.attempt} is published")
        lineage = {"run": self.lineage.run, "timeline": self.lineage.timeline}
        place = {"step": notes.step, "attempt": self.attempt, "ordinal": self.ordinal, "parent": self.parent}
        content = {"owners": owners, "files": files, "tensors": tensors}
        manifest = Manifest(**lineage, **place, **self.facts, **notes.shared_fields, **content)  # type: ignore[arg-type]
        manifest.check()
        raw = manifest.encode()
        if len(raw) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"the manifest of {saved.folder} has {len(raw):,} bytes, over {MAX_MANIFEST_BYTES:,}")
        reached = lambda: faults.fail_point("save.before_publish", notes.step)  # noqa: E731
        if not self.store.publish_if_absent(f"{saved.folder}/{MANIFEST_FILE}", raw, reached):
            raise CheckpointError(f"{saved.folder} exists already and is not written over")
        faults.fail_point("save.after_publish", notes.step)
        self.parent = json.loads(raw[raw.rindex(b":") + 1 : -2])  # the digest is the last key
        saved.bytes = manifest.total_bytes


def is_finite(name: str, tensor: torch.Tensor) -> bool:
    """Finite; a buffer may hold what it likes. The sum is quick, and only a doubtful one is looked at closely."""
    if name.startswith("buffer/") or not tensor.is_floating_point() or not tensor.numel():
        return True
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def to_save_error(error: BaseException, folder: str) -> MeshwrightError:
    """A failed save in one line: which rank, which file, what."""
    rank = None
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = min(error.failures.items())
    if isinstance(error, MeshwrightError):
        return error
    if is_peer_loss(error):
        return PeerError(f"{folder} was not saved: another rank was lost ({str(error).splitlines()[0][:120]})")
    what = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    who = f"rank {rank}: " if rank is not None else ""
    return CheckpointError(f"{who}{folder} was not saved: {what}", "earlier checkpoints are untouched")
