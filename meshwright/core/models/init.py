"""Initial weights as a pure function of (seed, parameter name, row block), so they do not depend on the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import import_module

import torch
from torch import Tensor, nn

from meshwright.base.config import LoraConfig, ModelConfig
from meshwright.base.models.registry import family_options, family_package, lora_spec
from meshwright.base.models.spec import ModelSpec
from meshwright.core.models.layers.lora_linear import add_factors

ROWS_PER_KEY = 1024
"""Rows that one random generator produces. A rank generates only the row blocks that overlap its shard."""


NO_LORA = LoraConfig()


def build_on_meta(
    config: ModelConfig, dtype: torch.dtype, lora: LoraConfig = NO_LORA, residual: torch.dtype | None = None
) -> nn.Module:
    """The configured model on the meta device, without weights. `residual` is the dtype of its residual stream; None:
    that of its embedding.
    """
    family_package(config)  # raises ConfigError for an unknown family
    family = import_module(f"meshwright.core.models.{config.family}")
    with torch.device("meta"):
        model: nn.Module = family.build(config, family_options(config)).to(dtype)
    model.decoder.residual = residual  # type: ignore[union-attr]
    if lora.enabled:
        add_factors(model, lora_spec(config, lora), lora.scale)
    return model


def set_trainable(model: nn.Module, spec: ModelSpec) -> nn.Module:
    """Lets those parameters require a gradient that the spec declares as trainable."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(spec.by_name[name].trainable)
    return model


def build_empty(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    lora: LoraConfig = NO_LORA,
    residual: torch.dtype | None = None,
) -> nn.Module:
    """The configured model on a device, with memory and without values."""
    model = build_on_meta(config, dtype, lora, residual).to_empty(device=device)
    for copy, owner in lora_spec(config, lora).tied.items():  # to_empty allocates separate storage for each module
        module, _, name = copy.rpartition(".")
        model.get_submodule(module).register_parameter(name, model.get_parameter(owner))
    return model


def build_model(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    lora: LoraConfig = NO_LORA,
) -> nn.Module:
    """The full model with its initial weights."""
    model, spec = build_empty(config, dtype, device, lora), lora_spec(config, lora)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        init_shard(tensor.detach(), name, tensor.shape, (0,) * tensor.ndim, spec, seed)
    return model


def init_shard(
    local: Tensor, name: str, shape: Sequence[int], offset: Sequence[int], spec: ModelSpec, seed: int
) -> None:
    """Initializes `local`, the shard at `offset` of a parameter or buffer with this name and full shape."""
    parameter = spec.by_name.get(name)
    values = parameter.initialization if parameter is not None else spec.buffer_initializations[name]
    assert values is not None
    if values.kind == "constant":
        local.fill_(values.value)
    elif parameter is not None and parameter.is_expert_weight:
        # Each expert's matrix has its own generator, so a rank generates only its experts.
        for expert, matrix in enumerate(local, offset[0]):
            init_matrix_shard(matrix, f"{name}.{expert}", shape[1:], offset[1:], values.value, seed)
    else:
        init_matrix_shard(local, name, shape, offset, values.value, seed)


def init_matrix_shard(
    local: Tensor, name: str, shape: Sequence[int], offset: Sequence[int], std: float, seed: int
) -> None:
    if not local.numel():
        return
    first, end = offset[0], offset[0] + local.shape[0]
    for start in range(first // ROWS_PER_KEY * ROWS_PER_KEY, end, ROWS_PER_KEY):
        stop = min(start + ROWS_PER_KEY, shape[0])
        rows = initial_rows(seed, name, shape, start, stop, std)
        overlap_start, overlap_end = max(start, first), min(stop, end)
        block = rows[overlap_start - start : overlap_end - start]
        for dim in range(1, len(shape)):
            block = block.narrow(dim, offset[dim], local.shape[dim])
        local[overlap_start - first : overlap_end - first].copy_(block)


def initial_rows(seed: int, name: str, shape: Sequence[int], start: int, stop: int, std: float) -> Tensor:
    """Rows [start, stop) of a parameter's initial value, in float32 on the CPU; start is a multiple of ROWS_PER_KEY."""
    digest = hashlib.sha256(f"{seed}/{name}/{start // ROWS_PER_KEY}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randn((stop - start, *shape[1:]), generator=generator) * std
