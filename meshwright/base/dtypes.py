"""The table of dtypes: their names in configs and plans, their names in torch, and their sizes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.base.config.run_config import RunConfig


@dataclass(frozen=True)
class DType:
    """A dtype of tensors."""

    torch_name: str
    """its name in torch: torch.bfloat16 is "bfloat16\""""
    bits: int
    """bits per element"""
    precision: str = ""
    """its name in configs, plans and cluster files, if it is a precision that matrix products run in"""
    compute: bool = False
    """whether a run can train in it (`precision.compute`)"""


DTYPES = (
    DType("float32", 32, "fp32", compute=True),
    DType("bfloat16", 16, "bf16", compute=True),
    DType("float16", 16, "fp16", compute=True),
    DType("float64", 64, "fp64", compute=True),
    DType("float8_e4m3fn", 8, "fp8"),
    DType("float4_e2m1fn_x2", 4, "fp4"),
    DType("float8_e5m2", 8),
    DType("int64", 64),
    DType("int32", 32),
    DType("int16", 16),
    DType("int8", 8),
    DType("uint8", 8),
    DType("bool", 8),
)

PRECISIONS = tuple(dtype.precision for dtype in DTYPES if dtype.precision)
"""Precisions that the planner estimates."""
PRECISION_BYTES = {dtype.precision: dtype.bits / 8 for dtype in DTYPES if dtype.precision}
"""Precision -> bytes per element."""
COMPUTE_BYTES = {dtype.precision: dtype.bits // 8 for dtype in DTYPES if dtype.compute}
"""Precision that a run can train in -> bytes per element."""
TORCH_NAMES = {dtype.precision: dtype.torch_name for dtype in DTYPES if dtype.precision}
"""Precision -> name of the dtype in torch."""
TENSOR_BYTES = {dtype.torch_name: dtype.bits // 8 for dtype in DTYPES if dtype.bits >= 8}
"""Torch name of a dtype that a checkpoint can store -> bytes per element."""


def rounds_weights(config: RunConfig) -> bool:
    """Whether the weights in the model are bf16, the rounding of float32 master weights in the optimizer. An offloaded
    update has a float32 copy of the parameters already, and the model keeps them so.
    """
    precision = config.precision
    return (precision.compute, precision.weights) == ("bf16", "bf16") and not config.optimizer.cpu_offload


def parameter_bytes(config: RunConfig) -> int:
    """Bytes per element of the parameters that the optimizer updates, and of gradients that are summed over ranks."""
    return 8 if config.precision.compute == "fp64" else 4


def weight_bytes(config: RunConfig) -> int:
    """Bytes per element of the weights in the model."""
    return 2 if rounds_weights(config) else parameter_bytes(config)


def residual_bytes(config: RunConfig) -> int:
    """Bytes per element of the residual stream."""
    is_bf16 = (config.precision.compute, config.precision.residual) == ("bf16", "bf16")
    return 2 if is_bf16 else parameter_bytes(config)
