"""Joins the ranks of a preflight that torchrun started; what differs or is missing is measured, not an error."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshwright.config import LaunchConfig
from meshwright.errors import PeerError, describe_exception
from meshwright.launch.rendezvous import (
    RendezvousInfo,
    connect_store,
    leave_process_group,
    select_device,
    torchrun_restart_count,
)
from meshwright.measure.preflight.host_facts import host_name, read_limits, read_versions
from meshwright.measure.preflight.measurements import HostMeasurements, RankMeasurement
from meshwright.measure.preflight.rank import PreflightRequest, preflight_rank
from meshwright.parallel.world import World
from meshwright.telemetry.clock_offset import boot_number

MUST_AGREE = ("meshwright", "code", "torch", "cuda", "nccl", "device type")
"""Components without which ranks cannot exchange messages."""
CONFIRM_TIMEOUT = 5.0
"""Seconds that rank 0 waits until the other ranks have read its decision."""
MAX_RECORD_BYTES = 1 << 16
"""Limit of what one rank reports before the process group exists."""


def run_preflight_rank(rendezvous: RendezvousInfo, launch: LaunchConfig, request: PreflightRequest) -> HostMeasurements:
    """Runs the preflight in this process, as one of torchrun's ranks.

    The ranks first report their versions through the store. If one is missing, or if versions differ that a process
    group needs to have in common, devices and network are not measured.
    """
    device = select_device(launch, rendezvous)
    if rendezvous.world_size == 1:
        return preflight_rank(World(0, 1, device), request)
    store = dist.PrefixStore(
        f"preflight/{torchrun_restart_count()}", connect_store(rendezvous, launch.rendezvous_timeout)
    )
    versions = read_versions(device, request.config_fingerprint)
    own = RankMeasurement(rendezvous.rank, host_name(), f"{boot_number():x}", versions, limits=read_limits())
    store.set(f"rank/{rendezvous.rank}", json.dumps(own.to_json()))
    if rendezvous.rank == 0:
        store.set("decision", json.dumps(decide(store, rendezvous.world_size, launch.rendezvous_timeout)))
    decision = wait_for(store, "decision", launch.rendezvous_timeout + 5, "rank 0 did not compare the ranks")
    if decision is not None:
        measurements = HostMeasurements.from_json(decision)
        confirm(store, rendezvous, measurements)
        return measurements
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            timeout=timedelta(seconds=request.timeout),
        )
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"rank {rendezvous.rank} on host {own.host} cannot connect to the other ranks: "
            f"{describe_exception(error).splitlines()[0][:200]}",
            "look at the firewall and the interface of this host (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
        ) from None
    try:
        return preflight_rank(World(rendezvous.rank, rendezvous.world_size, device), request)
    finally:
        leave_process_group()


def decide(store: dist.Store, size: int, timeout: float) -> dict[str, Any] | None:
    """Returns None if the ranks can form a process group, else what is known of them."""
    deadline = time.monotonic() + timeout
    ranks: list[RankMeasurement] = []
    missing: list[int] = []
    for rank in range(size):
        try:
            store.wait([f"rank/{rank}"], timedelta(seconds=max(0.05, deadline - time.monotonic())))
            ranks.append(RankMeasurement.from_json(json.loads(store.get(f"rank/{rank}")[:MAX_RECORD_BYTES])))
        except (dist.DistStoreError, RuntimeError):
            missing.append(rank)
    if missing:
        reason = f"rank(s) {', '.join(map(str, missing))} of {size} did not join within {timeout:g} s"
    else:
        differing = [key for key in MUST_AGREE if len({rank.versions.get(key, "") for rank in ranks}) > 1]
        if not differing:
            return None
        reason = f"ranks that differ in {', '.join(differing)} cannot measure together"
    first = {rank.host: rank.rank for rank in reversed(ranks)}
    ranks = [rank if first[rank.host] == rank.rank else replace(rank, limits=None) for rank in ranks]
    return HostMeasurements(tuple(ranks), missing_ranks=tuple(missing), not_measured=reason).to_json()


def confirm(store: dist.Store, rendezvous: RendezvousInfo, measurements: HostMeasurements) -> None:
    """Keeps the store of rank 0 alive until the other ranks have read the decision."""
    store.set(f"confirmed/{rendezvous.rank}", "")
    if rendezvous.hosts_store:
        with suppress(dist.DistStoreError, RuntimeError):
            keys = [f"confirmed/{rank.rank}" for rank in measurements.ranks]
            store.wait(keys, timedelta(seconds=CONFIRM_TIMEOUT))


def wait_for(store: dist.Store, key: str, timeout: float, problem: str) -> Any:
    """The JSON value of a key, once rank 0 has set it."""
    store.set_timeout(timedelta(seconds=timeout))
    try:
        return json.loads(store.get(key))
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError):
        raise PeerError(f"{problem} within {timeout:g} s", "try the log of rank 0") from None
