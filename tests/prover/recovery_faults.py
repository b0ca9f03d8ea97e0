"""Seeded faults of checkpoints and restarts: each patches one line of saving, restoring or resuming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from meshwright.base.checkpoint import manifest as manifest_module
from meshwright.base.checkpoint.listing import list_attempts, list_checkpoint_folders
from meshwright.base.records.events import EventLog
from meshwright.base.store.posix import PosixCalls, PosixSink
from meshwright.core.checkpoint import restore as restore_module
from meshwright.core.checkpoint import verify as verify_module
from meshwright.core.checkpoint.retention import RetentionPolicy
from meshwright.core.checkpoint.shards import ShardReader, ShardWriter
from meshwright.core.checkpoint.stager import HostStager
from meshwright.core.optim.interface import Optimizer
from meshwright.core.parallel.local_shard import local_shard
from meshwright.core.trainer import loop as loop_module
from meshwright.core.trainer.loop import Training
from meshwright.core.trainer.numerics import NoiseScale
from meshwright.core.trainer.precision import LossScale
from meshwright.core.trainer.records.step_recorder import StepRecorder

CONTENT = "every checkpoint has"
RESTORED = "a restart restores bit for bit"
STEPS = "every step after a restart"
EVENTS = "every step and every evaluation is recorded"
RESTARTS = "a run killed with SIGKILL"
DAMAGE = "a damaged checkpoint is never loaded"
RESHARD = "a restart from"
LARGE = "shards are written and read"
COMPLETES = "a run that saves after every step completes"

KILLS, DAMAGED, FILES = "kills", "damaged", "files"
"""The parts of the check that a fault is run against."""


@dataclass(frozen=True)
class RecoveryFault:
    part: str
    options: tuple[str, ...]
    claim: str
    """A part of the claim that must fail."""
    expected: str
    """A part of what is measured for it."""
    inject: Callable[[pytest.MonkeyPatch], None]


FAULTS: dict[str, RecoveryFault] = {}
"""Every seeded fault, by its name."""


def wrap(patch, owner, name, wrong):
    """Calls `wrong(right, *args)` instead of `right(*args)`."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **options: wrong(right, *args, **options))


def fault(part: str, claim: str, expected: str, *options: str) -> Callable:
    def register(inject: Callable) -> Callable:
        FAULTS[inject.__name__.replace("_", " ")] = RecoveryFault(part, options, claim, expected, inject)
        return inject

    return register


@fault(KILLS, CONTENT, "tensors differ")  # from those of every step, if the writer reads them during an update
def staging_by_reference(patch):
    """An asynchronous save writes the live tensors."""
    wrap(patch, HostStager, "copy", lambda _right, self, state: {name: local_shard(state[name]) for name in self.host})


@fault(KILLS, CONTENT, "their content is that of step 0; only optimizer moments differ")
def moments_are_staged_one_save_late(patch):
    def copy(right, self, state):
        before = {name: host.local.clone() for name, host in self.host.items() if name.startswith("optimizer/")}
        right(self, state)
        return {name: host.with_local(before[name]) if name in before else host for name, host in self.host.items()}

    wrap(patch, HostStager, "copy", copy)


@fault(KILLS, RESTORED, "counter ")
def counters_are_reset_by_a_restart(patch):
    patch.setattr(StepRecorder, "restore", lambda self, counters: None)


@fault(KILLS, RESTORED, "counter in_a_row")
def skips_in_a_row_are_forgotten(patch):
    wrap(patch, StepRecorder, "restore", lambda right, self, counters: right(self, counters | {"in_a_row": 5}))


@fault(KILLS, RESTORED, "noise scale", "--layout.replicate=2")
def noise_scale_is_not_restored(patch):
    patch.setattr(NoiseScale, "restore", lambda self, values: None)


@fault(KILLS, RESTORED, "counter evaluations")
def evaluations_are_recorded_twice(patch):
    def restore(right, self, counters):
        right(self, counters | {"evaluations": counters["evaluations"] * 2})

    wrap(patch, StepRecorder, "restore", restore)


@fault(KILLS, STEPS, "differs first in seed")
def seeds_depend_on_the_attempt(patch):
    def build(right, self):
        step = right(self)
        step.context.seed += self.job.restart
        return step

    wrap(patch, Training, "_build_step", build)


