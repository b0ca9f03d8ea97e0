"""The shapes of the decoder's parameters, with the FSDP unit and the tensor-parallel dimension of each. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwright.config import ModelConfig

ShapeTable = dict[str, tuple[tuple[int, ...], int | None]]
"""Parameter name -> (shape, tensor-parallel dimension)."""


def fsdp_shard_dim(shape: tuple[int, ...], shards: int) -> int:
    """The dimension that FSDP2 shards: the first, unless there are fewer experts than shards, which would leave some
    ranks without a shard. FSDP2 shards other dimensions than the first only evenly.
    """
    return 1 if len(shape) == 3 and shape[0] < shards and shape[1] % shards == 0 else 0


def padded_numel(shape: tuple[int, ...], shards: int) -> int:
    """The elements of the unsharded parameter with FSDP2's padding, which fills rows up to a multiple of `shards`."""
    sharded_size = shape[fsdp_shard_dim(shape, shards)]
    return prod(shape) // sharded_size * (-(-sharded_size // shards) * shards)


def shard_numel(shape: tuple[int, ...], shards: int, shard_index: int) -> int:
    """The elements of one rank's shard, without padding."""
    sharded_size = shape[fsdp_shard_dim(shape, shards)]
    chunk = -(-sharded_size // shards)
    return prod(shape) // sharded_size * max(0, min(chunk, sharded_size - chunk * shard_index))


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of the full model."""

    name: str
    shape: tuple[int, ...]
    unit: str
    """the FSDP unit: the name of a block, `before` or `after` for the modules around the blocks, or `root`"""
    tp_dim: int | None = None
    """the dimension that tensor parallelism shards; None: replicated on all tensor-parallel ranks"""
    is_expert_weight: bool = False
    """whether its first dimension is that of the experts, which expert parallelism shards"""

    def local_shape(self, tensor: int, expert: int = 1) -> tuple[int, ...]:
        """The shape on one rank after tensor and expert parallelism, before FSDP2."""
        local = tuple(size // tensor if dim == self.tp_dim else size for dim, size in enumerate(self.shape))
        return (local[0] // expert, *local[1:]) if self.is_expert_weight else local

    def local_numel(self, tensor: int = 1, expert: int = 1) -> int:
        return prod(self.local_shape(tensor, expert))


def decoder_parameter_shapes(model: ModelConfig) -> list[ParameterShape]:
    """Every parameter once, in model order. A tied head has no parameter of its own; embedding and norm then belong to
    the root FSDP unit.
    """
    width, kv_width = model.width, model.kv_heads * (model.width // model.heads)
    first_unit, last_unit = ("root", "root") if model.tie else ("before", "after")
    shapes = [ParameterShape("decoder.embedding.weight", (model.vocab, width), first_unit, 0)]
    for layer in range(model.layers):
        block = f"decoder.blocks.{layer}"
        table: ShapeTable = {
            "attention_norm.weight": ((width,), None),
            "attention.q.weight": ((width, width), 0),
            "attention.k.weight": ((kv_width, width), 0),
            "attention.v.weight": ((kv_width, width), 0),
            "attention.out.weight": ((width, width), 1),
            "ffn_norm.weight": ((width,), None),
        }
        table |= expert_shapes("ffn", model) if model.experts else feed_forward_shapes("ffn", width, model.ffn)
        shapes += [
            ParameterShape(f"{block}.{name}", shape, block, tp_dim, ".bank." in name)
            for name, (shape, tp_dim) in table.items()
        ]
    shapes.append(ParameterShape("decoder.norm.weight", (width,), last_unit, None))
    if not model.tie:
        shapes.append(ParameterShape("head.weight", (model.vocab, width), last_unit, 0))
    return shapes


def feed_forward_shapes(name: str, width: int, inner: int) -> ShapeTable:
    return {
        f"{name}.gate.weight": ((inner, width), 0),
        f"{name}.up.weight": ((inner, width), 0),
        f"{name}.down.weight": ((width, inner), 1),
    }


def expert_shapes(name: str, model: ModelConfig) -> ShapeTable:
    """Tensor parallelism shards only the shared experts, which process every token."""
    count, width, inner = model.experts, model.width, model.ffn
    table: ShapeTable = {
        f"{name}.router.weight": ((count, width), None),
        f"{name}.bank.gate": ((count, inner, width), None),
        f"{name}.bank.up": ((count, inner, width), None),
        f"{name}.bank.down": ((count, width, inner), None),
    }
    if model.experts_shared:
        table |= feed_forward_shapes(f"{name}.shared", width, model.experts_shared * inner)
    return table
