"""The settings whose defaults depend on the device: the fast path on CUDA, and exactness on CPU. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from meshwright.base.config.parallelism import SPLIT_BACKWARD_SCHEDULES
from meshwright.base.config.run_config import RunConfig
from meshwright.errors import ConfigError

DeviceType = Literal["cpu", "cuda"]


def with_device_defaults(config: RunConfig, device: DeviceType, own_model: bool = False) -> RunConfig:
    """Returns the config with a value for every setting whose default depends on the device, except for the choices
    that a run makes by measurement (`compile.scope`, `kernels.attention`) and for `precision.deterministic`, which
    belongs to the identity. What compile does not support is not compiled by default.
    """
    precision, compile_, kernels, on_cuda = config.precision, config.compile, config.kernels, device == "cuda"
    compute = precision.compute if precision.compute != "auto" else "bf16" if on_cuda else "fp32"
    rounds = on_cuda and not config.optimizer.cpu_offload
    weights = (precision.weights or ("bf16" if rounds else "fp32")) if compute == "bf16" else "fp32"
    precision = replace(
        precision,
        compute=compute,
        weights=weights,
        residual=(precision.residual or weights) if compute == "bf16" else "fp32",
    )
    if compile_.enabled is None:
        layout = config.layout
        splits_backward = layout.pipeline > 1 and config.pipeline.schedule in SPLIT_BACKWARD_SCHEDULES
        replaces_attention = own_model and layout.context > 1
        compile_ = replace(compile_, enabled=on_cuda and not splits_backward and not replaces_attention)
    fuses = on_cuda and not config.rl.enabled  # a policy objective needs the log-probability of every token
    kernels = replace(kernels, loss=kernels.loss or ("fused" if fuses else "torch"))
    return replace(config, precision=precision, compile=compile_, kernels=kernels)


def require_bf16(given: RunConfig, config: RunConfig) -> None:
    """Raises a ConfigError if the given config asks for bf16 weights or a bf16 residual stream, and the run computes in
    another precision.
    """
    compute = config.precision.compute
    for key in ("weights", "residual"):
        if getattr(given.precision, key) == "bf16" and compute != "bf16":
            raise ConfigError(
                f"precision.{key} = bf16 needs precision.compute = bf16, and the run computes in {compute}",
                f"expected precision.compute = bf16, or precision.{key} unset",
            )


def is_resolved(config: RunConfig) -> bool:
    """Whether every setting whose default depends on the device has a value."""
    precision = config.precision
    values = (precision.weights, precision.residual, config.compile.enabled, config.kernels.loss)
    return precision.compute != "auto" and None not in values


def without_device_defaults(config: RunConfig, given: RunConfig) -> RunConfig:
    """Returns the config as run.toml keeps it: what the user left to the device stays unset, so that the run gets the
    defaults of the device that it continues on. `precision.compute` keeps its value, which belongs to the identity.
    """
    precision = replace(given.precision, compute=config.precision.compute)
    return replace(config, precision=precision, compile=given.compile, kernels=given.kernels)
