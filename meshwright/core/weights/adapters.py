"""Low-rank adapters: the factors of a checkpoint alone, in the format of PEFT, or merged into the frozen parameters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.base.checkpoint.listing import CheckpointEntry
from meshwright.base.checkpoint.manifest import Manifest
from meshwright.base.config import LoraConfig, ModelConfig, RunConfig
from meshwright.base.config.reader import build_dataclass
from meshwright.base.dtypes import TENSOR_BYTES
from meshwright.base.models.lora import FACTORS, WEIGHT
from meshwright.base.models.registry import lora_spec, model_spec, stored_parameters
from meshwright.base.models.spec import ModelSpec
from meshwright.core.checkpoint.frozen import describe_base, hash_shard
from meshwright.core.models.init import init_shard
from meshwright.core.parallel.local_shard import LocalShard
from meshwright.core.weights.checkpoint_tensors import Bits, CheckpointTensors, TensorSource
from meshwright.core.weights.reader import WeightFolder
from meshwright.errors import CheckpointError, ConfigError

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
PEFT_FACTORS = dict(zip(FACTORS, ("lora_A", "lora_B"), strict=True))
BLOCK_BYTES = 8 << 20
"""Bytes of a frozen parameter that are verified at a time."""
DAMAGED = "try another --step"


def lora_of(manifest: Manifest) -> LoraConfig:
    """The low-rank adaptation that the identity of a checkpoint records."""
    keys = {key.removeprefix("lora."): value for key, value in manifest.identity.items() if key.startswith("lora.")}
    lora = build_dataclass(LoraConfig, keys, "lora")
    assert isinstance(lora, LoraConfig)
    return lora


def check_tensors(name: str, manifest: Manifest, source: TensorSource, spec: ModelSpec) -> None:
    """Raises CheckpointError unless the checkpoint `name` has every parameter of `spec` that it does not refer to, in
    its shape. The manifest is untrusted.
    """
    identity, names = manifest.identity, set(source.names)
    if type(identity.get("seed")) is not int:
        raise CheckpointError(f"the identity of {name} has no seed", DAMAGED)
    if manifest.base and not any(parameter.name.endswith(FACTORS) for parameter in spec.parameters):
        raise CheckpointError(f"{name} refers to frozen parameters, and its identity has no low-rank factors", DAMAGED)
    for parameter in spec.parameters:
        found = source.shape(parameter.name) if parameter.name in names else None
        is_referred_to = found is None and manifest.base and not parameter.name.endswith(FACTORS)
        if found != parameter.shape and not is_referred_to:
            raise CheckpointError(
                f"{name} has shape {found} of {parameter.name}, and its identity {parameter.shape}", DAMAGED
            )


class MergedTensors:
    """The parameters of a model with its factors merged: W + alpha / rank B A, one region at a time, computed in
    float64. The frozen parameters are those that the run read: the folder of `init_from`, or the initialization.
    """

    def __init__(self, entry: CheckpointEntry, model: ModelConfig, config: RunConfig) -> None:
        assert entry.manifest is not None
        self.factors, self.lora = CheckpointTensors(entry), lora_of(entry.manifest)
        check_tensors(entry.name, entry.manifest, self.factors, lora_spec(model, self.lora))
        self.spec, self.seed = model_spec(model), entry.manifest.identity["seed"]
        self.folder = open_base_folder(config, model)
        self.verify(entry, config)

    @cached_property
    def dtype_name(self) -> str:
        """The dtype of the parameters of the run."""
        return next(self.factors.dtype(name) for name in self.factors.names if name.endswith(FACTORS))

    @property
    def names(self) -> list[str]:
        return [*(parameter.name for parameter in self.spec.parameters), *self.buffers]

    @property
    def buffers(self) -> list[str]:
        return [name for name in self.factors.names if not name.endswith(FACTORS)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.factors.shape(name) if name in self.buffers else self.spec.by_name[name].shape

    def dtype(self, name: str) -> str:
        return self.factors.dtype(name) if name in self.buffers else self.dtype_name

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Bits:
        if name in self.buffers:
            return self.factors.read(name, offset, shape)
        base = self.base_region(name, offset, shape).numpy()
        module = name.removesuffix(WEIGHT)
        if name.endswith(WEIGHT) and f"{module}.{FACTORS[0]}" in self.factors.records:
            columns = self.factor(f"{module}.{FACTORS[0]}", (0, offset[1]), (self.lora.rank, shape[1]))
            rows = self.factor(f"{module}.{FACTORS[1]}", (offset[0], 0), (shape[0], self.lora.rank))
            base = (base.astype("<f8") + self.lora.scale * (rows @ columns)).astype(base.dtype)
        return np.ascontiguousarray(base).view(f"<u{TENSOR_BYTES[self.dtype_name]}")

    def factor(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Any:
        return self.factors.read(name, offset, shape).view(f"<f{TENSOR_BYTES[self.dtype_name]}").astype("<f8")

    def base_region(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """A region of a frozen parameter, in the dtype of the run."""
        local = torch.empty(tuple(shape), dtype=getattr(torch, self.dtype_name))
        if self.folder is not None and name in self.folder:
            return local.copy_(self.folder.read(name, offset, shape))
        init_shard(local, name, self.spec.by_name[name].shape, offset, self.spec, self.seed)
        return local

    def verify(self, entry: CheckpointEntry, config: RunConfig) -> None:
        """Raises CheckpointError unless the frozen parameters are those that the factors were trained with."""
        assert entry.manifest is not None
        recorded, total = entry.manifest.base.get("digest"), 0
        for parameter in self.spec.parameters:
            for offset, shape in row_blocks(parameter.shape, TENSOR_BYTES[self.dtype_name]):
                local = self.base_region(parameter.name, offset, shape)
                total += int(hash_shard(parameter.name, LocalShard(local, parameter.shape, offset)))
        if (found := f"{total & (1 << 64) - 1:016x}") != recorded:
            raise CheckpointError(
                f"{entry.name} was trained on frozen parameters with digest {recorded}, and {describe_base(config)} "
                f"has {found}",
                "try to restore the weights that the run began with, or --adapter to export the factors alone",
            )


def row_blocks(shape: tuple[int, ...], element_bytes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, shape) of blocks of rows that cover a tensor."""
    rows = max(1, BLOCK_BYTES // max(1, prod(shape[1:]) * element_bytes))
    for start in range(0, shape[0], rows):
        yield (start, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:])


