"""Import and export of weights in MB/s, relative to safetensors' own load_file and save_file, on the same bytes.

An import opens the folder, checks every header, digests every byte, looks for numbers that are not finite, and copies
every parameter into the memory of a model; the peer loads the file and copies the same tensors. An export verifies
every byte of the checkpoint, reads it, digests what it writes, and makes it durable; the peer writes the tensors from
memory, followed by an fsync. Files that are read are in the page cache: the disk is not compared. Methods alternate
within a round; a result is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.throughput import ratio_statistics
from meshwright.base.checkpoint.listing import RunLineage
from meshwright.base.config import CheckpointConfig, ModelConfig, RunConfig, config_to_toml, identity
from meshwright.base.models.registry import stored_parameters
from meshwright.base.store.posix import PosixStore
from meshwright.core.checkpoint.saver import CheckpointMetadata, CheckpointSaver
from meshwright.core.models.init import build_model
from meshwright.core.parallel.world import World
from meshwright.core.weights.export import export_checkpoint
from meshwright.core.weights.folder import SINGLE_FILE
from meshwright.core.weights.reader import WeightFolder

MODEL = ModelConfig(vocab=32_000, width=768, layers=6, heads=12, kv_heads=12, ffn=2048)
ROUNDS = 12
MIN_RATIO = 0.8
"""The smallest rate relative to safetensors."""


def measure() -> dict[str, Any]:
    """The rates and ratios of an import and an export."""
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as name:
        folder = Path(name)
        parameters = {name: tensor.detach() for name, tensor in build_model(MODEL, 0).named_parameters()}
        write_checkpoint(folder / "run", parameters)
        export_checkpoint(folder / "run", folder / "weights", RunConfig())
        stored = {part.stored: parameters[part.name] for part in stored_parameters(MODEL)}
        megabytes = sum(tensor.nbytes for tensor in stored.values()) / 1e6
        imports = {
            "meshwright": lambda: import_all(folder),
            "safetensors": lambda: load_all(folder, stored),
        }
        exports = {"meshwright": lambda: export_once(folder), "safetensors": lambda: save_once(folder, stored)}
        return {
            "megabytes": round(megabytes, 1),
            "import": compare(imports, megabytes, lambda: None),
            "export": compare(exports, megabytes, lambda: remove_exports(folder)),
        }


def compare(methods: dict[str, Callable[[], None]], megabytes: float, after: Callable[[], None]) -> dict[str, Any]:
    """MB/s of every method, and the ratio of the first to the second."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    shuffled = random.Random(0)
    for _ in range(ROUNDS + 1):
        for name in shuffled.sample(list(methods), len(methods)):
            start = time.perf_counter()
            methods[name]()
            seconds[name].append(time.perf_counter() - start)
            after()
    ours, peer = (values[1:] for values in seconds.values())  # the first round warms the page cache
    rates = {name: round(megabytes / statistics.median(values[1:])) for name, values in seconds.items()}
    return {"megabytes_per_second": rates, "ratio_to_safetensors": ratio_statistics(ours, peer)}


def write_checkpoint(run: Path, parameters: dict[str, torch.Tensor]) -> None:
    run.mkdir()
    config = RunConfig(model=MODEL)
    (run / "run.toml").write_text(config_to_toml(config))
    fields = {"layout": {"replicate": 1}, "identity": identity(config), "made_by": {}}
    settings, lineage = CheckpointConfig(mode="sync"), RunLineage("bench", 1, {})
    state = {f"model/{name}": tensor for name, tensor in parameters.items()}
    saver = CheckpointSaver(settings, PosixStore(run), World(), lineage, 1, fields, lambda: state)
    shared: dict[str, Any] = {"data": {}, "rng": {}, "schedule": {}, "scaler": {}, "counters": {}}
    saver.save(CheckpointMetadata(1, shared, "0", {}))
    saver.close()


def import_all(folder: Path) -> None:
    """Reads every parameter as the one rank of a run does."""
    weights = WeightFolder(folder / "weights")
    assert weights.digest
    for name, parts in weights.stored.parameters.items():
        shape = weights.files.tensors[parts[0].stored].shape
        torch.empty(shape).copy_(weights.read(name, (0,) * len(shape), shape))


def load_all(folder: Path, stored: dict[str, torch.Tensor]) -> None:
    tensors = load_file(folder / "weights" / SINGLE_FILE)
    for name in stored:
        torch.empty(tensors[name].shape).copy_(tensors[name])


def export_once(folder: Path) -> None:
    export_checkpoint(folder / "run", folder / "export", RunConfig())


def save_once(folder: Path, stored: dict[str, torch.Tensor]) -> None:
    save_file(stored, folder / "peer.safetensors")
    with (folder / "peer.safetensors").open("rb") as file:
        os.fsync(file.fileno())


def remove_exports(folder: Path) -> None:
    shutil.rmtree(folder / "export", ignore_errors=True)
    (folder / "peer.safetensors").unlink(missing_ok=True)
