"""The cost of a checkpoint relative to torch.save and DCP, on the same state, in interleaved rounds.

The state is the parameters of a decoder and their AdamW moments. In a round every method saves (or loads) it once, in
a shuffled order, each after the previous one has finished its writes; a result is the median over rounds of the ratio
within a round. Of an asynchronous save the call is timed, for which training waits. `torch.save` is timed as it is
commonly used, without an fsync. All files that are loaded are in the page cache: the disk is not compared.

A larger state is saved beside a plain write of the same bytes with an fsync: both are durable when they end.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.peer_components import make_adamw
from benchmarks.throughput import ratio_statistics
from meshwright.base.checkpoint.listing import RunLineage
from meshwright.base.config import CheckpointConfig, ModelConfig, OptimizerConfig
from meshwright.base.store.posix import PosixStore
from meshwright.core.checkpoint.restore import restore
from meshwright.core.checkpoint.saver import CheckpointMetadata, CheckpointSaver
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.models.init import build_model
from meshwright.core.parallel.world import World

MODEL = ModelConfig(vocab=4096, width=512, layers=3, heads=8, kv_heads=4, ffn=1408, tie=True)
ROUNDS = {1: {"save": 16, "load": 24}, 2: {"save": 12, "load": 16}}
"""The number of rounds, by the number of ranks."""
DIGEST_SAVES = 16
"""The number of synchronous saves in which digests are timed."""

LINEAGE = RunLineage("bench", 1, {})
MESHWRIGHT, TORCH_SAVE, ASYNC_SAVE, LOAD = "meshwright", "torch.save", "dcp.async_save", "dcp.load"
TARGETS = {TORCH_SAVE: 0.25, ASYNC_SAVE: 1.0, LOAD: 1.25}
"""The largest ratio of seconds to each peer: of the stall of a save, and of a restore with verification."""
MAX_DIGEST_SHARE = 0.05
"""The largest share of a synchronous save that may be spent on digests."""
RATE_BYTES, RATE_ROUNDS = 1 << 30, 5
"""The size of the state whose rates are measured, and how often it is saved."""
MIN_WRITE_RATIO = 0.9
"""The smallest ratio of the rate of a save, until its checkpoint exists, to that of a plain write with an fsync."""
DIGEST_FUNCTIONS = ("xxh3_64_intdigest", "xxh3_128")
"""The functions of xxhash that a save calls: to compare replicas, and to write shards and read them back."""

Seconds = dict[str, list[float]]
Finish = Callable[[], object]


def measure() -> dict[str, Any]:
    result: dict[str, Any] = {"ranks": {}}
    for ranks in ROUNDS:
        report(f"{ranks} rank(s)")
        with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
            by_rank = run_ranks(race, ranks, Path(folder), timeout=600.0)
        slowest = {key: slowest_rank([result[key] for result in by_rank]) for key in ("save", "load")}
        stall = {name: values[1:] for name, values in slowest["save"].items()}
        result["state"] = by_rank[0]["state"]
        result["ranks"][ranks] = {
            "stall_ms": milliseconds(stall),
            "first_stall_ms": milliseconds({name: values[:1] for name, values in slowest["save"].items()}),
            "stall_ratio_to": {
                name: ratio_of_seconds(stall[MESHWRIGHT], stall[name]) for name in (TORCH_SAVE, ASYNC_SAVE)
            },
            "restore_ms": milliseconds(slowest["load"]),
            "restore_ratio_to": {LOAD: ratio_of_seconds(slowest["load"][MESHWRIGHT], slowest["load"][LOAD])},
        }
    report("digests")
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        result["digests"] = run_ranks(measure_digests, 1, Path(folder), timeout=300.0)[0]
    report("rates")
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        result["rates"] = run_ranks(measure_rates, 1, Path(folder), timeout=600.0)[0]
    return result


def race(world: World, folder: Path) -> dict[str, Any]:
    """On each rank: the seconds of every method by round, including the first save."""
    os.dup2(2, 1)  # standard output is for the result
    state, rounds = make_state(), ROUNDS[world.size]
    size = sum(tensor.nbytes for tensor in state.values()) / 1e6
    group = dist.new_group(backend="gloo") if world.size > 1 else None
    gc.collect()
    gc.freeze()
    return {
        "state": {"tensors": len(state), "megabytes": round(size, 1)},
        "save": run_rounds(world, savers(world, folder, state, group), rounds["save"] + 1),
        "load": run_rounds(world, loaders(world, folder, state, group), rounds["load"]),
    }


def make_state() -> dict[str, torch.Tensor]:
    """The parameters of a model and the state of its optimizer after one step."""
    model = build_model(MODEL, 0)
    optimizer = make_adamw(model, OptimizerConfig())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state |= {f"optimizer/{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return state


def run_rounds(world: World, methods: dict[str, Callable[[int], Finish]], rounds: int) -> Seconds:
    """The seconds of each method by round. A method returns a function that completes it, which is not timed."""
    order = list(methods)
    seconds: Seconds = {name: [] for name in order}
    for number in range(rounds):
        random.Random(number).shuffle(order)  # equal on every rank
        for name in order:
            barrier(world)
            start = time.perf_counter()
            finish = methods[name](number)
            seconds[name].append(time.perf_counter() - start)
            finish()
            barrier(world)
    return seconds


def savers(
    world: World, folder: Path, state: dict[str, torch.Tensor], group: Any
) -> dict[str, Callable[[int], Finish]]:
    """Each method begins a save and returns a function that waits until it is durable."""
    saver = make_saver(world, folder, state, "async")
    stager = DefaultStager(StagingOptions(False, False, False, False))  # reused, with its buffers

    def meshwright_save(number: int) -> Finish:
        saver.save(metadata(number + 1))

        def finish() -> None:
            for saved in saver.wait():
                if saved.error is not None:
                    raise saved.error

        return finish

    def torch_save(number: int) -> Finish:
        path = folder / f"{number}.pt"
        if world.rank == 0:  # the other ranks have replicas
            torch.save(state, path)

        def finish() -> None:
            if world.rank == 0:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
                path.unlink()

        return finish

    def async_save(number: int) -> Finish:
        path = folder / f"dcp-{number}"
        writing = dcp.async_save(
            dict(state),
            storage_writer=FileSystemWriter(path),
            async_stager=stager,
            process_group=group,
            no_dist=group is None,
        )

        def finish() -> None:
            writing.result()
            barrier(world)
            if world.rank == 0:
                shutil.rmtree(path)

        return finish

    return {MESHWRIGHT: meshwright_save, TORCH_SAVE: torch_save, ASYNC_SAVE: async_save}


def loaders(
    world: World, folder: Path, state: dict[str, torch.Tensor], group: Any
) -> dict[str, Callable[[int], Finish]]:
    """Each method loads the full state from files in the page cache; the result is checked once before timing."""
    path = folder / "dcp"
    dcp.save(dict(state), storage_writer=FileSystemWriter(path), process_group=group, no_dist=group is None)

    def meshwright_restore(_number: int) -> Finish:
        load_newest(world, folder, state)
        return no_op

    def load(_number: int) -> Finish:
        reader = FileSystemReader(path)
        dcp.load(dict(state), storage_reader=reader, process_group=group, no_dist=group is None)
        return no_op

    expected = {name: tensor.clone() for name, tensor in state.items()}
    for method in (meshwright_restore, load):
        for tensor in state.values():
            tensor.data.zero_()
        method(0)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    return {MESHWRIGHT: meshwright_restore, LOAD: load}


def load_newest(world: World, folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Restores the newest checkpoint into the state; every byte is verified."""
    result = restore(
        PosixStore(folder), world, LINEAGE, state, lambda _manifest: None, fallback=False, on_damaged=lambda *_: None
    )
    assert result is not None