@fault(KILLS, STEPS, "learning rate (expected")
def learning_rate_schedule_restarts(patch):
    def run_step(right, self):
        first, rate = self.first_step, self.resume.learning_rate
        self.resume.learning_rate = lambda step, steps=None: rate(step - first, steps)
        try:
            right(self)
        finally:
            self.resume.learning_rate = rate

    wrap(patch, Training, "run_step", run_step)


@fault(KILLS, STEPS, "differs first in inputs")
def resume_skips_one_step_of_the_stream(patch):
    wrap(
        patch,
        loop_module.Loader,
        "steps",
        lambda right, self, first, end: right(self, first + (first > 0), end + (first > 0)),
    )


@fault(KILLS, RESTARTS, "had been published")
def retention_deletes_the_newest(patch):
    def apply(right, self, *args):
        entries = [e for e in list_checkpoint_folders(self.store) if e.published]
        for entry in entries[:-1][:1]:
            self.delete(entry)
        return right(self, *args)

    wrap(patch, RetentionPolicy, "apply", apply)


@fault(KILLS, RESTARTS, "attempt 4 restored no checkpoint")
def attempt_starts_from_step_0_although_a_checkpoint_exists(patch):
    def published(right, store, *args):
        return [] if len(list_attempts(store)) == 4 else right(store, *args)

    wrap(patch, restore_module, "list_published", published)


@fault(KILLS, EVENTS, "is not recorded")
def evaluations_after_a_restart_are_not_recorded(patch):
    def write(right, self, kind, **fields):
        if kind != "eval" or self._common["attempt"] == 1:
            right(self, kind, **fields)

    wrap(patch, EventLog, "write", write)


@fault(DAMAGED, RESHARD, "was restored, and the newest checkpoint is")
def another_layout_restores_an_older_checkpoint(patch):
    def published(right, store, *args):
        return right(store, *args)[len(list_attempts(store)) == 3 :]

    wrap(patch, restore_module, "list_published", published)


@fault(DAMAGED, COMPLETES, "checkpoints of 13 steps were published")
def retention_keeps_one_checkpoint(patch):
    def apply(_right, self, *_args):
        for entry in list_checkpoint_folders(self.store)[1:]:
            self.delete(entry)
        return []

    wrap(patch, RetentionPolicy, "apply", apply)


@fault(KILLS, RESTORED, "only optimizer moments differ")
def moments_are_not_restored(patch):
    def load(right, entry, state, *args):
        moments = {n: local_shard(t).local.clone() for n, t in state.items() if n.startswith("optimizer/")}
        right(entry, state, *args)
        for name, before in moments.items():
            local_shard(state[name]).local.copy_(before)

    wrap(patch, restore_module, "load_tensors", load)


@fault(KILLS, CONTENT, "gradient scaler", "--precision.compute=fp16")
def scaler_is_not_saved(patch):
    patch.setattr(LossScale, "to_json", lambda self: {"scale": 65536.0, "finite_steps": 0})


@fault(KILLS, RESTORED, "gradient scaler", "--precision.compute=fp16")
def scaler_is_not_restored(patch):
    patch.setattr(LossScale, "restore", lambda self, values: None)


@fault(KILLS, RESTORED, "only offloaded copies differ", "--optimizer.cpu_offload=true", "--checkpoint.mode=sync")
def offloaded_copies_are_not_refreshed(patch):
    patch.setattr(Optimizer, "refresh_offloaded", lambda self: None)


@fault(DAMAGED, CONTENT, "router.bias is missing", "--model.experts=4", "--model.router_bias_rate=0.01")
def router_bias_is_not_saved(patch):
    def collect(right, *args):
        return {name: tensor for name, tensor in right(*args).items() if not name.endswith("router.bias")}

    wrap(patch, loop_module, "collect_state", collect)


@fault(DAMAGED, CONTENT, "overlap or are not aligned")
def shard_is_written_at_the_previous_offset(patch):
    def region(right, self, item, start, length):
        at = right(self, item, start, length)
        before, self.before = getattr(self, "before", at), at
        return replace(at, start=before.start)

    wrap(patch, ShardWriter, "_region", region)


