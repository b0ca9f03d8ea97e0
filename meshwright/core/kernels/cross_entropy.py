"""The output projection and the cross-entropy loss in one function, which keeps the logits of one chunk of tokens.

The logits of a chunk are replaced by their gradient in place, and the gradients of the hidden states and of the weight
are computed at once; backward multiplies them by the gradient of the loss. The weight's gradient is added up over
chunks in float32 at least, so it is rounded once, as that of one matrix product is.

If the rows of the weight are sharded over ranks, each rank has the logits of its part of the vocabulary, and three
all-reduces of one number per token complete log-sum-exp and the label's logit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.core.kernels.triton_runtime import runs_triton
from meshwright.core.torch_private import is_fake, resolve_process_group

CHUNK_BYTES = 2**32
"""The most bytes of the logits of one chunk. On an H200, half as many make the products of 16,384 tokens with a
vocabulary of 128,256 about 4 % slower.
"""
CHUNK_TOKENS = 16_384
"""The most tokens of one chunk: more of them make no product faster."""
VOCAB_MULTIPLE = 64
"""Logits are computed for a multiple of this many rows of the weight: four times as fast as for 50,257 of them."""
TOKEN_MULTIPLE = 256
"""Tokens per chunk are rounded up to a multiple of this, the tile of a matrix product."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    first_row: int = 0,
    group: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Returns the sum of the cross-entropy losses of `softcap * tanh(hidden @ weight.T / softcap)`, without the cap if
    it is None. Tokens whose label is `ignore_index` count nothing. Under autocast, matrix products have its dtype.

    With `group`, the name of a process group, the weight is the shard that begins with the row `first_row` of a weight
    whose rows are sharded over the group; every rank returns the loss, and its part of the gradient of the hidden
    states.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    chunk = chunk_tokens or default_chunk(len(hidden), len(weight), dtype.itemsize, chunk_bytes)
    settings = dtype, ignore_index - first_row, softcap, chunk, group
    labels = labels - first_row
    if not torch.is_grad_enabled() or not (hidden.requires_grad or weight.requires_grad):
        return compute(hidden, weight, labels, *settings, False, False)[0]
    return LinearCrossEntropy.apply(hidden, weight, labels, *settings)  # type: ignore[no-any-return, no-untyped-call]


def default_chunk(tokens: int, vocab: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Tokens per chunk: the fewest chunks of at most `chunk_bytes` and `CHUNK_TOKENS`, all of about the same size."""
    most = max(1, min(CHUNK_TOKENS, chunk_bytes // (padded(vocab) * itemsize)))
    chunks = max(1, math.ceil(tokens / most))
    return max(1, math.ceil(tokens / chunks / TOKEN_MULTIPLE)) * TOKEN_MULTIPLE


def padded(vocab: int) -> int:
    return math.ceil(vocab / VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class LinearCrossEntropy(torch.autograd.Function):
    """`linear_cross_entropy` with its gradients, which forward computes."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        dtype: torch.dtype,
        ignore_index: int,
        softcap: float | None,
        chunk: int,
        group: str | None,
    ) -> Tensor:
        needed = hidden.requires_grad, weight.requires_grad
        settings = dtype, ignore_index, softcap, chunk, group
        loss, d_hidden, d_weight = compute(hidden, weight, labels, *settings, *needed)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes, ctx.needed = (hidden.dtype, weight.dtype), needed
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        scaled = [
            scale(tensor, gradient, dtype) if needed else None
            for tensor, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needed, strict=True)
        ]
        return *scaled, None, None, None, None, None, None


