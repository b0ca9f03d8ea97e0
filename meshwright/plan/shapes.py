"""The decoder's parameters as shapes: which unit gathers each, and which of its dimensions the tensor axis cuts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwright.config import ModelConfig

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


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
        rows = {
            "attention_norm": ((width,), None),
            "attention.q": ((width, width), 0),
            "attention.k": ((kv, width), 0),
            "attention.v": ((kv, width), 0),
            "attention.out": ((width, width), 1),
            "ffn_norm": ((width,), None),
        }
        rows |= feed_forward("ffn", model)
        shapes += [Shape(f"{block}.{name}.weight", dims, block, cut) for name, (dims, cut) in rows.items()]
    shapes.append(Shape("decoder.norm.weight", (width,), last, None))
    if not model.tie:
        shapes.append(Shape("head.weight", (model.vocab, width), last, 0))
    return shapes


def feed_forward(name: str, model: ModelConfig) -> dict[str, tuple[tuple[int, ...], int | None]]:
    width, inner = model.width, model.ffn
    if not model.experts:
        return {
            f"{name}.gate": ((inner, width), 0),
            f"{name}.up": ((inner, width), 0),
            f"{name}.down": ((width, inner), 1),
        }
    rows: dict[str, tuple[tuple[int, ...], int | None]] = {f"{name}.router": ((model.experts, width), None)}
    for index in range(model.experts):
        expert = f"{name}.experts.{index}"
        rows[f"{expert}.gate"] = rows[f"{expert}.up"] = ((inner, width), None)
        rows[f"{expert}.down"] = ((width, inner), None)
    return rows


def units_of(shapes: list[Shape]) -> dict[str, list[Shape]]:
    """What is gathered together, in the order of use."""
    units: dict[str, list[Shape]] = {}
    for shape in shapes:
        units.setdefault(shape.unit, []).append(shape)
    return units