@fault(DAMAGED, DAMAGE, "one flipped bit in a tensor")
def digest_covers_the_first_chunk_only(patch):
    """Both verifications compare only the first digest of a file."""

    def verify(right, store, path, record, *args):
        return (damage for damage in right(store, path, record, *args) if damage.chunk in (0, verify_module.WHOLE_FILE))

    wrap(patch, verify_module, "verify_file", verify)

    def read_chunk(right, self, file, index, buffer):
        return read_unverified(self, file, index) if index else right(self, file, index, buffer)

    wrap(patch, ShardReader, "_read_chunk", read_chunk)


def read_unverified(reader, file, index):
    chunk = reader.manifest.chunk
    content = reader.entry.store.read(f"{reader.entry.folder}/{file}", index * chunk, chunk)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@fault(DAMAGED, DAMAGE, "one flipped bit in the manifest")
def manifest_digest_is_not_compared(patch):
    import json

    def decode(right, cls, raw):
        values = json.loads(raw)
        values["digest"] = manifest_module.canonical_digest({k: v for k, v in values.items() if k != "digest"})
        return right(manifest_module.serialize({k: v for k, v in values.items() if k != "digest"}, values["digest"]))

    right = manifest_module.Manifest.decode
    patch.setattr(manifest_module.Manifest, "decode", classmethod(lambda cls, raw: decode(right, cls, raw)))


@fault(DAMAGED, DAMAGE, "was restored in spite of")
def files_are_not_verified_before_they_are_loaded(patch):
    patch.setattr(restore_module, "find_damage", lambda *args: [])

    patch.setattr(ShardReader, "_read_chunk", lambda self, file, index, _buffer: read_unverified(self, file, index))


@fault(DAMAGED, RESHARD, "restored from step-00000013")
def resharding_reads_the_region_from_its_start(patch):
    """A rank that needs the second part of a stored region copies the first part."""

    def read_data(right, self, plan, planner):
        items = [replace(item, storage_offsets=torch.Size([0] * len(item.storage_offsets))) for item in plan.items]
        return right(self, replace(plan, items=items), planner)

    wrap(patch, ShardReader, "read_data", read_data)


@fault(DAMAGED, RESHARD, "model/decoder.blocks.", "--model.layers=12")
def blocks_from_ten_on_are_restored_by_the_order_of_their_names(patch):
    """On another layout, the blocks of a checkpoint are assigned in alphabetical order."""
    import re

    def regions(right, self, entry, *args):
        right(self, entry, *args)
        if entry.manifest.layout.get("tensor", 1) > 1 or self.manifest.attempt < 2:
            return
        blocks = sorted({int(m[1]) for name in self.tensors if (m := re.search(r"blocks\.(\d+)\.", name))})
        wrong = dict(zip(blocks, sorted(blocks, key=str), strict=True))
        self.regions = {
            (re.sub(r"blocks\.(\d+)\.", lambda m: f"blocks.{wrong[int(m[1])]}.", name), offset): region
            for (name, offset), region in self.regions.items()
        }

    wrap(patch, ShardReader, "__init__", regions)


@fault(DAMAGED, RESHARD, "model/head.weight", "--model.tie=true")
def tied_head_is_not_tied_again(patch):
    """After a restore the head is a copy of what the embedding was initialized with."""

    def restore(right, self):
        before = self.module.decoder.embedding.weight.detach().clone()
        done = right(self)
        if done:
            self.module.head.weight = torch.nn.Parameter(before)
        return done

    wrap(patch, Training, "_restore", restore)


@fault(FILES, LARGE, "is not at offset")
def offsets_are_32_bit_integers(patch):
    def region(right, self, item, start, length):
        at = right(self, item, start, length)
        return replace(at, start=int(np.uint32(at.start & 0xFFFFFFFF)))

    wrap(patch, ShardWriter, "_region", region)


@fault(FILES, LARGE, "4,29")
def reads_wrap_at_four_gib(patch):
    wrap(patch, PosixCalls, "read", lambda right, self, path, start, n: right(self, path, start & 0xFFFFFFFF, n))


@fault(FILES, LARGE, "is not at offset")
def last_block_is_not_written_if_the_file_ends_with_it(patch):
    def close(right, self):
        self.filled -= 4096 if self.filled and self.filled % 4096 == 0 else 0
        right(self)

    wrap(patch, PosixSink, "close", close)
