"""`meshwright preflight`: checks the hosts of a job before it starts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from meshwright.base.cli.args import Json, Ranks, RunFile, option
from meshwright.base.terminal.output import emit_json


def preflight(
    file: RunFile = None,
    run: Annotated[
        Path | None, option("DIR", "run folder, whose disk is checked (default: runs/PRESET)", "--run-dir")
    ] = None,
    ranks: Ranks = None,
    hosts: Annotated[int | None, option("N", "number of hosts that take part, each with this command")] = None,
    cluster: Annotated[
        str | None, option("CLUSTER", "cluster whose figures the planner gives (default: planned_for of the run file)")
    ] = None,
    seconds: Annotated[float, option("N", "time budget of the measurements")] = 10.0,
    json: Json = False,
    *,
    overrides: tuple[str, ...] = (),
) -> None:
    """Preflight: check versions, clocks, disk, devices, network and limits of the hosts of a job before it starts."""
    from meshwright.base.environment import started_by_torchrun
    from meshwright.base.models.initial_model import load_run_config
    from meshwright.base.topology.unsupported import validate
    from meshwright.core import faults
    from meshwright.core.api.run_location import default_name, run_folder
    from meshwright.ops.preflight.preflight_text import show_preflight

    if file is None and ranks is None and started_by_torchrun():
        ranks = os.environ["WORLD_SIZE"]
    config = load_run_config(file, overrides, ranks)
    if file is not None:
        validate(config, own_model=config.custom_model.class_ is not None)
    faults.parse_faults(os.environ.get("MESHWRIGHT_FAULT", ""))  # a misspelled fault is reported before ranks start
    folder = run_folder(run, default_name(config, {}))
    if hosts is not None and hosts > 1:
        config = replace(config, launch=replace(config.launch, hosts=hosts))
    if config.launch.hosts > 1 and not started_by_torchrun():
        from meshwright.ops.preflight.hosts.job import preflight_on_hosts

        report = preflight_on_hosts(config, folder, cluster, seconds)
    else:
        from meshwright.ops.preflight.run import run_preflight

        report = run_preflight(config, folder.root, hosts=hosts, cluster=cluster, seconds=seconds)
    if os.environ.get("RANK", "0") == "0":
        if json:
            emit_json(report.to_json())
        else:
            show_preflight(report)
    if report.exit_code:
        raise SystemExit(report.exit_code)
