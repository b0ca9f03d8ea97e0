"""The initial weights of a run that come from a folder, and how ranks read their shards of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.core.parallel.local_shard import LocalShard
from meshwright.core.parallel.materialize import Fill
from meshwright.core.weights.reader import WeightFolder
from meshwright.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class InitialWeights:
    """The weights that a run starts from."""

    digest: str
    """the digest of the folder, which is part of the run's identity"""
    folder: WeightFolder | None
    """None for a run that continues from a checkpoint after its folder is gone"""


def require_folder(weights: InitialWeights | None) -> None:
    """Raises CheckpointError if a run has to start from weights that are gone."""
    if weights is not None and weights.folder is None:
        raise CheckpointError(
            "no checkpoint of the run is intact, and the folder of its initial weights is gone",
            "try to restore the folder that init_from names",
        )


def fill_from(weights: InitialWeights | None, own_name: Callable[[str], str], otherwise: Fill | None) -> Fill | None:
    """Returns the function that writes the values of a folder into the local shards of a model. `otherwise` initializes
    the parameters and buffers that the folder does not have.
    """
    folder = weights.folder if weights is not None else None
    if folder is None:
        return otherwise

    def fill(shard: LocalShard, name: str) -> None:
        if own_name(name) not in folder:
            if otherwise is not None:
                otherwise(shard, name)
        elif shard.local.numel():
            values = folder.read(own_name(name), shard.offset, shard.local.shape)
            shard.local.copy_(values)
            if values.dtype.itemsize > shard.local.dtype.itemsize and not shard.local.isfinite().all():
                raise ConfigError(
                    f"{folder.files.root}: parameter {name} has values above the range of {shard.local.dtype}",
                    "try precision.compute = fp64",
                )

    return fill