def make_saver(world: World, folder: Path, state: dict[str, torch.Tensor], mode: Any) -> CheckpointSaver:
    """A saver as the trainer creates it, with empty metadata."""
    attempt_fields: dict[str, Any] = {"layout": {}, "identity": {}, "made_by": {}}
    return CheckpointSaver(
        CheckpointConfig(mode=mode), PosixStore(folder), world, LINEAGE, 1, attempt_fields, lambda: dict(state)
    )


def metadata(step: int) -> CheckpointMetadata:
    return CheckpointMetadata(step, {"data": {}, "rng": {}, "schedule": {}, "scaler": {}, "counters": {}}, "data/0", {})


def measure_digests(world: World, folder: Path) -> dict[str, Any]:
    """The share of synchronous saves that xxhash takes, timed per call: to compare replicas, to write the shards, and
    to read them back.
    """
    state = make_state()
    saver = make_saver(world, folder, state, "sync")
    saver.save(metadata(1))  # allocates the buffers
    save_seconds: list[float] = []
    by_function: dict[str, list[float]] = {name: [] for name in DIGEST_FUNCTIONS}
    for number in range(DIGEST_SAVES):
        with timed_digests() as clock:
            start = time.perf_counter()
            (result,) = saver.save(metadata(number + 2))
            save_seconds.append(time.perf_counter() - start)
        assert result.error is None
        assert clock.bytes >= result.bytes, "a save calls a digest function that is not timed"
        for name in DIGEST_FUNCTIONS:
            by_function[name].append(clock.seconds[name])
    digest_seconds = [sum(values) for values in zip(*by_function.values(), strict=True)]
    return {
        "save_ms": round(statistics.median(save_seconds) * 1e3, 1),
        "digest_ms": round(statistics.median(digest_seconds) * 1e3, 1),
        "timed": "inside the saves, call by call",
        "digest_ms_by_function": milliseconds(by_function),
        "share": ratio_of_seconds(digest_seconds, save_seconds),
    }


