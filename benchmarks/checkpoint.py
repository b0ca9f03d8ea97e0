"""What a checkpoint costs beside torch's own ways of saving and loading, on the same state, in interleaved rounds.

The state is a decoder's parameters and its AdamW moments. In a round every contender saves (or loads) it once, in a
shuffled order, each after the one before has let go of the disk; a figure is the median over rounds of the ratio within
a round. What is timed of an asynchronous save is the call, which training waits for. `torch.save` is timed as it is
used, without an fsync. All that is loaded lies in the page cache: the disk itself is no part of the comparison.
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

from benchmarks.ordinary import adamw
from benchmarks.throughput import spread
from meshwright.checkpoint.listing import RunLineage
from meshwright.checkpoint.restore import restore
from meshwright.checkpoint.saver import CheckpointMetadata, CheckpointSaver
from meshwright.checkpoint.state import CheckpointState, collect_state
from meshwright.config import CheckpointConfig, ModelConfig, OptimizerConfig
from meshwright.launch.ranks import run_ranks
from meshwright.models.init import build_model
from meshwright.parallel.world import World
from meshwright.store.posix import PosixStore

MODEL = ModelConfig(vocab=4096, width=512, layers=3, heads=8, kv_heads=4, ffn=1408, tie=True)
ROUNDS = {1: {"save": 16, "load": 24}, 2: {"save": 12, "load": 16}}
"""Rounds by the number of ranks."""
SYNCHRONOUS = 16
"""Whole saves in which digests are timed."""

LINEAGE = RunLineage("bench", 1, {})
OWN, TORCH_SAVE, ASYNC_SAVE, LOAD = "meshwright", "torch.save", "dcp.async_save", "dcp.load"
TARGETS = {TORCH_SAVE: 0.25, ASYNC_SAVE: 1.0, LOAD: 1.25}
"""The most that Meshwright's seconds may be of a peer's: the stall of a save, and a restore with its verification."""
MOST_DIGEST = 0.05
"""The most of a whole synchronous save that may go into digests."""
DIGESTS = ("xxh3_64_intdigest", "xxh3_128")
"""xxhash's functions that a save calls: to compare replicas, and to write shards and read them back."""

Seconds = dict[str, list[float]]
Finish = Callable[[], object]


def measure() -> dict[str, Any]:
    result: dict[str, Any] = {"ranks": {}}
    for ranks in ROUNDS:
        said(f"{ranks} rank(s)")
        with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
            found = run_ranks(race, ranks, Path(folder), timeout=600.0)
        slowest = {what: worst([one[what] for one in found]) for what in ("save", "load")}
        stall = {name: values[1:] for name, values in slowest["save"].items()}
        result["state"] = found[0]["state"]
        result["ranks"][ranks] = {
            "stall_ms": milliseconds(stall),
            "first_stall_ms": milliseconds({name: values[:1] for name, values in slowest["save"].items()}),
            "stall_ratio_to": {name: times(stall[OWN], stall[name]) for name in (TORCH_SAVE, ASYNC_SAVE)},
            "restore_ms": milliseconds(slowest["load"]),
            "restore_ratio_to": {LOAD: times(slowest["load"][OWN], slowest["load"][LOAD])},
        }
    said("digests")
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        result["digests"] = run_ranks(digests, 1, Path(folder), timeout=300.0)[0]
    return result


def race(world: World, folder: Path) -> dict[str, Any]:
    """On each rank: every contender's seconds by round, the first save of each among them."""
    os.dup2(2, 1)  # standard output is for the result alone
    state, rounds = subject(), ROUNDS[world.size]
    size = sum(tensor.nbytes for tensor in state.values()) / 1e6
    group = dist.new_group(backend="gloo") if world.size > 1 else None
    gc.collect()
    gc.freeze()
    return {
        "state": {"tensors": len(state), "megabytes": round(size, 1)},
        "save": taking_turns(world, savers(world, folder, state, group), rounds["save"] + 1),
        "load": taking_turns(world, loaders(world, folder, state, group), rounds["load"]),
    }


def subject() -> CheckpointState:
    """A model and its optimizer after a step."""
    model = build_model(MODEL, 0)
    optimizer = adamw(model, OptimizerConfig())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return collect_state(model, optimizer)


def taking_turns(world: World, contenders: dict[str, Callable[[int], Finish]], rounds: int) -> Seconds:
    """Seconds of each contender by round. What it gives back is what is left to do, and is not timed."""
    order = list(contenders)
    seconds: Seconds = {name: [] for name in order}
    for number in range(rounds):
        random.Random(number).shuffle(order)  # the same on every rank
        for name in order:
            meet(world)
            start = time.perf_counter()
            finish = contenders[name](number)
            seconds[name].append(time.perf_counter() - start)
            finish()
            meet(world)
    return seconds


def savers(world: World, folder: Path, state: CheckpointState, group: Any) -> dict[str, Callable[[int], Finish]]:
    """Each begins a save, and gives back how to wait until it is durable."""
    saver = saver_of(world, folder, state, "async")
    stager = DefaultStager(StagingOptions(False, False, False, False))  # kept: it copies into the buffers it has

    def own(number: int) -> Finish:
        saver.save(notes(number + 1))

        def finish() -> None:
            for saved in saver.wait():
                if saved.error is not None:
                    raise saved.error

        return finish

    def torch_save(number: int) -> Finish:
        path = folder / f"{number}.pt"
        if world.rank == 0:  # replicas: the others wait
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
            meet(world)
            if world.rank == 0:
                shutil.rmtree(path)

        return finish

    return {OWN: own, TORCH_SAVE: torch_save, ASYNC_SAVE: async_save}


