"""Saves checkpoints while training continues: stages to host memory, then writes and publishes in a thread.

At most one save is in flight. Nothing is published unless the state of every rank is finite and replicas agree. A
checkpoint comes into existence at one call: `publish_if_absent` of the manifest, in `CheckpointSaver._publish`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.base.block_sizes import BLOCK_SIZES, BlockSizes
from meshwright.base.checkpoint.format.canonical import recorded_digest
from meshwright.base.checkpoint.format.manifest_parts import RecordedPart, ShardOrigin
from meshwright.base.checkpoint.format.regions import TensorRecord
from meshwright.base.checkpoint.listing import RunLineage, checkpoint_folder, read_fence
from meshwright.base.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest
from meshwright.base.store.interface import Store
from meshwright.base.topology.layout import Layout
from meshwright.core import faults
from meshwright.core.checkpoint.dcp_planner import LocalShardSavePlanner, as_planner_state
from meshwright.core.checkpoint.retention import RetentionPolicy
from meshwright.core.checkpoint.shards import ShardWriter, to_save_error
from meshwright.core.checkpoint.stager import HostStager, first_nonfinite
from meshwright.core.checkpoint.state import CheckpointState
from meshwright.core.checkpoint.verify import DIGEST_THREADS, verify_content, verify_file
from meshwright.core.parallel.data_parallel.rank_agreement import ModelUse, use_error
from meshwright.core.parallel.local_shard import LocalShard
from meshwright.core.parallel.world import World
from meshwright.errors import BusyError, CheckpointError, MeshwrightError, NumericsError

if TYPE_CHECKING:
    from meshwright.base.config import CheckpointConfig

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process is a supported layout

POLL_SECONDS = 0.2
"""The interval at which `wait` updates the heartbeat."""


@dataclass(frozen=True)
class CheckpointMetadata:
    """The non-tensor content of a manifest at one step."""

    step: int
    """The number of completed optimizer steps."""
    shared_fields: dict[str, Any]
    """The manifest fields data, rng, schedule, scaler and counters, which are equal on every rank."""
    owner: str
    """The logical owner that this rank stands for, such as its data-parallel rank."""
    owner_state: dict[str, Any]
    """The non-tensor state of the owner."""
    model_use: ModelUse = field(default_factory=ModelUse)
    """How the last step ran the model; nothing is published unless ranks agree on it."""


@dataclass
class SaveResult:
    """The outcome of a save."""

    step: int
    folder: str
    bytes: int = 0
    """The size of all shards."""
    stall_seconds: float = 0.0
    """The time that training was blocked."""
    seconds: float = 0.0
    """The time from staging to the end of retention."""
    skipped: int = 0
    """The number of saves that were due and skipped because this one was in flight."""
    deleted: list[str] = field(default_factory=list)
    """The names of the checkpoints that retention deleted."""
    retention_error: str = ""
    """Why retention failed, '' if it did not."""
    error: MeshwrightError | None = None
    """Why the save failed, None if it did not."""
    in_memory: bool = False
    published: bool = False
    """Whether this rank knows that the manifest is published, although the save may have failed afterwards."""

    def to_json(self) -> dict[str, Any]:
        values = {key: value for key, value in vars(self).items() if key not in ("error", "in_memory", "published")}
        return values | {"stall_seconds": round(self.stall_seconds, 4), "seconds": round(self.seconds, 4)}


class CheckpointSaver:
    """Saves the checkpoints of a run on one rank.

    Rank 0 calls `poll`, and its answer reaches all ranks; every rank then calls `save` or `wait` at the same step.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        store: Store,
        world: World,
        lineage: RunLineage,
        attempt: int,
        attempt_fields: dict[str, Any],
        state: Callable[[], CheckpointState],
        stall_timeout: float = 300.0,
        layout: Layout | None = None,
        block_sizes: BlockSizes = BLOCK_SIZES,
    ) -> None:
        """`attempt_fields` are the manifest fields layout, identity and made_by. `stall_warning` reports a save without
        progress for `stall_timeout` seconds. Without a `layout` every rank has a replica of the full state.
        """
        self.config, self.store, self.world, self.state = config, store, world, state
        self.lineage, self.attempt, self.attempt_fields = lineage, attempt, attempt_fields
        self.group = dist.new_group(backend="gloo") if world.size > 1 else None
        self.block_sizes = block_sizes
        self.retention = RetentionPolicy(store, attempt, config.keep, config.keep_every, lineage)
        layout = self.layout = layout or Layout(replicate=world.size)
        self.stager = HostStager(state(), layout, world.rank) if config.mode != "off" else None
        self.planner = LocalShardSavePlanner()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self.in_flight: Future[SaveResult] | None = None
        self.snapshot_in_flight = False
        self.parent, self.ordinal, self.newest_step = "", 0, -1
        self.writer: ShardWriter | None = None
        self.begin_time = time.monotonic()
        self.stall_seconds = 0.0
        self.skipped = 0
        self.stall_timeout = stall_timeout
        self.progress_count = 0
        self.last_progress = (0, time.monotonic())
        """The progress at the last call of `_has_progressed`, and the time of the last change."""
        self.waits_for_ranks = False
        """Whether this rank has completed its part and waits for other ranks."""

    def keep_steps(self, steps: frozenset[int]) -> None:
        """Keeps the checkpoints after these numbers of steps, whatever their age."""
        self.retention.kept_steps = steps

    def poll(self, step: int) -> tuple[bool, bool]:
        """(whether a save is due after `step` steps, whether the save in flight has completed). Only the answer of
        rank 0 counts, so that all ranks act at the same step.
        """
        return self.due(step), self.in_flight is not None and self.in_flight.done()

    def due(self, step: int) -> bool:
        """Whether a save is due after `step` steps, by time or by steps, and none is in flight."""
        if self.config.mode == "off" or step == self.newest_step:
            return False
        elapsed = time.monotonic() - self.begin_time
        # The interval grows with the stall of the last save, so that saving costs at most the configured overhead.
        interval = max(self.config.seconds, self.stall_seconds / self.config.overhead)
        assert self.stager is not None
        by_time = self.config.seconds and elapsed >= interval and self.stager.ready()
        by_steps = self.config.every and step % self.config.every == 0
        if not (by_time or by_steps):
            return False
        if self.is_saving and self.snapshot_in_flight:
            return bool(by_steps)  # `save` waits for the snapshot; a save by time is due again after the next step
        if self.is_saving:
            self.skipped += 1
            self.begin_time = time.monotonic()  # count one skipped save per interval
            return False
        return True

    @property
    def is_saving(self) -> bool:
        return self.in_flight is not None and not self.in_flight.done()

    def save(self, metadata: CheckpointMetadata, wait: bool = False, memory: Store | None = None) -> list[SaveResult]:
        """Begin a save, or a snapshot in a store in `memory`. Returns the result of the previous save, and of this one
        if it is waited for.
        """
        results = self.wait()  # the previous save has completed on rank 0, and is about to on every other rank
        start = time.monotonic()
        self.begin_time = start if memory is None else self.begin_time
        self.last_progress = (self.progress_count, start)
        self.world.heartbeat.enter("save", metadata.step)
        faults.fail_point("save.stage", metadata.step)
        assert self.stager is not None
        staged = self.stager.copy(self.state())
        self.stall_seconds = time.monotonic() - start
        self.in_flight = self.thread.submit(self._save, metadata, self.stager, staged, memory)
        self.snapshot_in_flight = memory is not None
        if wait or (self.config.mode == "sync" and memory is None):
            results += self.wait()
            self.stall_seconds = results[-1].stall_seconds = time.monotonic() - start
        self.world.heartbeat.add_seconds({"save": self.stall_seconds})
        return results

    def block_update(self) -> None:
        """Make the update that follows on the device wait until the state of the save in flight is copied. Every write
        to a parameter or to optimizer state is preceded by this call.
        """
        if self.stager is not None:
            self.stager.block_update()

    def wait(self) -> list[SaveResult]:
        """Wait for the save in flight and return its result. Meanwhile the heartbeat beats as long as bytes are
        written, and shows whether only other ranks are incomplete.
        """
        if self.in_flight is None:
            return []
        while not self.in_flight.done():
            with suppress(TimeoutError):
                self.in_flight.exception(timeout=POLL_SECONDS)
            self.world.heartbeat.set_waiting(self.waits_for_ranks)
            if self._has_progressed():
                self.world.heartbeat.beat()
        self.world.heartbeat.set_waiting(False)
        result, self.in_flight = self.in_flight.result(), None
        assert self.stager is not None
        self.stall_seconds += self.stager.blocked_seconds()
        result.stall_seconds = self.stall_seconds
        result.skipped, self.skipped = self.skipped, 0
        if result.error is None and not result.in_memory:
            self.newest_step = result.step
        return [result]

    def stall_warning(self) -> str:
        """A message if the save in flight makes no progress, once per `stall_timeout`; else ''."""
        if self.in_flight is None or self.in_flight.done() or self._has_progressed() or self.waits_for_ranks:
            return ""
        now = time.monotonic()
        stalled = now - self.last_progress[1]
        if stalled < self.stall_timeout:
            return ""
        self.last_progress = (self.last_progress[0], now)
        return f"the save in flight has made no progress for {stalled:.0f} s"

    def _has_progressed(self) -> bool:
        """Whether bytes were written or verified since the last call, or an object store may still be sending some."""
        progress = self.progress_count + (self.writer.written_bytes if self.writer else 0)
        if progress == self.last_progress[0] and time.monotonic() >= getattr(self.store, "request_end", 0.0):
            return False
        self.last_progress = (progress, time.monotonic())
        return True

    def continue_from(self, manifest: Manifest, in_memory: bool = False) -> None:
        """Make the next checkpoint the child of the one that was restored, or that the restored snapshot followed."""
        self.parent, self.ordinal = manifest.parent, manifest.ordinal
        if not in_memory:
            self.parent, self.ordinal, self.newest_step = manifest.digest, manifest.ordinal + 1, manifest.step

    def close(self) -> None:
        self.thread.shutdown(wait=True)

    def _save(
        self, metadata: CheckpointMetadata, stager: HostStager, state: dict[str, LocalShard], memory: Store | None
    ) -> SaveResult:
        """The work of the thread. An error becomes part of the result: the training thread decides what it means."""
        start = time.monotonic()
        result = SaveResult(metadata.step, checkpoint_folder(metadata.step, self.attempt), in_memory=memory is not None)
        try:
            stager.wait()
            self._check_agreement(metadata, state, stager)
            run, timeline = self.lineage.run, self.lineage.timeline
            self.writer = ShardWriter(
                memory or self.store,
                result.folder,
                ShardOrigin(run, timeline, metadata.step, self.attempt, self.world.rank),
                (metadata.owner, metadata.owner_state),
                lambda parts, tensors: self._publish(metadata, result, parts, tensors, memory),
                self.block_sizes,
                self._wait_for_ranks,
            )
            dcp.save(
                as_planner_state(state),
                storage_writer=self.writer,
                planner=self.planner,
                process_group=self.group,
                no_dist=self.group is None,
            )
            self.waits_for_ranks = False
            result.published = True
            if memory is None:
                self.ordinal += 1
                self._verify_written(result.folder, self.writer)
                if self.world.rank == 0:
                    self._apply_retention(result)
        except MeshwrightError as error:
            result.error = error
        except (Exception, CheckpointException) as error:  # noqa: BLE001  CheckpointException is not an Exception
            result.error = to_save_error(error, result.folder, result.published)
        self.waits_for_ranks = False
        result.seconds = time.monotonic() - start
        return result

    def _wait_for_ranks(self) -> None:
        self.waits_for_ranks = True

    def _verify_written(self, folder: str, writer: ShardWriter) -> None:
        """Every rank reads its own shard and part back. Only after that may retention delete older checkpoints."""
        path = f"{folder}/{writer.file}"
        chunk, io_bytes = self.block_sizes.digest_bytes, self.block_sizes.io_bytes
        options = (self._count_progress, io_bytes, DIGEST_THREADS)
        damage = next(verify_file(self.store, path, writer.record, chunk, *options), None)
        damage = damage or verify_content(self.store, f"{folder}/{writer.part}", writer.part_content)
        damaged = [rank for rank, (flag,) in enumerate(self._all_gather(damage is not None)) if flag]
        if damaged:
            raise CheckpointError(
                f"rank {damaged[0]}: {folder} is published, but differs from what was written when read back: "
                f"{damage or 'its files'}"
            )

    def _all_gather(self, *numbers: int) -> list[list[int]]:
        """The numbers of every rank, by rank, over the process group of the saver."""
        local = torch.tensor(numbers, dtype=torch.int64)
        rows = [local]
        if self.group is not None:
            rows = [torch.zeros_like(local) for _ in range(self.world.size)]
            self.waits_for_ranks = True
            dist.all_gather(rows, local, group=self.group)
            self.waits_for_ranks = False
        return [row.tolist() for row in rows]

    def _apply_retention(self, result: SaveResult) -> None:
        """Delete expired checkpoints. A failure is recorded and does not fail the save, which is complete."""
        self.retention.verified.add(result.folder.rpartition("/")[2])
        try:
            result.deleted = self.retention.apply(self._count_progress)
        except Exception as error:  # noqa: BLE001  raised on rank 0 alone, so the save must still succeed on all ranks
            result.retention_error = f"older checkpoints could not be deleted: {error}"

    def _count_progress(self) -> None:
        self.progress_count += 1

    def _check_agreement(self, metadata: CheckpointMetadata, state: dict[str, LocalShard], stager: HostStager) -> None:
        """Before any rank writes: raise on every rank if one is not finite, or if replicas differ."""
        step = metadata.step
        nonfinite = first_nonfinite({name: shard.local for name, shard in state.items()})
        digests = stager.replicas.digests(stager.checksums)
        rows = self._all_gather(bool(nonfinite), *metadata.model_use, *digests)
        pipeline_ranks = [self.layout.coordinates(rank)["pipeline"] for rank in range(len(rows))]
        if error := use_error([ModelUse(*row[1:3]) for row in rows], pipeline_ranks, step - 1):
            raise error
        if failed := [rank for rank, row in enumerate(rows) if row[0]]:
            tensor = nonfinite if self.world.rank == failed[0] else "its state"
            raise NumericsError(
                f"rank {failed[0]} step {step}: {tensor} is not finite, and nothing was published",
                "try the records of earlier steps in events/",
            )
        if mismatch := stager.replicas.find_mismatch([row[3:] for row in rows]):
            raise mismatch.error(self.world.rank, step)

    def _publish(
        self,
        metadata: CheckpointMetadata,
        result: SaveResult,
        parts: dict[str, RecordedPart],
        tensors: dict[str, TensorRecord],
        memory: Store | None = None,
    ) -> None:
        """Publish the manifest, on the coordinator, once every shard and every part is durable."""
        self.waits_for_ranks = False
        faults.fail_point("save.before_manifest", metadata.step)
        if (newest := read_fence(self.store).attempt) > self.attempt:
            raise BusyError(
                f"attempt {newest} has taken over the run: the checkpoint of attempt {self.attempt} is not published"
            )
        manifest = Manifest(
            run=self.lineage.run,
            timeline=self.lineage.timeline,
            step=metadata.step,
            attempt=self.attempt,
            ordinal=self.ordinal,
            parent=self.parent,
            tensors=tensors,
            parts=parts,
            chunk=self.block_sizes.digest_bytes,
            **self.attempt_fields,
            **metadata.shared_fields,
        )
        manifest.validate()
        raw = manifest.encode()
        if len(raw) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"the manifest of {result.folder} has {len(raw):,} bytes, more than {MAX_MANIFEST_BYTES:,}"
            )
        before_publish = lambda: faults.fail_point("save.before_publish", metadata.step)  # noqa: E731
        # The checkpoint comes into existence here: before this call there is none, after it there is a complete one.
        if not (memory or self.store).publish_if_absent(f"{result.folder}/{MANIFEST_FILE}", raw, before_publish):
            raise CheckpointError(f"{result.folder} exists already and is not overwritten")
        result.published = True
        faults.fail_point("save.after_publish", metadata.step)
        if memory is None:
            self.parent = recorded_digest(raw)
        result.bytes = manifest.total_bytes
