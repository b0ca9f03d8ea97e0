"""Runs a preflight on the ranks of this host, or as one of torchrun's ranks, and judges it against the config."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from meshwright.base.config import CustomModelConfig, LaunchConfig, RunConfig, fingerprint, identity, placement
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.hardware.cluster import Cluster, preset_cluster
from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.base.topology.axes import AXES
from meshwright.base.topology.layout import Layout
from meshwright.core.launch.host_memory import state_bytes
from meshwright.core.launch.ranks import raise_if_spawning, run_ranks
from meshwright.core.launch.rendezvous import RendezvousInfo
from meshwright.core.parallel.world import World, device_type
from meshwright.errors import ConfigError
from meshwright.ops.preflight.expectations import Expectations
from meshwright.ops.preflight.join import run_preflight_rank
from meshwright.ops.preflight.judge import judge
from meshwright.ops.preflight.measurements import HostMeasurements
from meshwright.ops.preflight.rank import PreflightRequest, preflight_rank
from meshwright.ops.preflight.report import PreflightReport
from meshwright.planner.calibration.run_prediction import device_preset

MIN_SECONDS, MAX_SECONDS = 1.0, 30.0
"""Limits of the time budget; with start and rendezvous, a preflight stays under a minute."""
MAX_RENDEZVOUS = 30.0
"""Limit of the seconds that the ranks of a preflight wait for each other."""
MESSAGE_TIMEOUT = 30.0
"""Seconds after which a message that does not arrive ends the preflight."""


def run_preflight(
    config: RunConfig, folder: Path, *, hosts: int | None = None, cluster: str | None = None, seconds: float = 10.0
) -> PreflightReport:
    """Measures and judges the hosts of the config. Under torchrun every rank calls it and gets the same report."""
    raise_if_spawning()
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise ConfigError(f"--seconds {seconds:g} is out of range", f"expected {MIN_SECONDS:g} to {MAX_SECONDS:g}")
    if cluster is not None:
        resolve_cluster(cluster)  # a misspelled cluster is reported before ranks start
    layout = Layout.from_config(config.layout)
    rendezvous = RendezvousInfo.from_environment(os.environ)
    check_ranks(layout, rendezvous.world_size if rendezvous is not None else None, hosts)
    launch = preflight_launch(config, seconds)
    if rendezvous is not None:
        measurements = run_preflight_rank(rendezvous, launch, make_request(config, folder, seconds))
        return judge(measurements, make_expectations(config, measurements, hosts, cluster))
    limit = MESSAGE_TIMEOUT + 3 * seconds
    args = (config, folder, hosts, cluster, seconds)
    report: PreflightReport = run_ranks(preflight_report, layout.ranks, *args, launch=launch, timeout=limit)[0]
    return report


def preflight_launch(config: RunConfig, seconds: float) -> LaunchConfig:
    """The timeouts of the ranks of a preflight."""
    return replace(
        config.launch,
        rendezvous_timeout=min(MAX_RENDEZVOUS, config.launch.rendezvous_timeout),
        collective_timeout=MESSAGE_TIMEOUT + seconds,
    )


def preflight_report(
    world: World,
    config: RunConfig,
    folder: Path,
    hosts: int | None = None,
    cluster: str | None = None,
    seconds: float = 10.0,
) -> PreflightReport:
    """Runs a preflight in any world, of one host or of several. Every rank calls it and gets the same report."""
    measurements = preflight_rank(world, make_request(config, folder, seconds))
    return judge(measurements, make_expectations(config, measurements, hosts, cluster))


def make_request(config: RunConfig, folder: Path, seconds: float) -> PreflightRequest:
    values = fingerprint({"identity": identity(config), "placement": placement(config)})
    return PreflightRequest(str(folder), Layout.from_config(config.layout), seconds, values, MESSAGE_TIMEOUT)


def check_ranks(layout: Layout, world_size: int | None, hosts: int | None) -> None:
    """Raises a ConfigError if the ranks that were started do not fit the layout."""
    if world_size is None and hosts is not None and hosts > 1:
        per_host = max(1, layout.ranks // hosts)
        raise ConfigError(
            f"{hosts} hosts, and this process forks the ranks of one",
            f"try meshwright preflight --hosts {hosts} on every host, or torchrun --nnodes {hosts} --nproc-per-node "
            f"{per_host} ... -m meshwright preflight",
        )
    if world_size is not None and world_size != layout.ranks:
        raise ConfigError(
            f"torchrun started {world_size} ranks, and the layout {layout} has {layout.ranks}",
            f"try --ranks {world_size}",
        )
    if hosts is not None and not 1 <= hosts <= layout.ranks:
        raise ConfigError(
            f"--hosts {hosts} is out of range", f"expected 1 to {layout.ranks}, one rank per host or more"
        )


def make_expectations(
    config: RunConfig, measurements: HostMeasurements, hosts: int | None = None, cluster_name: str | None = None
) -> Expectations:
    """What the config and the planner expect of the hosts."""
    remarks = []
    layout = Layout.from_config(config.layout)
    name = cluster_name or config.planned_for
    planned: Cluster | None = resolve_cluster(name) if name else None
    device = next((rank.device for rank in measurements.ranks if rank.device is not None), None)
    cluster = planned
    if cluster is None and device is not None and (preset := device_preset(device.name)) is not None:
        cluster = preset_cluster(preset)
    if cluster is not None:
        ranks_per_host = max(1, len(measurements.ranks) // max(1, len(measurements.hosts)))
        cluster = replace(cluster, devices_per_node=min(cluster.devices_per_node, ranks_per_host))
    if planned is None:
        remarks.append("hosts are compared with each other; --cluster CLUSTER compares them with the planner's figures")
    checkpoint_bytes = rank_bytes = None
    if config.custom_model == CustomModelConfig():
        resolved = with_device_defaults(config, device_type(config.launch))
        first_ranks = [group[0] for group in layout.groups(*(axis for axis in AXES if axis != "pipeline"))]
        rank_bytes = max(state_bytes(resolved, layout, rank) for rank in first_ranks)
        if config.checkpoint.mode != "off":
            checkpoint_bytes = state_bytes(resolved, Layout(), 0)
    else:
        remarks.append("the sizes of a custom model are not known: disk and memory are not compared with its state")
    return Expectations(
        hosts,
        checkpoint_bytes,
        config.checkpoint.keep + 1,
        rank_bytes,
        cluster,
        inferred=planned is None,
        remarks=tuple(remarks),
    )
