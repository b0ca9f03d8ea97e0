"""The settings whose defaults depend on the device: the fast path on CUDA, and exactness on CPU. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from meshwright.config.run_config import RunConfig

DeviceType = Literal["cpu", "cuda"]


def with_device_defaults(config: RunConfig, device: DeviceType) -> RunConfig:
    """Returns the config with a value for every setting whose default depends on the device, except for the choices
    that a run makes by measurement (`compile.scope`, `kernels.attention`).
    """
    precision, compile_, kernels, on_cuda = config.precision, config.compile, config.kernels, device == "cuda"
    weights = precision.weights or ("bf16" if on_cuda and precision.compute == "bf16" else "fp32")
    precision = replace(
        precision,
        weights=weights,
        residual=precision.residual or weights,
        deterministic=not on_cuda if precision.deterministic is None else precision.deterministic,
    )
    compile_ = replace(compile_, enabled=on_cuda if compile_.enabled is None else compile_.enabled)
    kernels = replace(kernels, loss=kernels.loss or ("fused" if on_cuda else "torch"))
    return replace(config, precision=precision, compile=compile_, kernels=kernels)
