"""The cost of a checkpoint in an S3 server relative to DCP with s3fs, on the same state, in interleaved rounds.

The server is moto, on the same machine: it takes a part of the CPU, and there is no network. In a round both methods
save the state once, in a shuffled order, each after the other has ended. The stall is the time for which training
waits; the total lasts until the checkpoint exists. Meshwright computes digests while it writes, and reads every byte
back afterwards, which is reported apart: DCP does neither.
"""

from __future__ import annotations

import importlib.util
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.checkpoint import LINEAGE, barrier, make_state, metadata, ratio_of_seconds, slowest_rank
from benchmarks.s3_server import BUCKET, environment, missing_packages, s3_server
from meshwright.base.config import CheckpointConfig
from meshwright.base.store.object_store import ObjectStore
from meshwright.core.checkpoint.saver import CheckpointSaver
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.world import World

ROUNDS = {1: 8, 2: 8}
"""The number of rounds after a first one that is not counted, by the number of ranks."""
MESHWRIGHT, DCP = "meshwright", "dcp + s3fs"
TARGETS = {"stall": 1.0, "total": 1.0}
"""The largest ratio of seconds to DCP with s3fs."""

Seconds = dict[str, list[float]]


def measure() -> dict[str, Any] | None:
    missing = missing_packages() + [name for name in ("s3fs",) if importlib.util.find_spec(name) is None]
    if missing:
        report(f"not measured, because these packages are not installed: {', '.join(missing)}")
        return None
    result: dict[str, Any] = {"server": "moto, on this machine", "ranks": {}}
    for ranks in ROUNDS:
        report(f"{ranks} rank(s)")
        with s3_server() as port:  # a new one: it keeps all objects in memory
            os.environ.update(environment(port))
            by_rank = run_ranks(race, ranks, timeout=600.0)
        result["state"] = by_rank[0]["state"]
        parts = {key: slowest_rank([rank[key] for rank in by_rank]) for key in ("stall", "total", "read_back")}
        row: dict[str, Any] = {}
        for key in TARGETS:
            row[f"{key}_ms"] = {name: spread(values) for name, values in parts[key].items()}
            row[f"{key}_ratio"] = ratio_of_seconds(parts[key][MESHWRIGHT], parts[key][DCP])
        row["read_back_ms"] = spread(parts["read_back"][MESHWRIGHT])
        result["ranks"][ranks] = row
    return result


def race(world: World) -> dict[str, Any]:
    """On each rank: the seconds of both methods by round, without the first."""
    os.dup2(2, 1)  # standard output is for the result
    state = make_state()
    methods = {MESHWRIGHT: meshwright_saver(world, state), DCP: dcp_saver(world, state)}
    seconds: dict[str, Seconds] = {key: {name: [] for name in methods} for key in ("stall", "total", "read_back")}
    order = list(methods)
    for number in range(ROUNDS[world.size] + 1):
        random.Random(number).shuffle(order)  # equal on every rank
        for name in order:
            barrier(world)
            times = methods[name](number)
            barrier(world)
            for key, value in zip(seconds, times, strict=True):
                seconds[key][name] += [value] if number else []
    size = sum(tensor.nbytes for tensor in state.values()) / 1e6
    return {"state": {"tensors": len(state), "megabytes": round(size, 1)}, **seconds}


def meshwright_saver(world: World, state: dict[str, torch.Tensor]) -> Callable[[int], tuple[float, ...]]:
    """Saves once; returns the stall, the time until the checkpoint exists, and that of reading it back."""
    store = ObjectStore(f"s3://{BUCKET}/meshwright")
    fields: dict[str, Any] = {"layout": {}, "identity": {}, "made_by": {}}
    config = CheckpointConfig(mode="async", keep=1)
    saver = CheckpointSaver(config, store, world, LINEAGE, 1, fields, lambda: dict(state))
    publish, published = store.publish_if_absent, [0.0]

    def publish_and_stamp(*args: Any) -> bool:
        done = publish(*args)
        published[0] = time.perf_counter()
        return done

    store.publish_if_absent = publish_and_stamp  # type: ignore[method-assign]

    def save(number: int) -> tuple[float, ...]:
        published[0] = begin = time.perf_counter()  # rank 0 publishes
        saver.save(metadata(number + 1))
        stall = time.perf_counter() - begin
        for saved in saver.wait():
            if saved.error is not None:
                raise saved.error
        end = time.perf_counter()
        if world.rank:  # only rank 0 knows when the manifest was published
            return stall, stall, 0.0
        return stall, published[0] - begin, end - published[0]

    return save


def dcp_saver(world: World, state: dict[str, torch.Tensor]) -> Callable[[int], tuple[float, ...]]:
    """Saves once with DCP's asynchronous save and its writer for fsspec."""
    import s3fs
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    group = dist.new_group(backend="gloo") if world.size > 1 else None
    stager = DefaultStager(StagingOptions(False, False, False, False))  # reused, with its buffers

    def save(number: int) -> tuple[float, ...]:
        path = f"s3://{BUCKET}/dcp/{number}"
        begin = time.perf_counter()
        writing = dcp.async_save(
            dict(state),
            storage_writer=FsspecWriter(path, sync_files=False),
            async_stager=stager,
            process_group=group,
            no_dist=group is None,
        )
        stall = time.perf_counter() - begin
        writing.result()
        total = time.perf_counter() - begin
        barrier(world)
        if world.rank == 0:
            s3fs.S3FileSystem().rm(path, recursive=True)
        return stall, total, 0.0

    return save


def spread(seconds: list[float]) -> dict[str, float]:
    """The median, the smallest and the largest value in milliseconds."""
    values = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    return {name: round(value * 1e3, 1) for name, value in values.items()}


def report(progress: str) -> None:
    print(f"object_store: {progress}", file=sys.stderr, flush=True)