def loaders(world: World, folder: Path, state: CheckpointState, group: Any) -> dict[str, Callable[[int], Finish]]:
    """Each loads the whole state, from files that were just written, and has been seen to load it right."""
    path = folder / "dcp"
    dcp.save(dict(state), storage_writer=FileSystemWriter(path), process_group=group, no_dist=group is None)

    def own(_number: int) -> Finish:
        found = restore(
            PosixStore(folder),
            world,
            LINEAGE,
            state,
            lambda _manifest: None,
            fallback=False,
            on_damaged=lambda *_: None,
        )
        assert found is not None
        return nothing

    def load(_number: int) -> Finish:
        reader = FileSystemReader(path)
        dcp.load(dict(state), storage_reader=reader, process_group=group, no_dist=group is None)
        return nothing

    kept = {name: tensor.clone() for name, tensor in state.items()}
    for contender in (own, load):
        for tensor in state.values():
            tensor.data.zero_()
        contender(0)
        assert all(torch.equal(tensor, kept[name]) for name, tensor in state.items())
    return {OWN: own, LOAD: load}


def saver_of(world: World, folder: Path, state: CheckpointState, mode: Any) -> CheckpointSaver:
    """As training makes it; the checkpoint is of no step of a real run."""
    facts: dict[str, Any] = {"layout": {}, "identity": {}, "made_by": {}}
    return CheckpointSaver(CheckpointConfig(mode=mode), PosixStore(folder), world, LINEAGE, 1, facts, lambda: state)


def notes(step: int) -> CheckpointMetadata:
    return CheckpointMetadata(step, {"data": {}, "rng": {}, "schedule": {}, "scaler": {}, "counters": {}}, "data/0", {})


def digests(world: World, folder: Path) -> dict[str, Any]:
    """The share of whole synchronous saves that xxh3 takes, timed call by call inside them: the replicas' comparison,
    the shards, and the reading back that retention wants before it deletes.
    """
    state = subject()
    saver = saver_of(world, folder, state, "sync")
    saver.save(notes(1))  # makes the buffers
    whole: list[float] = []
    spent: dict[str, list[float]] = {name: [] for name in DIGESTS}
    for number in range(SYNCHRONOUS):
        with timed_digests() as clock:
            start = time.perf_counter()
            (saved,) = saver.save(notes(number + 2))
            whole.append(time.perf_counter() - start)
        assert saved.error is None
        assert clock.bytes >= saved.bytes, "digests are taken in a way that is not timed here"
        for name in DIGESTS:
            spent[name].append(clock.seconds[name])
    total = [sum(values) for values in zip(*spent.values(), strict=True)]
    return {
        "save_ms": round(statistics.median(whole) * 1e3, 1),
        "digest_ms": round(statistics.median(total) * 1e3, 1),
        "timed": "inside the saves, call by call",
        "digest_ms_by_function": milliseconds(spent),
        "share": times(total, whole),
    }


class Clock:
    """Seconds and bytes that went through each kind of digest."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(DIGESTS, 0.0)
        self.bytes = 0

    def run(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        value = work(*arguments)
        self.seconds[name] += time.perf_counter() - start
        return value


class TimedState:
    """A digest that is fed piece by piece, timed."""

    def __init__(self, clock: Clock, name: str, state: Any) -> None:
        self.clock, self.name, self.state = clock, name, state

    def update(self, content: Any) -> None:
        self.clock.bytes += memoryview(content).nbytes
        self.clock.run(self.name, self.state.update, content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)


@contextmanager
def timed_digests() -> Iterator[Clock]:
    """Puts timed stand-ins into xxhash, for as long as it lasts."""
    clock = Clock()
    real = {name: getattr(xxhash, name) for name in DIGESTS}

    def fed(name: str) -> Callable[[], TimedState]:
        return lambda: TimedState(clock, name, real[name]())

    def at_once(name: str) -> Callable[[Any], str]:
        return lambda content: clock.run(name, real[name], content)

    try:
        for name in DIGESTS:
            setattr(xxhash, name, at_once(name) if name.endswith("digest") else fed(name))
        yield clock
    finally:
        for name, function in real.items():
            setattr(xxhash, name, function)


def meet(world: World) -> None:
    if world.size > 1:
        dist.barrier()


def nothing() -> None:
    pass


def worst(by_rank: list[Seconds]) -> Seconds:
    """The slowest rank's seconds, round by round: the others wait for it."""
    return {name: [max(values) for values in zip(*(one[name] for one in by_rank), strict=True)] for name in by_rank[0]}


def times(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Our seconds over theirs: throughput's ratio the other way round."""
    return spread(theirs, ours)


def milliseconds(seconds: Seconds) -> dict[str, float]:
    return {name: round(statistics.median(values) * 1e3, 2) for name, values in seconds.items()}


def said(what: str) -> None:
    print(f"checkpoint: {what}", file=sys.stderr, flush=True)
