"""`meshwright simulate`: runs a step on fake tensors and a fake cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from meshwright.base.cli.args import NO_ENTRY_POINTS, Json, Ranks, RunFile, option
from meshwright.base.terminal.output import emit_json


def simulate(
    file: RunFile = None,
    ranks: Ranks = None,
    rank: Annotated[
        tuple[int, ...], option("R", "ranks to simulate (default: rank 0, and the first rank of the last stage)")
    ] = (),
    json: Json = False,
    *,
    entry_points: Mapping[str, str] = NO_ENTRY_POINTS,
    overrides: tuple[str, ...] = (),
) -> None:
    """Simulate: count communication and peak memory of a step on any number of ranks, without running them."""
    from meshwright.base.models.initial_model import load_run_config
    from meshwright.base.topology.unsupported import validate
    from meshwright.base.user_code.entry_points import load_user_code
    from meshwright.prover.api import simulate_run
    from meshwright.prover.simulator.simulation_text import show

    config = load_run_config(file, overrides, ranks, own_model="model" in entry_points)
    validate(config, own_model="model" in entry_points)  # before torch is imported
    result = simulate_run(config, load_user_code(entry_points), rank)
    if json:
        emit_json(result.to_json())
    else:
        show(result)
