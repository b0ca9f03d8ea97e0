"""`meshwright simulate`: runs a step on fake tensors and a fake cluster."""

from __future__ import annotations

from typing import Annotated

from meshwright.cli.args import Json, Ranks, RunFile, option
from meshwright.cli.output import emit_json


def simulate(
    file: RunFile = None,
    ranks: Ranks = None,
    rank: Annotated[
        tuple[int, ...], option("R", "ranks to simulate (default: rank 0, and the first rank of the last stage)")
    ] = (),
    json: Json = False,
    *,
    overrides: tuple[str, ...] = (),
) -> None:
    """Simulate: count communication and peak memory of a step on any number of ranks, without running them."""
    from meshwright import api
    from meshwright.config import load_config
    from meshwright.observe.simulation_text import show
    from meshwright.topology.unsupported import validate

    config = load_config(file, overrides, ranks)
    validate(config)  # before torch is imported
    result = api.simulate(config, rank=rank)
    if json:
        emit_json(result.to_json())
    else:
        show(result)
