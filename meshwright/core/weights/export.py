"""Exports a checkpoint: safetensors of Hugging Face or by the model's own names, written block by block. Torch-free.

The checkpoint is verified first. Files are written to a temporary folder, which is renamed when everything is on disk.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from meshwright.base.checkpoint.listing import CheckpointEntry
from meshwright.base.checkpoint.manifest import Manifest
from meshwright.base.config import ModelConfig, RunConfig, fingerprint
from meshwright.base.config.reader import build_dataclass, shorten
from meshwright.base.dtypes import TENSOR_BYTES
from meshwright.base.io import sync_folder, write_json
from meshwright.base.models.huggingface import StoredParameter
from meshwright.base.models.registry import lora_spec, model_spec, write_huggingface_config
from meshwright.core.checkpoint.inspect import reporting_deletion, select_intact
from meshwright.core.checkpoint.unsharded import digest_of_lines, tensor_line
from meshwright.core.weights.checkpoint_tensors import Bits, CheckpointTensors, TensorSource
from meshwright.core.weights.content import EXPONENTS
from meshwright.core.weights.conversion import convert_bits
from meshwright.core.weights.folder import INDEX_FILE, RECORD_FILE, SINGLE_FILE
from meshwright.core.weights.huggingface_files import write_huggingface_files
from meshwright.core.weights.mapping import StoredLayout, stored_layouts
from meshwright.core.weights.safetensors_file import make_header
from meshwright.errors import CheckpointError, ConfigError
from meshwright.version import __version__

Format = Literal["huggingface", "safetensors", "torch"]
ExportDType = Literal["float32", "bfloat16", "float16", "float64"]
BLOCK_BYTES = 1 << 20
"""Bytes of a tensor that are in memory at a time; a tensor that is stored transposed is in memory whole."""
DEFAULT_SHARD_BYTES = 5 * 10**9
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of an export."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: StoredLayout | None = None
    """None: the tensor of the model of this name, as it is"""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * TENSOR_BYTES[self.dtype]


@dataclass(frozen=True)
class Export:
    """What was written."""

    folder: Path
    files: list[str]
    tensors: int
    bytes: int
    digest: str
    """digest of the tensors, as `init_from` computes it"""
    checkpoint: str
    """name of the checkpoint"""


def export_checkpoint(
    run: Path,
    to: Path,
    config: RunConfig,
    *,
    step: int | None = None,
    dtype: ExportDType | None = None,
    format: Format | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    adapter: bool = False,
) -> Export:
    """Exports the newest checkpoint of a run, or that of a step. `config` is that of the run file. Low-rank factors are
    merged; with `adapter`, they are written alone, in the format of PEFT.
    """
    require_new_folder(to)
    entry = select_intact(run, step)
    assert entry.manifest is not None
    model = model_of(entry.manifest)
    form: Format = format or ("huggingface" if model is not None else "safetensors")
    if form == "huggingface" and model is None:
        raise ConfigError("a custom model has no Hugging Face form", "try --format safetensors or torch")
    published = model if form == "huggingface" and not adapter else None
    if published is not None:
        write_huggingface_config(published)  # a model without a Hugging Face form is refused before anything is written
    source = model_tensors(entry, model, config, adapter)
    outputs = list_adapter(source, entry, model, dtype) if adapter else list_outputs(source, published, dtype)
    with reporting_deletion(entry), temporary_folder(to) as folder:
        writer = TensorWriter(source, folder)
        if adapter:
            files = [write_adapter(writer, outputs, entry.manifest, model, config)]
        elif form == "torch":
            from meshwright.core.weights.torch_file import write_torch_file

            files = [write_torch_file(writer, outputs)]
        else:
            files = write_shards(writer, outputs, max_shard_bytes)
        if published is not None:
            write_huggingface_files(folder, published, config, outputs[0].dtype)
        digest = digest_of_lines(tensor_line(o.name, o.dtype, o.shape, writer.digests[o.name]) for o in outputs)
        write_json(folder / RECORD_FILE, make_record(entry, form, digest, writer.digests))
    return Export(to, files, len(outputs), sum(output.bytes for output in outputs), digest, entry.name)


def model_tensors(
    entry: CheckpointEntry, model: ModelConfig | None, config: RunConfig, adapter: bool = False
) -> TensorSource:
    """The tensors of a checkpoint; under low-rank adaptation the full model with its factors merged, or with `adapter`
    the factors alone. `config` names the folder of the frozen parameters.
    """
    assert entry.manifest is not None
    if not entry.manifest.base or adapter:
        return CheckpointTensors(entry, prefix="" if model is not None else "model.")
    from meshwright.core.weights.adapters import MergedTensors

    assert model is not None
    return MergedTensors(entry, model, config)


def list_adapter(
    source: TensorSource, entry: CheckpointEntry, model: ModelConfig | None, dtype: str | None
) -> list[OutputTensor]:
    """The low-rank factors of a checkpoint by the names of PEFT."""
    from meshwright.core.weights.adapters import check_tensors, lora_of, peft_names

    manifest = entry.manifest
    assert manifest is not None
    if model is None or not manifest.base:
        raise ConfigError("the run has no low-rank factors", "try the export without --adapter")
    check_tensors(entry.name, manifest, source, lora_spec(model, lora_of(manifest)))
    return [
        OutputTensor(
            stored,
            dtype or source.dtype(name),
            source.shape(name),
            StoredLayout(source.shape(name), (StoredParameter(name, stored),)),
        )
        for stored, name in peft_names(model, lora_of(manifest)).items()
    ]


def write_adapter(
    writer: TensorWriter,
    outputs: Sequence[OutputTensor],
    manifest: Manifest,
    model: ModelConfig | None,
    config: RunConfig,
) -> str:
    """Writes the files of an adapter of PEFT."""
    from meshwright.core.weights.adapters import ADAPTER_CONFIG_FILE, ADAPTER_FILE, adapter_config, lora_of

    assert model is not None
    writer.write(ADAPTER_FILE, outputs, make_header((output.name, output.dtype, output.shape) for output in outputs))
    write_json(writer.folder / ADAPTER_CONFIG_FILE, adapter_config(model, lora_of(manifest), config.init_from))
    return ADAPTER_FILE


def make_record(entry: CheckpointEntry, form: Format, digest: str, digests: dict[str, str]) -> dict[str, Any]:
    """What an export says about itself."""
    manifest = entry.manifest
    assert manifest is not None
    return {
        "meshwright": __version__,
        "format": form,
        "run": manifest.run,
        "step": manifest.step,
        "checkpoint": entry.name,
        "checkpoint_digest": manifest.digest,
        "identity_fingerprint": fingerprint(manifest.identity),
        "identity": manifest.identity,
        "digest": digest,
        "tensors": digests,
    }


def model_of(manifest: Manifest) -> ModelConfig | None:
    """The model that the identity of a checkpoint records; None for a custom model."""
    keys = {key.removeprefix("model."): value for key, value in manifest.identity.items() if key.startswith("model.")}
    if "model" in manifest.identity or not keys:
        return None
    tree = {key: value for key, value in keys.items() if "." not in key}
    options = {key.removeprefix("options."): value for key, value in keys.items() if key.startswith("options.")}
    model = build_dataclass(ModelConfig, tree | {"options": options}, "model")
    assert isinstance(model, ModelConfig)
    return model


def list_outputs(source: TensorSource, model: ModelConfig | None, dtype: str | None) -> list[OutputTensor]:
    """The tensors of an export: those of a Hugging Face folder of the model, or the tensors by their own names."""

    def target(name: str) -> str:
        stored = source.dtype(name)
        return dtype if dtype is not None and stored in EXPONENTS else stored

    if model is None:
        return [OutputTensor(name, target(name), source.shape(name)) for name in source.names]
    spec, names, outputs = model_spec(model), set(source.names), []
    for stored, layout in stored_layouts(model).items():
        for part in layout.parts:
            found = source.shape(part.name) if part.name in names else None
            if found != (expected := spec.by_name[part.name].shape):
                raise CheckpointError(
                    f"the checkpoint has shape {found} of {shorten(part.name)}, and its identity {expected}",
                    "try another --step",
                )
        outputs.append(OutputTensor(stored, target(layout.parts[0].name), layout.shape, layout))
    return outputs


class TensorWriter:
    """Writes output tensors to files, and digests them."""

    def __init__(self, source: TensorSource, folder: Path) -> None:
        self.source, self.folder = source, folder
        self.digests: dict[str, str] = {}

    def write(self, file: str, outputs: Sequence[OutputTensor], header: bytes) -> None:
        """Writes one file durably."""
        with (self.folder / file).open("xb", buffering=0) as out, ThreadPoolExecutor(1) as pool:
            out.write(header)
            blocks = self.digested_blocks(outputs)
            following = pool.submit(next, blocks, None)
            while (content := following.result()) is not None:
                following = pool.submit(next, blocks, None)  # the next block is read while this one is written
                while content:
                    content = content[out.write(content) :]
            os.fsync(out.fileno())

    def digested_blocks(self, outputs: Sequence[OutputTensor]) -> Iterator[memoryview]:
        """The bytes of the output tensors, one after the other."""
        for output in outputs:
            state = xxhash.xxh3_128()
            for block in self.blocks(output):
                content = block.reshape(-1).view("u1").data
                state.update(content)
                yield content
            self.digests[output.name] = state.hexdigest()

    def blocks(self, output: OutputTensor) -> Iterator[Bits]:
        """The bits of an output tensor, in contiguous blocks of rows."""
        parts = output.layout.parts if output.layout is not None else ()
        if not parts:
            yield from self.rows_of(output, output.name, (), output.shape)
            return
        ordered = sorted(parts, key=lambda part: part.rows or (0, 0))
        shapes = [self.source.shape(part.name)[0 if part.expert is None else 1 :] for part in ordered]
        leads = [() if part.expert is None else (part.expert,) for part in ordered]
        if not parts[0].transposed:
            for part, lead, shape in zip(ordered, leads, shapes, strict=True):
                yield from self.rows_of(output, part.name, lead, shape)
            return
        whole = [
            np.concatenate([*self.rows_of(output, part.name, lead, shape)])
            for part, lead, shape in zip(ordered, leads, shapes, strict=True)
        ]
        yield np.ascontiguousarray(np.concatenate(whole).T)

    def rows_of(self, output: OutputTensor, name: str, lead: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Bits]:
        """A tensor, or one expert of it (`lead`), in blocks of rows, converted to the dtype of the output."""
        dtype = self.source.dtype(name)
        row_bytes = prod(shape[1:]) * TENSOR_BYTES[dtype]
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        if not shape:
            yield convert_bits(self.source.read(name, (), ()), dtype, output.dtype, f"tensor {shorten(output.name)}")
            return
        for start in range(0, shape[0], step):
            size = (min(step, shape[0] - start), *shape[1:])
            offset = (*lead, start, *(0,) * (len(shape) - 1))
            bits = self.source.read(name, offset, (*(1,) * len(lead), *size)).reshape(size)
            yield convert_bits(bits, dtype, output.dtype, f"tensor {shorten(output.name)}")


def write_shards(writer: TensorWriter, outputs: Sequence[OutputTensor], max_bytes: int) -> list[str]:
    """Writes safetensors files of at most `max_bytes`, and their index if there are several."""
    shards: list[list[OutputTensor]] = [[]]
    for output in outputs:
        if shards[-1] and sum(other.bytes for other in shards[-1]) + output.bytes > max_bytes:
            shards.append([])
        shards[-1].append(output)
    names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    for name, shard in zip(names, shards, strict=True):
        writer.write(name, shard, make_header((output.name, output.dtype, output.shape) for output in shard))
    if len(shards) > 1:
        total = sum(output.bytes for output in outputs)
        weight_map = {output.name: name for name, shard in zip(names, shards, strict=True) for output in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(writer.folder / INDEX_FILE, index)
    return names


def require_new_folder(to: Path) -> None:
    """Raises ConfigError if something is at the path of an export."""
    if os.path.lexists(to) and not (to.is_dir() and not to.is_symlink() and not os.listdir(to)):
        raise ConfigError(f"--to {to} exists and is not an empty folder", "expected a new folder")
    if not to.absolute().parent.is_dir():
        raise ConfigError(f"--to {to} is in a folder that does not exist", "expected a new folder in an existing one")


@contextmanager
def temporary_folder(to: Path) -> Iterator[Path]:
    """A folder beside `to` that gets its name when the block ends, and is removed if it fails."""
    target = to.absolute()
    folder = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        folder.mkdir()
        yield folder
        sync_folder(folder)
        os.rename(folder, target)
        sync_folder(target.parent)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and folder.exists():  # a file of the checkpoint
            raise
        raise ConfigError(f"{to} cannot be written: {error.strerror}", "expected a disk with free space") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "500MB" or "1GiB"."""
    match = re.fullmatch(r"([0-9]{1,15})\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS or not int(match[1]):
        raise ConfigError(f"--max-shard-size {shorten(text)} is not a size", "expected a number with KB, MB or GB")
    return int(match[1]) * UNITS[match[2].upper()]