def open_base_folder(config: RunConfig, model: ModelConfig) -> WeightFolder | None:
    """The folder that the frozen parameters come from; None for the initialization."""
    if config.init_from and not os.path.lexists(config.init_from):
        raise CheckpointError(
            f"init_from = {config.init_from} does not exist, and checkpoints of low-rank adaptation do not contain the "
            "frozen parameters",
            "try to restore the folder, or --adapter to export the factors alone",
        )
    return WeightFolder(config.init_from, model) if config.init_from else None


def peft_names(model: ModelConfig, lora: LoraConfig) -> dict[str, str]:
    """Name of a factor in an adapter of PEFT -> its name in the spec. Raises ConfigError for a projection that Hugging
    Face folders store together with others.
    """
    stored = {part.name: part for part in stored_parameters(model)}
    names = {}
    for parameter in lora_spec(model, lora).parameters:
        module, _, factor = parameter.name.rpartition(".")
        if factor in PEFT_FACTORS:
            part = stored[f"{module}{WEIGHT}"]
            if part.transposed or part.rows is not None or part.expert is not None:
                raise ConfigError(
                    f"Hugging Face models of the family {model.family} store {module} as a part of {part.stored}, "
                    "so it has no adapter of its own",
                    "try the export without --adapter, which merges the factors",
                )
            name = part.stored.removesuffix(WEIGHT)
            names[f"base_model.model.{name}.{PEFT_FACTORS[factor]}.weight"] = parameter.name
    return names


def adapter_config(model: ModelConfig, lora: LoraConfig, base: str) -> dict[str, Any]:
    """The adapter_config.json of PEFT."""
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in peft_names(model, lora)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).absolute()) if base else None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "target_modules": target_modules(model, modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def target_modules(model: ModelConfig, modules: set[str]) -> list[str]:
    """The modules of an adapter as PEFT finds them: by the last part of their name where all modules with it have
    factors, else by their full name.
    """
    linear = {part.stored.removesuffix(WEIGHT) for part in stored_parameters(model) if part.stored.endswith(WEIGHT)}
    short = {name.rpartition(".")[2] for name in modules}
    complete = {name for name in short if {m for m in linear if fnmatchcase(m, f"*.{name}")} <= modules}
    return sorted(complete | {name for name in modules if name.rpartition(".")[2] not in complete})
