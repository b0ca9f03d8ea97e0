"""The cost of an asynchronous checkpoint while a model trains, beside torch.save, DCP and a plain write to disk."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from benchmarks.gpu.meshwright_contender import MeshwrightLoop
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import WARMUP, synchronize
from meshwright.base.checkpoint.listing import checkpoint_folder
from meshwright.base.checkpoint.manifest import MANIFEST_FILE

SETTINGS = ("checkpoint.mode=async", "checkpoint.seconds=0", "checkpoint.keep=1")
"""Saves happen when the benchmark asks for them."""
STALL_STEPS = 4
"""A save delays the step in which it begins and those in which its copies end; later ones train beside the writes."""
PEER_SHARE = 0.1
"""The share of the state that the peers save: the whole takes them most of a minute."""
CHUNK = 64 << 20
MAX_STALL_SECONDS, MAX_SLOWDOWN, MIN_WRITE_RATIO, MIN_RESTORE_RATE = 0.060, 1.02, 0.9, 2.0


def measure(shape: Shape, device: torch.device) -> dict[str, Any]:
    loop = MeshwrightLoop(shape, device, SETTINGS)
    try:
        for _ in range(WARMUP):
            loop.step()
        own = measure_save(loop, shape.steps)
        own |= measure_restore(loop, own["bytes"])
        plain = write_plainly(loop.folder, own["bytes"])
        peers = measure_peers(loop, device)
    finally:
        loop.close()
    ratio = round(own["write_gb_per_second"] / plain, 3)
    return {
        "meshwright": own,
        "plain_write_gb_per_second": plain,
        "write_ratio": ratio,
        "peers": peers,
        "targets": [
            target("stall, s", own["stall_seconds"], MAX_STALL_SECONDS, "<="),
            target("step time meanwhile", own["slowdown"], MAX_SLOWDOWN, "<="),
            target("write rate / plain write", ratio, MIN_WRITE_RATIO, ">="),
            target("restore, GB/s", own["restore_gb_per_second"], MIN_RESTORE_RATE, ">="),
        ],
    }


def target(quantity: str, value: float, bound: float, comparison: str) -> dict[str, Any]:
    met = value <= bound if comparison == "<=" else value >= bound
    return {"quantity": quantity, "target": f"{comparison} {bound:g}", "value": value, "met": met}


def measure_save(loop: MeshwrightLoop, steps: int) -> dict[str, Any]:
    """The second save of a run, whose buffers exist: its stall, the steps meanwhile, and when it was published."""
    first = save_while_training(loop)
    before = Marks(loop.device)
    for _ in range(steps):
        loop.step()
        before.add()
    baseline = statistics.median(before.seconds())
    second = save_while_training(loop)
    result, meanwhile = second["result"], second["steps"][STALL_STEPS:] or second["steps"]
    return {
        "bytes": result["bytes"],
        "stall_seconds": round(sum(second["steps"][:STALL_STEPS]) - STALL_STEPS * baseline, 4),
        "first_steps_ms": [round(seconds * 1e3, 2) for seconds in second["steps"][:STALL_STEPS]],
        "stall_seconds_of_first_save": round(sum(first["steps"][:STALL_STEPS]) - STALL_STEPS * baseline, 4),
        "stall_seconds_on_record": result["stall_seconds"],
        "step_ms": round(baseline * 1e3, 2),
        "step_ms_meanwhile": round(statistics.median(meanwhile) * 1e3, 2),
        "steps_meanwhile": len(meanwhile),
        "slowdown": round(statistics.median(meanwhile) / baseline, 4),
        "published_after_seconds": round(second["published"], 3),
        "write_gb_per_second": round(result["bytes"] / second["published"] / 1e9, 3),
        "verified_after_seconds": result["seconds"],
    }


def save_while_training(loop: MeshwrightLoop) -> dict[str, Any]:
    """Begins a save and trains until it is complete: the seconds of each step, those until it was published, and its
    record.
    """
    training, begin = loop.training, time.perf_counter()
    manifest = f"{checkpoint_folder(training.done, training.job.attempt)}/{MANIFEST_FILE}"
    published = []

    def watch() -> None:
        while training.store.size(manifest) is None:
            time.sleep(0.01)
        published.append(time.perf_counter() - begin)

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    training.control.save_due = True
    marks = Marks(loop.device)
    training.save_if_due()
    loop.step()
    marks.add()
    while training.saver.in_flight is not None and not training.saver.in_flight.done():
        loop.step()
        marks.add()
    training._record_saves(training.saver.wait())
    watcher.join(60)
    records = [json.loads(line) for line in training.job.folder.events(0).read_text().splitlines()]
    result = [record for record in records if record["kind"] == "checkpoint"][-1]
    return {"steps": marks.seconds(), "published": published[0], "result": result}


class Marks:
    """Marks between steps, for which nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []
        self.add()

    def add(self) -> None:
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The seconds between marks."""
        synchronize(self.device)
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [a.elapsed_time(b) / 1e3 if self.device.type == "cuda" else b - a for a, b in pairs]


def measure_restore(loop: MeshwrightLoop, size: int) -> dict[str, Any]:
    """Restores the newest checkpoint into the state on the device; every byte is verified."""
    synchronize(loop.device)
    begin = time.perf_counter()
    loop.training._restore()
    synchronize(loop.device)
    seconds = time.perf_counter() - begin
    return {"restore_seconds": round(seconds, 3), "restore_gb_per_second": round(size / seconds / 1e9, 3)}


def write_plainly(folder: Path, size: int) -> float:
    """GB/s of one file of the same size, written from host memory and synchronized to disk."""
    chunk = memoryview(bytearray(os.urandom(1 << 20) * (CHUNK >> 20)))
    path = folder / "plain"
    begin = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for offset in range(0, size, CHUNK):
            file.write(chunk[: min(CHUNK, size - offset)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return round(size / seconds / 1e9, 3)


def measure_peers(loop: MeshwrightLoop, device: torch.device) -> dict[str, Any]:
    """How long training would wait for a share of the same state: torch.save, and DCP's async_save."""
    state = shared_state(loop)
    size = sum(tensor.nbytes for tensor in state.values())
    result: dict[str, Any] = {"bytes": size}
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-", dir=loop.folder) as name:
        folder = Path(name)
        synchronize(device)
        begin = time.perf_counter()
        torch.save(state, folder / "state.pt")
        result["torch_save_seconds"] = round(time.perf_counter() - begin, 3)
        (folder / "state.pt").unlink()
        begin = time.perf_counter()
        writing = dcp.async_save(dict(state), storage_writer=FileSystemWriter(folder / "dcp"), no_dist=True)
        result["dcp_async_save_stall_seconds"] = round(time.perf_counter() - begin, 3)
        writing.result()  # type: ignore[union-attr]
        result["dcp_async_save_seconds"] = round(time.perf_counter() - begin, 3)
        shutil.rmtree(folder / "dcp")
    return result


def shared_state(loop: MeshwrightLoop) -> dict[str, Tensor]:
    """The first tensors of the checkpoint, up to `PEER_SHARE` of its bytes."""
    state = {name: getattr(shard, "local", shard).detach() for name, shard in loop.training.state().items()}
    limit, result = PEER_SHARE * sum(tensor.nbytes for tensor in state.values()), {}
    for name, tensor in state.items():
        if not result or sum(t.nbytes for t in result.values()) + tensor.nbytes <= limit:
            result[name] = tensor
    return result
