"""The decoder's parameters as shapes: which unit gathers each, and which of its dimensions an axis divides."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwright.config import ModelConfig

Rows = dict[str, tuple[tuple[int, ...], int | None]]
"""Name -> (shape, the dimension that the tensor axis cuts)."""


def fsdp_shard_dim(local: tuple[int, ...], shards: int) -> int:
    """The dimension by which FSDP2 divides what a rank of the other axes holds: rows, but for a bank of fewer experts
    than shards, of which some ranks would hold nothing. FSDP2 divides other dimensions than rows only evenly.
    """
    return 1 if len(local) == 3 and local[0] < shards and local[1] % shards == 0 else 0


def padded_numel(local: tuple[int, ...], shards: int) -> int:
    """Elements once gathered: FSDP2 fills rows up to a multiple of the ranks that share them."""
    divided = local[fsdp_shard_dim(local, shards)]
    return prod(local) // divided * (-(-divided // shards) * shards)


def shard_numel(local: tuple[int, ...], shards: int, coordinate: int) -> int:
    """Elements of one rank's shard, without the filling."""
    divided = local[fsdp_shard_dim(local, shards)]
    each = -(-divided // shards)
    return prod(local) // divided * max(0, min(each, divided - each * coordinate))


@dataclass(frozen=True)
class ParameterShape:
    """A parameter. `cut` is the dimension that the tensor axis divides; None: every rank of it holds it whole."""

    name: str
    shape: tuple[int, ...]
    unit: str
    tp_dim: int | None

    @property
    def is_expert_weight(self) -> bool:
        """Whether the expert axis divides it, by its first dimension."""
        return len(self.shape) == 3

    def local_shape(self, tensor: int, expert: int = 1) -> tuple[int, ...]:
        """What one rank of the tensor and expert axes holds."""
        cut = tuple(size // tensor if dim == self.tp_dim else size for dim, size in enumerate(self.shape))
        return (cut[0] // expert, *cut[1:]) if self.is_expert_weight else cut

    def local_numel(self, tensor: int = 1, expert: int = 1) -> int:
        return prod(self.local_shape(tensor, expert))


def decoder_parameter_shapes(model: ModelConfig) -> list[ParameterShape]:
    """Every parameter once, in the order of the model. A tied head has none of its own, and FSDP2 then gathers both
    ends with the whole.
    """
    width, kv = model.width, model.kv_heads * (model.width // model.heads)
    first, last = ("whole", "whole") if model.tie else ("embedding", "head")
    shapes = [ParameterShape("decoder.embedding.weight", (model.vocab, width), first, 0)]
    for layer in range(model.layers):
        block = f"decoder.blocks.{layer}"
        rows: Rows = {
            "attention_norm.weight": ((width,), None),
            "attention.q.weight": ((width, width), 0),
            "attention.k.weight": ((kv, width), 0),
            "attention.v.weight": ((kv, width), 0),
            "attention.out.weight": ((width, width), 1),
            "ffn_norm.weight": ((width,), None),
        }
        rows |= experts("ffn", model) if model.experts else feed_forward("ffn", width, model.ffn)
        shapes += [ParameterShape(f"{block}.{name}", dims, block, cut) for name, (dims, cut) in rows.items()]
    shapes.append(ParameterShape("decoder.norm.weight", (width,), last, None))
    if not model.tie:
        shapes.append(ParameterShape("head.weight", (model.vocab, width), last, 0))
    return shapes


def feed_forward(name: str, width: int, inner: int) -> Rows:
    return {
        f"{name}.gate.weight": ((inner, width), 0),
        f"{name}.up.weight": ((inner, width), 0),
        f"{name}.down.weight": ((width, inner), 1),
    }


def experts(name: str, model: ModelConfig) -> Rows:
    """The tensor axis cuts only what every token visits."""
    count, width, inner = model.experts, model.width, model.ffn
    rows: Rows = {
        f"{name}.router.weight": ((count, width), None),
        f"{name}.bank.gate": ((count, inner, width), None),
        f"{name}.bank.up": ((count, inner, width), None),
        f"{name}.bank.down": ((count, width, inner), None),
    }
    if model.experts_shared:
        shared = feed_forward(f"{name}.shared", width, model.experts_shared * inner)
        rows |= shared
    return rows
