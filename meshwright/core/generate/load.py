"""Loads the model of a checkpoint of any layout, or of an exported folder, into this process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.base.checkpoint.listing import CheckpointEntry
from meshwright.base.config import ModelConfig, RunConfig
from meshwright.base.models.registry import lora_spec, read_huggingface_model
from meshwright.base.models.spec import ModelSpec
from meshwright.base.topology.layout import Layout
from meshwright.core.checkpoint.frozen import frozen_digest
from meshwright.core.checkpoint.inspect import reporting_deletion, run_config, select_intact
from meshwright.core.models.init import build_empty, init_shard
from meshwright.core.parallel.world import World
from meshwright.core.weights.adapters import check_tensors, lora_of
from meshwright.core.weights.checkpoint_tensors import Bits, CheckpointTensors
from meshwright.core.weights.export import model_of
from meshwright.core.weights.reader import WeightFolder
from meshwright.errors import CheckpointError, ConfigError

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class LoadedModel:
    """A model in one process, and what it was loaded from."""

    model: nn.Module
    spec: ModelSpec
    config: RunConfig
    name: str
    """the name of the checkpoint, or the folder of an export"""
    step: int | None
    folder: Path | None
    """the folder of an export"""


def load_model(path: Path, step: int | None = None, device: torch.device | None = None) -> LoadedModel:
    """Loads the newest checkpoint of a run folder or that of a step, a checkpoint folder, or an exported folder. Every
    byte is verified first.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (path / CONFIG_FILE).is_file() and not (path / "run.toml").exists():
        return load_export(path, step, device)
    entry = select_intact(path, step)
    assert entry.manifest is not None
    recorded, config = model_of(entry.manifest), run_config(path)
    if recorded is None:
        raise ConfigError(
            f"{entry.name} is of a custom model, which this verb cannot build",
            "try meshwright checkpoint export RUN --to DIR, and the generate function of the model itself",
        )
    config = replace(config, model=for_generation(recorded), lora=lora_of(entry.manifest))
    spec = lora_spec(config.model, config.lora)
    source = CheckpointTensors(entry)
    check_tensors(entry.name, entry.manifest, source, spec)
    dtype = getattr(torch, source.dtype(source.names[0]))
    model = build_empty(config.model, dtype, device, config.lora).eval()
    with reporting_deletion(entry):
        fill_model(model, spec, source, config)
    check_base(entry, model, set(source.names))
    return LoadedModel(model, spec, config, entry.name, entry.step, None)


def load_export(path: Path, step: int | None, device: torch.device) -> LoadedModel:
    if step is not None:
        raise ConfigError(f"{path} is an exported folder, which has one set of weights", "try without --step")
    folder = WeightFolder(path)
    _ = folder.digest  # reads and checks every byte
    config = replace(RunConfig(), model=for_generation(read_huggingface_model(folder.files.config_fields())))
    spec = lora_spec(config.model, config.lora)
    first = spec.parameters[0].name
    dtype = folder.read(first, (0,) * len(spec.by_name[first].shape), (1,) * len(spec.by_name[first].shape)).dtype
    model = build_empty(config.model, dtype, device).eval()
    for name, tensor in named_tensors(model):
        if name in folder:
            tensor.copy_(folder.read(name, (0,) * tensor.ndim, tuple(tensor.shape)))
        else:
            init_shard(tensor, name, tensor.shape, (0,) * tensor.ndim, spec, config.seed)
    return LoadedModel(model, spec, config, path.name, None, path)


def for_generation(model: ModelConfig) -> ModelConfig:
    """Experts drop no tokens: which ones are dropped depends on the batch."""
    return replace(model, capacity_factor=0.0)


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    persistent = model.state_dict(keep_vars=True)
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]
    return [(name, tensor.detach()) for name, tensor in (*model.named_parameters(), *buffers)]


def fill_model(model: nn.Module, spec: ModelSpec, source: CheckpointTensors, config: RunConfig) -> None:
    """Copies every tensor of a checkpoint; frozen parameters come from where the run has them."""
    saved = set(source.names)
    base = WeightFolder(config.init_from, config.model) if config.init_from and config.lora.enabled else None
    for name, tensor in named_tensors(model):
        start = (0,) * tensor.ndim
        if name in saved:
            if source.shape(name) != tuple(tensor.shape):
                raise CheckpointError(
                    f"the checkpoint has shape {source.shape(name)} of {name}, and its model {tuple(tensor.shape)}",
                    "try another --step",
                )
            tensor.copy_(from_bits(source.read(name, start, tensor.shape), source.dtype(name)))
        elif base is not None and name in base:
            tensor.copy_(base.read(name, start, tuple(tensor.shape)))
        else:
            init_shard(tensor, name, tensor.shape, start, spec, config.seed)


@torch.no_grad()
def fill_initial(model: nn.Module, spec: ModelSpec, config: RunConfig) -> None:
    """Fills a model with the initial values of a run: those of `init_from`, else those of the seed."""
    base = WeightFolder(config.init_from, config.model) if config.init_from else None
    for name, tensor in named_tensors(model):
        start = (0,) * tensor.ndim
        if base is not None and name in base:
            tensor.copy_(base.read(name, start, tuple(tensor.shape)))
        else:
            init_shard(tensor, name, tensor.shape, start, spec, config.seed)


def from_bits(bits: Bits, dtype: str) -> Tensor:
    """The values of elements that are given as unsigned integers of their bits."""
    return torch.from_numpy(bits.view(f"i{bits.itemsize}").copy()).view(getattr(torch, dtype))  # it may be read-only


def check_base(entry: CheckpointEntry, model: nn.Module, saved: set[str]) -> None:
    """Raises CheckpointError unless the frozen parameters are those that the checkpoint refers to."""
    assert entry.manifest is not None
    frozen = {name: parameter for name, parameter in model.named_parameters() if name not in saved}
    expected = entry.manifest.base.get("digest", "")
    found = frozen_digest(frozen, Layout(), World()) if frozen else ""
    if found != expected:
        raise CheckpointError(
            f"checkpoint {entry.name} refers to frozen parameters with digest {expected or 'none'}, and those of the "
            f"run have digest {found or 'none'}",
            "try to restore the folder that init_from names",
        )
