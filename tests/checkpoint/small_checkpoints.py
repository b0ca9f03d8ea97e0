"""Checkpoints so small that a test can break every byte of them."""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from turns import Turns

from meshwright.checkpoint.listing import CheckpointEntry, RunLineage, checkpoint_folder, list_published
from meshwright.checkpoint.manifest import DIGEST_CHUNK_BYTES
from meshwright.checkpoint.saver import CheckpointMetadata, CheckpointSaver, SaveResult
from meshwright.checkpoint.shards import ShardWriter
from meshwright.checkpoint.state import CheckpointState, parameters_digest
from meshwright.checkpoint.unsharded import state_digest
from meshwright.checkpoint.verify import find_damage, shard_header
from meshwright.config import CheckpointConfig
from meshwright.parallel.world import World
from meshwright.store.posix import PosixStore

LINEAGE = RunLineage("0123abcd", 1, {})
FACTS = {"layout": {"replicate": 1}, "identity": {"seed": 0, "eps": 1e-08}, "made_by": {"torch": "2"}}


def state_of(step: int) -> CheckpointState:
    """Three kinds of tensor, all of it other numbers at another step."""
    numbers = torch.arange(60, dtype=torch.float32) / 7 + step
    return {
        "model/weight": numbers.reshape(12, 5).clone(),
        "model/half": numbers[:33].to(torch.bfloat16),
        "buffer/seen": torch.tensor([step, 2**40 + step]),
        "optimizer/weight/step": torch.tensor(float(step)),
    }


def digest_at(step: int) -> str:
    return parameters_digest(state_of(step).items())


def notes_at(step: int) -> CheckpointMetadata:
    common = {"data": {"next": step}, "rng": {"0": step}, "schedule": {"lr": 0.1}, "scaler": {}, "counters": {}}
    return CheckpointMetadata(step, common, "0", {"noise": 0.30000000000000004})


def saver_at(
    step: int, store, attempt: int = 1, keep: int = 1, every: int = 0, lineage=LINEAGE, **facts
) -> CheckpointSaver:
    config = CheckpointConfig(mode="sync", keep=keep, keep_every=every)
    return CheckpointSaver(config, store, World(), lineage, attempt, FACTS | facts, lambda: state_of(step))


def save(step: int, store, parent: CheckpointEntry | None = None, **how) -> SaveResult:
    """One rank's save, as a run makes it; a failure is raised. Its ordinal follows on that of `parent`."""
    saver = saver_at(step, store, **how)
    if parent is not None:
        saver.continue_from(parent.manifest)
    try:
        (saved,) = saver.save(notes_at(step))
    finally:
        saver.close()
    if saved.error is not None:
        raise saved.error
    return saved


def save_on_two_ranks(
    step: int, store, attempt: int = 1, seed: int = 0, chunk: int = DIGEST_CHUNK_BYTES, **how
) -> SaveResult:
    """Two ranks' shards, written in an order that `seed` decides, published by the first."""
    saver = saver_at(step, store, attempt, chunk=chunk, **how)
    saver.close()
    notes, saved = notes_at(step), SaveResult(step, checkpoint_folder(step, attempt))
    planners = [DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False) for _ in range(2)]
    for rank, planner in enumerate(planners):
        planner.set_up_planner(state_of(step), is_coordinator=rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    writers = [
        ShardWriter(
            PosixStore(store.root, store.calls),  # each process has its own
            saved.folder,
            rank,
            step,
            shard_header(saver.lineage.run, saver.lineage.timeline, step, attempt, rank),
            (str(rank), notes.owner_state),
            lambda *parts: saver._publish(notes, saved, *parts),
            chunk,
        )
        for rank in range(2)
    ]
    works = [
        partial(writers[rank].write_data, planners[rank].finish_plan(plans[rank]), planners[rank]) for rank in (0, 1)
    ]
    results = [done.value() for done in Turns(seed).run(works, store.calls)]
    writers[0].finish(metadata, results)
    saved.deleted = saver.retention.apply()
    return saved


def intact_steps(store: PosixStore, why: object = "") -> set[int]:
    """The steps of a run's checkpoints, after asserting that each is whole and holds exactly its step's tensors."""
    listed = list_published(store)
    for entry in listed:
        assert not find_damage(entry), (why, entry.name, entry.problem, find_damage(entry))
        assert state_digest(entry) == digest_at(entry.step), (why, entry.name)
    return {entry.step for entry in listed}


def newest(store: PosixStore) -> CheckpointEntry:
    return list_published(store)[0]
