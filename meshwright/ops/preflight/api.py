"""The verb `preflight` as a function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.base.cli.python_args import errors_for_python, validated
from meshwright.base.config import RunConfig
from meshwright.core.api.run_location import default_name, run_folder

if TYPE_CHECKING:
    from meshwright.ops.preflight.report import PreflightReport


def preflight(
    config: RunConfig | None = None,
    *,
    run: str | Path | None = None,
    ranks: int | None = None,
    hosts: int | None = None,
    cluster: str | None = None,
    seconds: float = 10.0,
) -> PreflightReport:
    """Checks the hosts of a job before its first step: versions, clocks, disk, devices, network and limits.

    The ranks of ``config.layout`` are forked from this process. Under torchrun, this process is one of the ranks, and
    every rank gets the same report.

    Args:
        config: settings of the run. Default: the ``tiny`` preset.
        run: run folder, whose disk is checked. Default: ``runs/PRESET``, as in :func:`train`.
        ranks: total number of ranks; sets ``layout.replicate`` accordingly. Default: those of ``config.layout``.
        hosts: number of hosts that must take part. Default: it is not checked.
        cluster: cluster whose figures the planner gives, such as ``"h100:8x2"``. Default: ``config.planned_for``.
        seconds: time budget of the measurements. Default: 10.

    Returns:
        PreflightReport: ``rows`` with expected and found values, ``findings`` (the rows that are not ok),
        ``suspect_hosts`` (hosts to leave out) and ``exit_code``.

    Raises:
        ConfigError: a setting or an argument is not valid.
        PeerError: hosts cannot exchange messages.
    """
    from meshwright.ops.preflight.run import run_preflight

    with errors_for_python():
        config = validated(config, ranks)
        folder = run_folder(run, default_name(config, {}))
        return run_preflight(config, folder.root, hosts=hosts, cluster=cluster, seconds=seconds)
