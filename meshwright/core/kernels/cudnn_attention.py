"""Causal attention with cuDNN's deterministic backward pass, which torch does not offer, by nvidia-cudnn-frontend.

Torch runs its flash kernels in deterministic mode, which take twice as long on Hopper. They are the oracle, and the
fallback where the package is not installed or cuDNN does not support the tensors.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshwright.core.torch_private import cudnn_attention_forward
from meshwright.errors import ConfigError

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 128
Sizes = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape and the strides of a tensor."""

_in_use = False


def has_cudnn_frontend() -> bool:
    """Whether the package nvidia-cudnn-frontend is installed."""
    return importlib.util.find_spec("cudnn") is not None


def use_cudnn_backward(in_use: bool) -> None:
    """Decides whether this process uses cuDNN's deterministic backward pass while deterministic algorithms are on."""
    global _in_use
    if in_use and not has_cudnn_frontend():
        raise ConfigError(
            "kernels.attention = cudnn with precision.deterministic = true needs the package nvidia-cudnn-frontend",
            "try pip install 'meshwright[deterministic]', or set kernels.attention = flash for a new run",
        )
    _in_use = in_use


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether causal attention of these tensors runs by cuDNN here."""
    sizes = (q.shape[-1], v.shape[-1])
    return (
        _in_use
        and torch.are_deterministic_algorithms_enabled()
        and q.is_cuda
        and q.dtype in DTYPES
        and q.shape[2] == k.shape[2]
        and all(size % 8 == 0 and size <= MAX_HEAD_SIZE for size in sizes)
    )


def deterministic_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention over (batch, heads, sequence, head size); keys and values may have fewer heads."""
    attended: Tensor = CudnnAttention.apply(q, k, v, scale)  # type: ignore[no-untyped-call]
    return attended


class CudnnAttention(torch.autograd.Function):
    """Torch's forward pass by cuDNN, and the deterministic backward pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, log_sum, *_ = cudnn_attention_forward(q, k, v, None, True, 0.0, True, False, scale=scale)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.scale = scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, log_sum = ctx.saved_tensors
        return (*attention_backward(gradient, q, k, v, out, log_sum, ctx.scale), None)


@torch.library.custom_op("meshwright::cudnn_attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    import cudnn

    if gradient.stride() != out.stride():
        gradient = torch.empty_like(out).copy_(gradient)
    log_sum = log_sum.view(*q.shape[:3], 1)
    inputs, outputs = [q, k, v, out, gradient, log_sum], [by_token(t) for t in (q, k, v)]
    sizes = tuple((tuple(t.shape), t.stride()) for t in (*inputs, *outputs))
    device = q.device.index
    graph, tensors, workspace_bytes = backward_graph(sizes, q.dtype, scale, device)
    workspace, handle = torch.empty(workspace_bytes, dtype=torch.uint8, device=q.device), cudnn_handle(device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
    graph.execute(dict(zip(tensors, [*inputs, *outputs], strict=True)), workspace, handle=handle)
    return outputs[0], outputs[1], outputs[2]


@attention_backward.register_fake
def _fake_backward(
    _gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _log_sum: Tensor, _scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return by_token(q), by_token(k), by_token(v)


def by_token(like: Tensor) -> Tensor:
    """A new tensor of this shape whose heads of one token are adjacent, as projections read them."""
    batch, heads, tokens, size = like.shape
    return like.new_empty(batch, tokens, heads, size).transpose(1, 2)


@cache
def cudnn_handle(_device: int) -> Any:
    import cudnn

    return cudnn.create_handle()


@cache
def backward_graph(
    sizes: tuple[Sizes, ...], dtype: torch.dtype, scale: float, device: int
) -> tuple[Any, list[Any], int]:
    """cuDNN's plan for queries, keys, values, output, its gradient and log-sum-exp, and for the three gradients: the
    graph, its tensors, and the bytes of its workspace.
    """
    import cudnn

    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16 if dtype == torch.bfloat16 else cudnn.data_type.HALF,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=cudnn_handle(device),
    )
    q, k, v, out, gradient = (graph.tensor(dim=list(shape), stride=list(strides)) for shape, strides in sizes[:5])
    shape, strides = sizes[5]
    log_sum = graph.tensor(dim=list(shape), stride=list(strides), data_type=cudnn.data_type.FLOAT)
    gradients = graph.sdpa_backward(
        q=q,
        k=k,
        v=v,
        o=out,
        dO=gradient,
        stats=log_sum,
        attn_scale=scale,
        use_causal_mask=True,
        use_deterministic_algorithm=True,
    )
    for tensor, (shape, strides) in zip(gradients, sizes[6:], strict=True):
        tensor.set_output(True).set_dim(list(shape)).set_stride(list(strides))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph, [q, k, v, out, gradient, log_sum, *gradients], graph.get_workspace_size()
