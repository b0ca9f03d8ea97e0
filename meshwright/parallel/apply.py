"""The one order in which the axes are applied to a model. Read from top to bottom; there is no other.

1. tensor     matrices become DTensors: whatever comes later sees a rank's own part of them
2. recompute  wraps each block's own forward: its collectives over tensor are inside, those of shard outside
3. compile    each block's forward, recomputation included: one graph serves all blocks
4. weights    on the meta device until here: memory comes unit by unit, content once a rank has its own rows alone
5. shard      FSDP2 over replicate x shard: gathers around what 1 to 3 made
   replicate  or, where copies are all there is, DDP
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.config import RunConfig
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.parallel.mesh import mesh_of
from meshwright.parallel.parts import Parts, blocks_of
from meshwright.parallel.recompute import recompute
from meshwright.parallel.replicate import Replicated
from meshwright.parallel.shard import Sharded
from meshwright.parallel.spread import Spread
from meshwright.parallel.tensor import cut
from meshwright.parallel.weights import Fill, Weights
from meshwright.parallel.world import World


def apply(
    model: nn.Module, config: RunConfig, layout: Layout, world: World, parts: Parts | None, fill: Fill | None = None
) -> Spread:
    """The model spread over the layout's mesh. `fill` gives weights to a model that comes on the meta device; `parts`
    may be missing where nothing asks for them.
    """
    mesh = mesh_of(layout, world.device.type)
    parts = needed(parts, layout, config)
    if layout.tensor > 1:
        assert mesh is not None
        cut(model, parts, mesh["tensor"])
    recompute(model, parts, config.compute)
    if config.compute.compile:
        for block in blocks_of(model, parts):
            block.forward = torch.compile(block.forward)
    weights = Weights(model, fill, world.device)
    spread: Spread
    if mesh is not None and layout.data_degree > 1:
        spread = Sharded(model, parts, config, mesh, weights.ready)
        weights.fill()
    else:
        weights.ready(model)
        weights.fill()
        spread = Replicated(model, config.replicate, world) if layout.replicate > 1 else Spread(model)
    spread.mesh = mesh
    return spread


def needed(parts: Parts | None, layout: Layout, config: RunConfig) -> Parts:
    """Refuses to guess the blocks of a model, where a guess could gather the whole of it at once."""
    if layout.tensor > 1 and parts is not None and not parts.cuts():
        raise ConfigError("layout.tensor > 1 and Parts.cuts says nothing of how to cut", "allowed: layout.tensor = 1")
    if parts is not None:
        return parts
    asked = {
        f"layout.shard = {config.layout.shard}": layout.shard > 1,
        f"layout.tensor = {layout.tensor}": layout.tensor > 1,
        f"compute.recompute = {config.compute.recompute}": config.compute.recompute != "none",
        "compute.compile = true": config.compute.compile,
    }
    for what, yes in asked.items():
        if yes:
            raise ConfigError(
                f"{what} works block by block, and nothing says which the blocks of your model are",
                'allowed: train(config, model=..., loss=..., parts=Parts(blocks="layers.*"))',
            )
    return Parts(blocks="")
