"""Reads a checkpoint without the checkpoint package, and compares its content with the state that was in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from meshwright.base.dtypes import TENSOR_BYTES
from meshwright.base.topology.layout import Layout
from meshwright.prover.state.comparison import Reference, compare_values, explain_kinds, shorten
from meshwright.prover.state.recording import FROZEN, ROUNDED, ShardRecord, StateRecord, digest_tensor


@dataclass(frozen=True)
class CheckpointContent:
    """A published checkpoint folder, read as plain JSON and bytes."""

    folder: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest with the content of its parts: the files, the regions of tensors, the state of owners."""
        values: dict[str, Any] = {"parts": {}, "files": {}, "owners": {}}
        values |= json.loads((self.folder / "manifest.json").read_bytes())
        for tensor in values["tensors"].values():
            tensor.setdefault("pieces", [])
        for name in values["parts"]:
            part = json.loads((self.folder / name).read_bytes())
            values["files"][part["file"]] = {"size": part["size"], "chunks": part["chunks"]}
            values["owners"][part["owner"]] = part["state"]
            for tensor, regions in part["tensors"].items():
                values["tensors"][tensor]["pieces"] += [region | {"file": part["file"]} for region in regions]
        return values

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def attempt(self) -> int:
        """The attempt that wrote it, by its name: its manifest may be damaged."""
        return int(self.folder.name.rpartition(".a")[2])

    def files_of(self, name: str, shard: ShardRecord) -> set[str]:
        """The files that store elements of a region of a tensor."""
        return {
            piece["file"]
            for piece in self.manifest["tensors"][name]["pieces"]
            if all(
                o < p + q and p < o + s
                for o, s, p, q in zip(shard.offset, shard.shape, piece["offset"], piece["shape"], strict=True)
            )
        }

    def tensor(self, name: str) -> NDArray[Any]:
        """A full tensor, each element as an unsigned integer of its bits. Elements that no file stores are 0xAA..."""
        record = self.manifest["tensors"][name]
        size = TENSOR_BYTES[record["dtype"]]
        tensor = np.full(record["shape"], int.from_bytes(b"\xaa" * size), f"<u{size}")
        for piece in record["pieces"]:
            with open(self.folder / piece["file"], "rb") as file:
                file.seek(piece["start"])
                content = file.read(piece["length"])
            where = tuple(slice(o, o + s) for o, s in zip(piece["offset"], piece["shape"], strict=True))
            tensor[where] = np.frombuffer(content, tensor.dtype).reshape(piece["shape"])
        return tensor


def published_checkpoints(run: Path) -> list[CheckpointContent]:
    """The published checkpoints of a run folder, oldest first."""
    return [CheckpointContent(path.parent) for path in sorted(run.glob("checkpoints/step-*/manifest.json"))]


def compare_with_memory(
    content: CheckpointContent, reference: Reference, layout: Layout, global_batch: int
) -> Iterator[str]:
    """Every difference between a checkpoint and the state in memory after its step, in words; the first sentence names
    the first tensor, in model order, and what its content is instead.
    """
    manifest, done = content.manifest, content.step
    states = [of_rank[done] for of_rank in reference.values() if done in of_rank]
    if len(states) < len(reference):
        yield f"the run never was at step {done}"
        return
    if difference := compare_tensors(content, states, reference):
        yield difference
    for state in states:
        coordinate = f"data/{layout.data_coordinate(state.rank)}"
        counters = {name.removeprefix("counter "): v for name, v in state.small.items() if name.startswith("counter ")}
        expected = {"counters": counters, "step": done, "position": done * global_batch}
        found = {"counters": manifest["counters"], "step": manifest["step"], "position": manifest["data"]["position"]}
        noise = manifest["owners"].get(coordinate, {}).get("noise", {})
        expected["noise scale"] = state.small["noise scale"]
        found["noise scale"] = [float(noise.get(key, "nan")).hex() for key in ("signal", "noise")]
        expected["gradient scaler"] = state.small["gradient scaler"]
        found["gradient scaler"] = list(manifest["scaler"].values())
        if (following := reference[state.rank].get(done + 1)) is not None and following.step:
            expected["seed"], found["seed"] = following.step["seed"], manifest["rng"].get(coordinate)
            expected["learning rate"] = following.step["learning rate"]
            found["learning rate"] = manifest["schedule"]["lr"]
        for _, text in compare_values(expected, found):
            yield f"{text} of rank {state.rank}"


def compare_tensors(content: CheckpointContent, states: list[StateRecord], reference: Reference) -> str:
    """The difference between the tensors of a checkpoint and those of the ranks, in words; '' if there is none."""
    tensors = content.manifest["tensors"]
    in_memory: dict[str, list[StateRecord]] = {}
    for state in states:
        for name in state.tensors:
            if not name.startswith(f"{FROZEN}/"):
                in_memory.setdefault(name, []).append(state)
    missing = [name for name in in_memory if stored_name(name, tensors) not in tensors]
    missing += [f"{name} (not in memory)" for name in tensors if name not in in_memory]
    wrong: dict[str, list[StateRecord]] = {}
    cache: dict[str, NDArray[Any]] = {}
    for name, holders in in_memory.items():
        stored = stored_name(name, tensors)
        if stored not in tensors:
            continue
        full = cache.setdefault(stored, content.tensor(stored))
        if unequal := [
            state for state in holders if digest_region(full, state.tensors[name], name) != state.tensors[name].digest
        ]:
            wrong[name] = unequal
    if missing:
        return f"{missing[0]} is missing; {len(missing)} of {len(in_memory)} tensors are"
    if not wrong:
        return ""
    first = next(iter(wrong))
    parts = [f"{first} is not that of step {content.step}", f"{len(wrong)} of {len(in_memory)} tensors differ"]
    other = [
        done
        for done in reference.get(wrong[first][0].rank, {})
        if all(
            digest_region(cache[stored_name(name, tensors)], expected.tensors[name], name)
            == expected.tensors[name].digest
            for name, holders in wrong.items()
            if (expected := reference[holders[0].rank].get(done)) is not None
        )
    ]
    if other:
        parts.append(f"their content is that of step {other[0]}")
    parts.append(explain_kinds(set(wrong), set(in_memory)))
    files = {
        file
        for name, holders in wrong.items()
        for state in holders
        for file in content.files_of(stored_name(name, tensors), state.tensors[name])
    }
    if len(files) == 1 < len(content.manifest["files"]):
        parts.append(f"all of them are in {shorten(next(iter(files)))}, which one rank wrote")
    return "; ".join(filter(None, parts))


def stored_name(name: str, tensors: dict[str, Any]) -> str:
    """The name in a checkpoint of a tensor in memory: a tied, offloaded or rounded copy is stored as the original."""
    kind, _, own = name.partition("/")
    name = f"model/{own}" if kind in ("offloaded", ROUNDED) else name
    if name == "model/head.weight" and name not in tensors:
        return "model/decoder.embedding.weight"
    return name


def digest_region(full: NDArray[Any], shard: ShardRecord, name: str) -> str:
    """The digest that a tensor of this name has in memory."""
    where = tuple(slice(o, o + s) for o, s in zip(shard.offset, shard.shape, strict=True))
    values = np.ascontiguousarray(full[where])
    if name.startswith(f"{ROUNDED}/"):
        return digest_tensor(torch.from_numpy(values.view(np.float32)).to(torch.bfloat16))
    return xxhash.xxh3_128_hexdigest(values.tobytes())