def measure_rates(world: World, folder: Path) -> dict[str, Any]:
    """GB/s of a save until its checkpoint exists, of a plain write of the same bytes, and of a restore."""
    state = {f"model/{index}": torch.randn(RATE_BYTES // 32) for index in range(8)}
    saver = make_saver(world, folder, state, "async")
    publish, published = saver.store.publish_if_absent, [0.0]

    def publish_and_stamp(*args: Any) -> bool:
        done = publish(*args)
        published[0] = time.perf_counter()
        return done

    saver.store.publish_if_absent = publish_and_stamp  # type: ignore[method-assign]
    seconds: Seconds = {"plain": [], "save": [], "restore": []}
    for number in range(RATE_ROUNDS):
        seconds["plain"].append(write_plainly(folder / "plain", state))
        saver.save(metadata(number + 1))
        begin = time.perf_counter()
        (result,) = saver.wait()
        assert result.error is None
        seconds["save"].append(published[0] - begin)
        begin = time.perf_counter()
        load_newest(world, folder, state)
        seconds["restore"].append(time.perf_counter() - begin)
    rates = {name: round(RATE_BYTES / statistics.median(values) / 1e9, 3) for name, values in seconds.items()}
    return {
        "gigabytes": RATE_BYTES / 1e9,
        "gb_per_second": rates,
        "save_to_plain": ratio_of_seconds(seconds["plain"], seconds["save"]),
    }


def write_plainly(path: Path, state: dict[str, torch.Tensor]) -> float:
    """The seconds in which the bytes of tensors are written to a file, one after the other, and synced."""
    begin = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for tensor in state.values():
            file.write(memoryview(tensor.numpy().data).cast("B"))
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return seconds


class DigestClock:
    """The seconds and bytes of each digest function."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(DIGEST_FUNCTIONS, 0.0)
        self.bytes = 0

    def run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        value = function(*args)
        self.seconds[name] += time.perf_counter() - start
        return value


class TimedHash:
    """A timed streaming hash."""

    def __init__(self, clock: DigestClock, name: str, state: Any) -> None:
        self.clock, self.name, self.state = clock, name, state

    def update(self, content: Any) -> None:
        self.clock.bytes += memoryview(content).nbytes
        self.clock.run(self.name, self.state.update, content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)


@contextmanager
def timed_digests() -> Iterator[DigestClock]:
    """Replace the functions of xxhash by timed ones within the context."""
    clock = DigestClock()
    original = {name: getattr(xxhash, name) for name in DIGEST_FUNCTIONS}

    def streaming(name: str) -> Callable[[], TimedHash]:
        return lambda: TimedHash(clock, name, original[name]())

    def one_shot(name: str) -> Callable[[Any], str]:
        return lambda content: clock.run(name, original[name], content)

    try:
        for name in DIGEST_FUNCTIONS:
            setattr(xxhash, name, one_shot(name) if name.endswith("digest") else streaming(name))
        yield clock
    finally:
        for name, function in original.items():
            setattr(xxhash, name, function)


def barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier()


def no_op() -> None:
    pass


def slowest_rank(by_rank: list[Seconds]) -> Seconds:
    """The seconds of the slowest rank by round: the other ranks wait for it."""
    return {
        name: [max(values) for values in zip(*(rank[name] for rank in by_rank), strict=True)] for name in by_rank[0]
    }


def ratio_of_seconds(own: list[float], peer: list[float]) -> dict[str, Any]:
    """The ratio of seconds to a peer: the inverse of the ratio of throughput."""
    return ratio_statistics(peer, own)


def milliseconds(seconds: Seconds) -> dict[str, float]:
    return {name: round(statistics.median(values) * 1e3, 2) for name, values in seconds.items()}


def report(progress: str) -> None:
    print(f"checkpoint: {progress}", file=sys.stderr, flush=True)
