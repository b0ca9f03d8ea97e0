"""Runs the measurements of a preflight on one rank."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from meshwright.base.topology.layout import Layout
from meshwright.core import faults
from meshwright.core.parallel.world import World
from meshwright.core.telemetry.clock_offset import ClockOffset, boot_number, measure_clock_offset
from meshwright.ops.preflight.device import measure_device
from meshwright.ops.preflight.disk import measure_disk
from meshwright.ops.preflight.groups import measure_groups, new_group
from meshwright.ops.preflight.host_facts import host_name, read_limits, read_versions
from meshwright.ops.preflight.measurements import (
    DiskMeasurement,
    GroupMeasurement,
    HostMeasurements,
    PairMeasurement,
    RankMeasurement,
)
from meshwright.ops.preflight.pair_schedule import schedule_pairs
from meshwright.ops.preflight.pairs import HostGroup, measure_pairs

TIME_SHARES = {"device": 0.25, "disk": 0.15, "pairs": 0.35, "groups": 0.25}
"""Fractions of the time budget; the network's are not used on one host, or on one rank."""


@dataclass(frozen=True)
class PreflightRequest:
    """What the ranks measure."""

    folder: str
    """run folder; empty: the disk is not measured"""
    layout: Layout
    seconds: float = 10.0
    """time budget of the measurements"""
    config_fingerprint: str = ""
    """fingerprint of the config of this host"""
    timeout: float = 30.0
    """seconds after which a message that does not arrive ends the preflight"""


def preflight_rank(world: World, request: PreflightRequest) -> HostMeasurements:
    """Measures on this rank, and returns what all ranks measured. Every rank of the job calls it."""
    start = time.monotonic()
    faults.arm(world.rank, 0)
    own = RankMeasurement(
        world.rank, host_name(), f"{boot_number():x}", read_versions(world.device, request.config_fingerprint)
    )
    by_rank = [str(name) for name in gather_json(world, own.host)]
    hosts = list(dict.fromkeys(by_rank))
    leaders = [by_rank.index(host) for host in hosts]
    offset, monotonic = measure_clocks(world)
    own = replace(own, clock_offset=offset.seconds, clock_error=offset.error)
    own = replace(own, device=measure_device(world, TIME_SHARES["device"] * request.seconds))
    token = str(world.broadcast_object(secrets.token_hex(8), "preflight token"))
    pairs: list[PairMeasurement] = []
    group = connect_hosts(world, by_rank, request.timeout)
    if world.rank in leaders:
        own = replace(own, limits=read_limits(), disk=measure_run_folder(request, own, token, hosts, group))
    if group is not None:
        seconds = TIME_SHARES["pairs"] * request.seconds
        pairs = measure_pairs(group, schedule_pairs(len(hosts), seconds, world.device.type))
    world.all_reduce(torch.zeros(()), "preflight hosts").wait()
    groups: list[GroupMeasurement] = []
    if world.size > 1:
        groups = measure_groups(world, request.layout, TIME_SHARES["groups"] * request.seconds, request.timeout)
    elapsed = time.monotonic() - start
    drift = measure_clocks(world)[1].seconds - monotonic.seconds
    own = replace(own, clock_rate=1 + drift / max(1e-3, elapsed))
    record = {
        "rank": own.to_json(),
        "pairs": [vars(pair) for pair in pairs],
        "groups": [vars(group) for group in groups],
        "seconds": time.monotonic() - start,
    }
    records = gather_json(world, record)
    return HostMeasurements(
        tuple(RankMeasurement.from_json(row["rank"]) for row in records),
        tuple(PairMeasurement(**pair) for row in records for pair in row["pairs"]),
        tuple(
            GroupMeasurement(**{**group, "ranks": tuple(group["ranks"])}) for row in records for group in row["groups"]
        ),
        seconds=max(row["seconds"] for row in records),
    )


def measure_clocks(world: World) -> tuple[ClockOffset, ClockOffset]:
    """The offsets of the wall clock and of the monotonic clock of this rank against those of rank 0."""
    return (
        measure_clock_offset(world.rank, world.size),
        measure_clock_offset(world.rank, world.size, now=time.monotonic_ns),
    )


def connect_hosts(world: World, by_rank: list[str], timeout: float) -> HostGroup | None:
    """The group of the first ranks of the hosts; None on one host, and on the other ranks. The second ranks of hosts
    form a group, too, and so on: every rank must create equally many groups.
    """
    hosts = list(dict.fromkeys(by_rank))
    if len(hosts) == 1:
        return None
    members = {host: [rank for rank, name in enumerate(by_rank) if name == host] for host in hosts}
    index = members[by_rank[world.rank]].index(world.rank)
    peers = [ranks[index] for ranks in members.values() if len(ranks) > index]
    group = new_group(peers, timeout)
    return HostGroup(tuple(hosts), tuple(peers), world, group) if index == 0 else None


def measure_run_folder(
    request: PreflightRequest, own: RankMeasurement, token: str, hosts: list[str], group: HostGroup | None
) -> DiskMeasurement | None:
    """Measures the run folder on the first rank of a host."""
    if not request.folder:
        return None
    seconds, number = TIME_SHARES["disk"] * request.seconds, hosts.index(own.host)
    wait_for_hosts = group.wait if group is not None else lambda: None
    return measure_disk(Path(request.folder), token, own.host, number, wait_for_hosts, seconds)


def gather_json(world: World, value: Any) -> list[Any]:
    """The JSON values of all ranks, by rank."""
    text = json.dumps(value).encode()
    lengths = [row[0] for row in world.all_gather_ints(len(text), name="preflight lengths")]
    payload = torch.zeros(sum(lengths), dtype=torch.uint8)
    start = sum(lengths[: world.rank])
    payload[start : start + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    content = world.all_reduce(payload, "preflight records").wait().numpy().tobytes()
    ends = list(accumulate(lengths))
    return [json.loads(content[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