def compute(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    softcap: float | None,
    chunk: int,
    group: str | None,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the summed loss and its gradients over hidden states and weight; those that are not needed are empty.
    torch.compile sees it as one operator.
    """
    function = compute_operator if torch.compiler.is_compiling() else compute_chunks
    return function(hidden, weight, labels, dtype, ignore_index, softcap, chunk, group, needs_hidden, needs_weight)


@torch.no_grad()
def compute_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    softcap: float | None,
    chunk: int,
    group: str | None,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, vocab, gradient = len(hidden), len(weight), needs_hidden or needs_weight
    d_hidden, d_weight = empty_gradients(hidden, weight, padded(vocab), dtype, needs_hidden, needs_weight)
    log_sums, targets = hidden.new_empty(2, tokens, dtype=at_least_float32(dtype))
    with torch.autocast(hidden.device.type, enabled=False):
        hidden, weight = hidden.to(dtype), pad_rows(weight.to(dtype))
        buffer = hidden.new_empty(min(chunk, tokens), len(weight))
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            logits = buffer[: part.stop - start]
            torch.mm(hidden[part], weight.t(), out=logits)
            rows = Rows(logits, vocab, labels[part], log_sums[part], targets[part], ignore_index, softcap)
            if group is None:
                rows.compute(statistics=True, gradient=gradient)
            else:
                rows.compute(statistics=True, gradient=False)
                complete_statistics(log_sums[part], targets[part], resolve_process_group(group))
                rows.compute(statistics=False, gradient=gradient)
            if needs_hidden:
                torch.mm(logits, weight, out=d_hidden[part])
            if needs_weight:
                add_product(d_weight, logits.t(), hidden[part], first=start == 0)
    if not tokens:
        d_weight.zero_()
    return (log_sums - targets).where(labels != ignore_index, 0.0).sum(), d_hidden, d_weight[:vocab]


def pad_rows(weight: Tensor) -> Tensor:
    return F.pad(weight, (0, 0, 0, padded(len(weight)) - len(weight))) if len(weight) % VOCAB_MULTIPLE else weight


def complete_statistics(log_sums: Tensor, targets: Tensor, group: dist.ProcessGroup) -> None:
    """Combines the statistics of the ranks' parts of the vocabulary, in place."""
    largest = log_sums.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    log_sums.sub_(largest).exp_()
    dist.all_reduce(log_sums, group=group)
    log_sums.log_().add_(largest)
    dist.all_reduce(targets, dist.ReduceOp.MAX, group=group)


compute_operator = torch.library.custom_op(
    "meshwright::linear_cross_entropy",
    compute_chunks,
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor labels, ScalarType dtype, int ignore_index, float? softcap, "
    "int chunk, str? group, bool needs_hidden, bool needs_weight) -> (Tensor, Tensor, Tensor)",
)


@compute_operator.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,  # noqa: ARG001
    dtype: torch.dtype,
    ignore_index: int,  # noqa: ARG001
    softcap: float | None,  # noqa: ARG001
    chunk: int,  # noqa: ARG001
    group: str | None,  # noqa: ARG001
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=at_least_float32(dtype))
    return loss, *empty_gradients(hidden, weight, len(weight), dtype, needs_hidden, needs_weight)


def empty_gradients(
    hidden: Tensor, weight: Tensor, rows: int, dtype: torch.dtype, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """Allocates the gradients: of the hidden states in the dtype of the products, of the weight in float32 at least."""
    d_hidden = hidden.new_empty(hidden.shape if needs_hidden else 0, dtype=dtype)
    shape = (rows, weight.shape[1]) if needs_weight else (0, weight.shape[1])
    d_weight = weight.new_empty(shape, dtype=at_least_float32(dtype))
    return d_hidden, d_weight


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Adds left @ right to the total, which has no value before the first product."""
    beta = 0 if first else 1
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=beta, out=total)


@dataclass(frozen=True)
class Rows:
    """Rows of logits and what is computed of them."""

    logits: Tensor
    vocab: int
    """the number of logits; the rest of a row is padding"""
    labels: Tensor
    log_sums: Tensor
    """log-sum-exp of every row"""
    targets: Tensor
    """the logit of every row's label; -inf if the label is outside of the vocabulary, so that the loss is not finite"""
    ignore_index: int
    softcap: float | None

    def compute(self, *, statistics: bool, gradient: bool) -> None:
        """Computes `log_sums` and `targets`, and with `gradient` replaces the logits by the gradient of the loss."""
        if not runs_triton(self.logits.device) or self.logits.dtype == torch.float64:
            self.compute_by_torch(statistics=statistics, gradient=gradient)
        elif (statistics or gradient) and not is_fake(self.logits):
            from meshwright.core.kernels.cross_entropy_kernel import launch

            columns = self.logits, self.vocab, self.labels, self.log_sums, self.targets
            launch(*columns, self.ignore_index, self.softcap, statistics=statistics, gradient=gradient)

    def compute_by_torch(self, *, statistics: bool, gradient: bool) -> None:
        """The torch function of the kernel."""
        logits, cap = self.logits[:, : self.vocab], self.softcap
        wide = logits.to(self.log_sums.dtype)
        capped = wide if cap is None else cap * (wide / cap).tanh()
        valid = (self.labels != self.ignore_index)[:, None]
        inside = (self.labels >= 0)[:, None] & (self.labels < self.vocab)[:, None]
        index = self.labels[:, None].where(inside, 0)
        if statistics:
            self.log_sums.copy_(capped.logsumexp(-1).where(valid[:, 0], 0.0))
            self.targets.copy_(capped.gather(1, index).where(inside, -math.inf).where(valid, 0.0)[:, 0])
        if gradient:
            slope = 1.0 if cap is None else 1.0 - (capped / cap) ** 2
            probability = (capped - self.log_sums[:, None]).exp_()
            of_label = probability.gather(1, index)
            probability.scatter_(1, index, torch.where(inside, of_label - 1.0, of_label))
            logits.copy_((probability * slope).where(valid, 0.0))
            self.logits[:, self.vocab :] = 0.0


def scale(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns tensor * factor in a dtype, rounded once: torch would round the factor to the dtype of the tensor."""
    if torch.compiler.is_compiling() or is_fake(tensor) or not runs_triton(tensor.device) or dtype == torch.float64:
        return (tensor.to(factor.dtype) * factor).to(dtype)
    from meshwright.core.kernels.cross_entropy_kernel import launch_scale

    return launch_scale(tensor, factor, dtype)
