"""Before the first step: a user's model computes on sequence chunks what it computes on full sequences.

A model that derives positions from the length of its input, or that mixes tokens outside of attention, would train on
wrong values. Both show in the keys of attention: those of a chunk must be those of the full sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.parallel.context_parallel.attention_call import AttentionCall
from meshwright.core.parallel.context_parallel.context_attention import ContextAttention
from meshwright.core.parallel.context_parallel.sequence_chunks import sequence_length
from meshwright.core.parallel.parallel_model import Autocast, ParallelModel
from meshwright.errors import ConfigError

SHORT = 256
"""Tokens of the sequences that are compared, at most."""
KEY_TOLERANCE, LOSS_TOLERANCE = 1e-3, 1e-4
"""Relative errors of keys and of the loss; wrong positions change keys by their own size."""
HALF_PRECISION_FACTOR = 100.0
"""How much larger the errors of half precision may be."""


@torch.no_grad()
def check_context_parallel(parallel_model: ParallelModel, batch: tuple[Tensor, ...], autocast: Autocast) -> None:
    """Raises a ConfigError if the keys of an attention, or the loss, differ from those of full sequences."""
    attention = parallel_model.context
    assert attention is not None
    full = shorten(batch, attention)
    keys: list[Tensor] = []
    differences: list[float] = []

    def compare(call: AttentionCall) -> None:
        expected, found = attention.chunks.select(call.k, 2).double(), keys[len(differences)].double()
        differences.append(float((expected - found).abs().max() / expected.abs().max().clamp(min=1e-30)))

    with evaluation_mode(parallel_model.module), autocast():
        is_half = torch.is_autocast_enabled(full[0].device.type)  # a model may turn its keys by float32 angles
        attention.observe = lambda call: keys.append(call.k)
        in_chunks = parallel_model.forward_loss(*parallel_model.shard_inputs(full)).double()
        attention.observe = compare
        with attention.disabled():
            whole = float(parallel_model.forward_loss(*parallel_model.shard_inputs(full)))
        attention.observe = lambda _call: None
    parallel_model.reshard()
    if not keys:
        raise ConfigError(
            "layout.context divides the sequence of attention, and the forward of the model calls neither "
            "torch.nn.functional.scaled_dot_product_attention nor the attention interface of transformers",
            "try layout.context = 1",
        )
    worst = torch.tensor(max(differences), dtype=torch.float64, device=in_chunks.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=attention.group)  # the chunks of the first rank may be right
    dist.all_reduce(in_chunks, group=attention.group)
    factor = HALF_PRECISION_FACTOR if is_half or keys[0].dtype.itemsize == 2 else 1.0
    if worst > factor * KEY_TOLERANCE:
        raise ConfigError(
            f"the model computes keys of attention on a chunk of the sequence that differ by {float(worst):.2g} of "
            "their size from those on the full sequence",
            'expected ParallelSpec(positions="...") with the argument of forward that takes the positions of tokens, '
            "and no dependence between tokens but attention; or try layout.context = 1",
        )
    total = float(in_chunks)
    if abs(total - whole) > factor * LOSS_TOLERANCE * abs(whole):
        raise ConfigError(
            f"the loss is {total:.6g} as a sum over chunks of the sequence and {whole:.6g} on the full sequence",
            "expected a sum over tokens, with a label of its own for every token; or try layout.context = 1",
        )


def shorten(batch: tuple[Tensor, ...], attention: ContextAttention) -> tuple[Tensor, ...]:
    """The first tokens of every sequence."""
    length = sequence_length(batch)
    chunks = 2 * attention.group.size()
    short = min(length, max(SHORT // chunks, 1) * chunks)
    for dim in range(1, max(tensor.ndim for tensor in batch)):
        batch = tuple(t.narrow(dim, 0, short) if t.ndim > dim and t.shape[dim] == length else t for t in batch)
    return batch


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Dropout would differ between chunks and full sequences."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode
