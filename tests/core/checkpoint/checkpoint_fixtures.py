"""Small checkpoints for tests that corrupt every byte, on one rank or on two simulated ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from meshwright.base.block_sizes import BLOCK_SIZES, BlockSizes
from meshwright.base.checkpoint.format.canonical import canonical_digest, serialize
from meshwright.base.checkpoint.format.manifest_parts import ShardOrigin
from meshwright.base.checkpoint.listing import CheckpointEntry, RunLineage, checkpoint_folder, list_published
from meshwright.base.checkpoint.manifest import MANIFEST_FILE
from meshwright.base.config import CheckpointConfig
from meshwright.base.store.posix import PosixStore
from meshwright.core.checkpoint.saver import CheckpointMetadata, CheckpointSaver, SaveResult
from meshwright.core.checkpoint.shards import ShardWriter
from meshwright.core.checkpoint.state import CheckpointState, parameters_digest
from meshwright.core.checkpoint.unsharded import state_digest
from meshwright.core.checkpoint.verify import find_damage
from meshwright.core.parallel.world import World
from tests.core.checkpoint.thread_scheduler import ThreadScheduler

LINEAGE = RunLineage("0123abcd", 1, {})
ATTEMPT_FIELDS = {"layout": {"replicate": 1}, "identity": {"seed": 0, "eps": 1e-08}, "made_by": {"torch": "2"}}


def state_at(step: int) -> CheckpointState:
    """Tensors of several dtypes whose values all depend on the step."""
    numbers = torch.arange(60, dtype=torch.float32) / 7 + step
    return {
        "model/weight": numbers.reshape(12, 5).clone(),
        "model/half": numbers[:33].to(torch.bfloat16),
        "buffer/seen": torch.tensor([step, 2**40 + step]),
        "optimizer/weight/step": torch.tensor(float(step)),
    }


def digest_at(step: int) -> str:
    return parameters_digest(state_at(step).items())


def metadata_at(step: int) -> CheckpointMetadata:
    """Values as a run saves them."""
    position = {"step": step, "position": step, "epoch": 0, "next": [step]}
    counters = {"bad_samples": 0, "skipped": 0, "in_a_row": 0, "loss": None, "evaluations": []}
    shared_fields = {"data": position, "rng": {"data/0": step}, "schedule": {"lr": 0.1}, "scaler": {}}
    noise = {"signal": 0.30000000000000004, "noise": 1.0}
    return CheckpointMetadata(step, shared_fields | {"counters": counters}, "data/0", {"noise": noise})


def saver_at(
    step: int,
    store,
    attempt: int = 1,
    keep: int = 1,
    every: int = 0,
    lineage=LINEAGE,
    block_sizes: BlockSizes = BLOCK_SIZES,
    **fields,
) -> CheckpointSaver:
    config = CheckpointConfig(mode="sync", keep=keep, keep_every=every)
    fields = ATTEMPT_FIELDS | fields
    state = lambda: state_at(step)  # noqa: E731
    return CheckpointSaver(config, store, World(), lineage, attempt, fields, state, block_sizes=block_sizes)


def save(step: int, store, parent: CheckpointEntry | None = None, **options) -> SaveResult:
    """Save on one rank, and raise the error of a failed save. `parent` is the previous checkpoint."""
    saver = saver_at(step, store, **options)
    if parent is not None:
        saver.continue_from(parent.manifest)
    try:
        (saved,) = saver.save(metadata_at(step))
    finally:
        saver.close()
    if saved.error is not None:
        raise saved.error
    return saved


def save_on_two_ranks(
    step: int, store, attempt: int = 1, seed: int = 0, block_sizes: BlockSizes = BLOCK_SIZES, **options
) -> SaveResult:
    """Write the shards of two ranks, their system calls interleaved by `seed`; rank 0 publishes."""
    saver = saver_at(step, store, attempt, block_sizes=block_sizes, **options)
    saver.close()
    metadata, saved = metadata_at(step), SaveResult(step, checkpoint_folder(step, attempt))
    planners = [DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False) for _ in range(2)]
    for rank, planner in enumerate(planners):
        planner.set_up_planner(state_at(step), is_coordinator=rank == 0)
    plans, dcp_metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    writers = [
        ShardWriter(
            PosixStore(store.root, store.calls),  # each process has its own store
            saved.folder,
            ShardOrigin(saver.lineage.run, saver.lineage.timeline, step, attempt, rank),
            (str(rank), metadata.owner_state),
            lambda *records: saver._publish(metadata, saved, *records),
            block_sizes,
        )
        for rank in range(2)
    ]
    tasks = [
        partial(writers[rank].write_data, planners[rank].finish_plan(plans[rank]), planners[rank]) for rank in (0, 1)
    ]
    results = [future.value() for future in ThreadScheduler(seed).run(tasks, store.calls)]
    writers[0].finish(dcp_metadata, results)
    saved.deleted = saver.retention.apply()
    return saved


def as_format_1(folder: Path) -> None:
    """Rewrite a checkpoint folder as version 1 of the format had it: the manifest contains what the parts have."""
    values = json.loads((folder / MANIFEST_FILE).read_bytes())
    del values["digest"]
    files, owners = {}, {}
    for tensor in values["tensors"].values():
        tensor["pieces"] = []
    for name in values.pop("parts"):
        part = json.loads((folder / name).read_bytes())
        files[part["file"]] = {"size": part["size"], "chunks": part["chunks"]}
        owners[part["owner"]] = part["state"]
        for tensor, regions in part["tensors"].items():
            values["tensors"][tensor]["pieces"] += [region | {"file": part["file"]} for region in regions]
        (folder / name).unlink()
    values |= {"format": 1, "owners": owners, "files": files}
    (folder / MANIFEST_FILE).write_bytes(serialize(values, canonical_digest(values)))


def intact_steps(store: PosixStore, context: object = "") -> set[int]:
    """The steps of the published checkpoints; asserts that each is intact and has exactly the tensors of its step."""
    entries = list_published(store)
    for entry in entries:
        assert not find_damage(entry), (context, entry.name, entry.problem, find_damage(entry))
        assert state_digest(entry) == digest_at(entry.step), (context, entry.name)
    return {entry.step for entry in entries}


def newest(store: PosixStore) -> CheckpointEntry:
    return list_published(store)[0]
