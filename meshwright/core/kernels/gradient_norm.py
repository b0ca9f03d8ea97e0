"""The norm of all elements of many tensors, in one pass over memory and one launch for each dtype."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from meshwright.core.kernels.adamw import host_to_device, list_blocks
from meshwright.core.kernels.triton_runtime import runs_triton
from meshwright.core.torch_private import foreach_norm, is_fake

BLOCK, WARPS = 8192, 8
"""Elements that one program of the kernel reads, and its warps."""


def square_sum(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The float64 sum of the squares of all elements. Squares are summed in `dtype` first: by tensor, or on CUDA by
    block, without atomic additions, so that equal tensors have equal sums.
    """
    tensors = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    by_triton = dtype == torch.float32 and all(map(can_read, tensors))
    return square_sum_triton(tensors) if by_triton else square_sum_torch(tensors, dtype)


def square_sum_torch(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack(foreach_norm(list(tensors), dtype=dtype)).double().square().sum()


def square_sum_triton(tensors: Sequence[Tensor]) -> Tensor:
    from meshwright.core.kernels.adamw_kernel import DTYPES
    from meshwright.core.kernels.gradient_norm_kernel import square_sums_kernel

    sums = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        of_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
        device, addresses = of_dtype[0].device, [tensor.data_ptr() for tensor in of_dtype]
        blocks, sizes = block_table(tuple(tensor.numel() for tensor in of_dtype), device)
        sums.append(torch.empty(len(blocks), dtype=torch.float32, device=device))
        square_sums_kernel[(len(blocks),)](
            host_to_device(torch.tensor(addresses), device),
            blocks,
            sizes,
            sums[-1],
            DTYPE=DTYPES[dtype],
            ALIGNED=all(address % 16 == 0 for address in addresses),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return torch.cat(sums).sum(dtype=torch.float64)


def can_read(tensor: Tensor) -> bool:
    """Whether the kernel reads this tensor: its elements fill their memory in any order."""
    if is_fake(tensor) or not runs_triton(tensor.device) or tensor.dtype not in (torch.float32, torch.bfloat16):
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 == tensor.numel()


@lru_cache(maxsize=8)
def block_table(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The tensor and block of every program, and the elements of every tensor, on the device."""
    return list_blocks(sizes, BLOCK).to(device), torch.tensor(sizes).to(device)
