"""Checkpoints that are written without a training run, region by region, so that a large one takes no memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.base.checkpoint.format.canonical import recorded_digest
from meshwright.base.checkpoint.format.manifest_parts import (
    FileRecord,
    ManifestPart,
    RecordedPart,
    ShardOrigin,
    part_file,
)
from meshwright.base.checkpoint.format.regions import TensorRecord, TensorRegion
from meshwright.base.checkpoint.listing import checkpoint_folder
from meshwright.base.checkpoint.manifest import MANIFEST_FILE, Manifest
from meshwright.base.config import ModelConfig, RunConfig, config_to_toml, identity
from meshwright.base.models.registry import model_spec
from meshwright.base.store.posix import PosixStore
from meshwright.core.checkpoint.verify import DigestingSink, shard_header

SHARD = "rank-00000.shard"
STEP = 3


def write_checkpoint(run: Path, tensors: Mapping[str, np.ndarray], identity: dict[str, Any]) -> Path:
    """Writes the checkpoint of a run folder. A matrix is stored as two regions of columns."""
    run.mkdir()
    (run / "run.toml").write_text(config_to_toml(RunConfig()))
    store, folder = PosixStore(run), checkpoint_folder(STEP, 1)
    sink = DigestingSink(store.create(f"{folder}/{SHARD}"))
    origin = ShardOrigin("0123abcd", 1, STEP, 1, 0)
    sink.write(shard_header(origin))
    records, stored = {}, {}
    for name, array in tensors.items():
        middle = array.shape[1] // 2 if array.ndim == 2 else 0
        parts = [(0, array[:, :middle]), (middle, array[:, middle:])] if middle else [(0, array)]
        regions = []
        for column, part in parts:
            offset = (0, column) if array.ndim == 2 else (0,) * array.ndim
            regions.append(TensorRegion(offset, part.shape, SHARD, sink.size, part.nbytes))
            sink.write(memoryview(np.ascontiguousarray(part).reshape(-1)).cast("B"))
        records[name] = TensorRecord(str(array.dtype), array.shape)
        stored[name] = tuple(regions)
    sink.close()
    raw = ManifestPart(origin, SHARD, FileRecord(sink.size, tuple(sink.chunks)), "data/0", {}, stored).encode()
    (run / folder / part_file(0)).write_bytes(raw)
    parts = {part_file(0): RecordedPart(0, SHARD, sink.size, "data/0", len(raw), recorded_digest(raw))}
    empty: dict[str, Any] = {}
    manifest = Manifest(
        "0123abcd", 1, STEP, 1, 0, "", {"replicate": 1}, identity, *(empty,) * 6, tensors=records, parts=parts
    )
    (run / folder / MANIFEST_FILE).write_bytes(manifest.encode())
    return run


def write_family_checkpoint(run: Path, model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Writes the checkpoint of a run of a family, and returns its parameters."""
    generator = np.random.default_rng(seed)
    tensors = {
        parameter.name: generator.standard_normal(parameter.shape, np.float32)
        for parameter in model_spec(model).parameters
    }
    written = {f"model/{name}": array for name, array in tensors.items()}
    written["optimizer/decoder.norm.weight/exp_avg"] = np.zeros(model.width, np.float32)
    write_checkpoint(run, written, identity(RunConfig(model=model)))
    return tensors
