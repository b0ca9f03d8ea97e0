"""Small folders of safetensors, as somebody else might have written them, and the ways in which they can be damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from meshwright.base.config import ModelConfig
from meshwright.base.models.registry import write_huggingface_config
from meshwright.core.weights.folder import INDEX_FILE, SINGLE_FILE
from meshwright.core.weights.mapping import stored_layouts

MODEL = ModelConfig(vocab=12, width=8, layers=1, heads=2, kv_heads=1, ffn=6)
TIED = replace(MODEL, tie=True)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EMBEDDING, HEAD, DOWN = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.down_proj.weight"

Damage = Callable[[Path], None]


def make_tensors(model: ModelConfig = MODEL, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(layout.shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, layout in stored_layouts(model).items()
    }


def make_folder(folder: Path, model: ModelConfig = MODEL, sharded: bool = False, **more: torch.Tensor) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(write_huggingface_config(model)))
    tensors = make_tensors(model) | more
    if not sharded:
        save_file(tensors, folder / SINGLE_FILE)
        return folder
    files = {name: SHARDS[index % 2] for index, name in enumerate(sorted(tensors))}
    for file in SHARDS:
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Writes the single file of a folder again."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / SINGLE_FILE)
        change(tensors)
        save_file(tensors, folder / SINGLE_FILE)

    return damage


def edit_bytes(change: Callable[[bytes], bytes], file: str = SINGLE_FILE) -> Damage:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes())) and None


def edit_header(change: Callable[[dict], object], edit: Callable[[str], str] = str) -> Damage:
    """Changes the JSON header of the single file, and then its text."""

    def damage(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        encoded = edit(json.dumps(header)).encode()
        return len(encoded).to_bytes(8, "little") + encoded + content[8 + length :]

    return edit_bytes(damage)


def edit_index(change: Callable[[dict[str, str]], object]) -> Damage:
    """Changes the weight map of a sharded folder."""

    def damage(folder: Path) -> None:
        tree = json.loads((folder / INDEX_FILE).read_text())
        change(tree["weight_map"])
        (folder / INDEX_FILE).write_text(json.dumps(tree))

    return damage


def replace_by_link(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    os.rename(folder / SHARDS[0], outside)
    (folder / SHARDS[0]).symlink_to(outside)


def replace_by_pipe(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()
    os.mkfifo(folder / SHARDS[0])


def duplicate_tensor(folder: Path) -> None:
    one, other = (load_file(folder / file) for file in SHARDS)
    save_file(other | {next(iter(one)): next(iter(one.values()))}, folder / SHARDS[1])


def replace_by_pickle(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    torch.save(make_tensors(), folder / "pytorch_model.bin")
