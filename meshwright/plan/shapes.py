"""The decoder's parameters as shapes: which unit gathers each, and which of its dimensions the tensor axis cuts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwright.config import ModelConfig

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


Rows = dict[str, tuple[tuple[int, ...], int | None]]
"""Name -> (shape, the dimension that the tensor axis cuts)."""


@dataclass(frozen=True)
class Shape:
    """A parameter. `cut` is the dimension that the tensor axis divides; None: every rank of it holds it whole."""

    name: str
    dims: tuple[int, ...]
    unit: str
    cut: int | None

    def local(self, tensor: int) -> tuple[int, ...]:
        """What one rank of the tensor axis holds."""
        return tuple(size // tensor if dim == self.cut else size for dim, size in enumerate(self.dims))

    def elements(self, tensor: int = 1) -> int:
        return prod(self.local(tensor))

    def padded(self, tensor: int, shard: int) -> int:
        """Elements of it once gathered: FSDP2 fills rows up to a multiple of the ranks that share them."""
        rows, *rest = self.local(tensor)
        return -(-rows // shard) * shard * prod(rest)

    def own(self, tensor: int, shard: int, coordinate: int) -> int:
        """Elements of the shard of one rank, without the filling."""
        rows, *rest = self.local(tensor)
        each = -(-rows // shard)
        return max(0, min(each, rows - each * coordinate)) * prod(rest)


def decoder_shapes(model: ModelConfig) -> list[Shape]:
    """Every parameter once, in the order of the model. A tied head has none of its own, and FSDP2 then gathers both
    ends with the whole.
    """
    width, kv = model.width, model.kv_heads * (model.width // model.heads)
    first, last = ("whole", "whole") if model.tie else ("embedding", "head")
    shapes = [Shape("decoder.embedding.weight", (model.vocab, width), first, 0)]
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
        shapes += [Shape(f"{block}.{name}", dims, block, cut) for name, (dims, cut) in rows.items()]
    shapes.append(Shape("decoder.norm.weight", (width,), last, None))
    if not model.tie:
        shapes.append(Shape("head.weight", (model.vocab, width), last, 0))
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


def units_of(shapes: list[Shape]) -> dict[str, list[Shape]]:
    """What is gathered together, in the order of use."""
    units: dict[str, list[Shape]] = {}
    for shape in shapes:
        units.setdefault(shape.unit, []).append(shape)
    return units
