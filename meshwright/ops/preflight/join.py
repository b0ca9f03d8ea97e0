"""Joins the ranks of a preflight that torchrun started; what differs or is missing is measured, not an error."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshwright.base.config import LaunchConfig
from meshwright.core.launch.rendezvous import (
    RendezvousInfo,
    connect_store,
    leave_process_group,
    select_device,
    torchrun_restart_count,
)
from meshwright.core.parallel.world import World
from meshwright.core.telemetry.clock_offset import boot_number
from meshwright.errors import PeerError, describe_exception
from meshwright.ops.preflight.host_facts import host_name, read_limits, read_versions
from meshwright.ops.preflight.measurements import HostMeasurements, RankMeasurement, Reachability
from meshwright.ops.preflight.rank import PreflightRequest, preflight_rank
from meshwright.ops.preflight.reach import (
    CONNECT_TIMEOUT,
    answer_with,
    connect_to_hosts,
    host_address,
    partners,
)

MUST_AGREE = ("meshwright", "code", "torch", "cuda", "nccl", "device type")
"""Components without which ranks cannot exchange messages."""
CONFIRM_TIMEOUT = 5.0
"""Seconds that rank 0 waits until the other ranks have read its decision."""
MAX_RECORD_BYTES = 1 << 16
"""Limit of what one rank reports before the process group exists."""


def run_preflight_rank(rendezvous: RendezvousInfo, launch: LaunchConfig, request: PreflightRequest) -> HostMeasurements:
    """Runs the preflight in this process, as one of torchrun's ranks.

    The ranks first report their versions and addresses through the store. If one is missing, if versions differ that
    ranks need to have in common, or if hosts cannot connect, devices and network are not measured.
    """
    device = select_device(launch, rendezvous)
    if rendezvous.world_size == 1:
        return preflight_rank(World(0, 1, device), request)
    store = dist.PrefixStore(
        f"preflight/{torchrun_restart_count()}", connect_store(rendezvous, launch.rendezvous_timeout)
    )
    address, token = host_address(), secrets.token_hex(8)
    with answer_with(token, address) as port:
        own = JoiningRank(
            RankMeasurement(
                rendezvous.rank,
                host_name(),
                f"{boot_number():x}",
                read_versions(device, request.config_fingerprint),
                limits=read_limits(),
            ),
            (address, port, token),
        )
        refusal = own.compare(store, rendezvous.world_size, launch.rendezvous_timeout)
    if refusal is not None:
        confirm(store, rendezvous, refusal)
        return refusal
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
            f"rank {rendezvous.rank} on host {host_name()} cannot connect to the other ranks: "
            f"{describe_exception(error).splitlines()[0][:200]}",
            "look at the firewall and the interface of this host (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
        ) from None
    try:
        return preflight_rank(World(rendezvous.rank, rendezvous.world_size, device), request)
    finally:
        leave_process_group()


@dataclass(frozen=True)
class JoiningRank:
    """A rank before the process group exists; it exchanges JSON with the other ranks through the store."""

    measured: RankMeasurement
    address: tuple[str, int, str]
    """address, port and token of the socket at which this rank answers"""

    def compare(self, store: dist.Store, size: int, timeout: float) -> HostMeasurements | None:
        """Returns None if the ranks can form a process group, else what is known of them."""
        rank = self.measured.rank
        store.set(f"rank/{rank}", json.dumps({"rank": self.measured.to_json(), "address": self.address}))
        if rank == 0:
            store.set("hosts", json.dumps(decide(store, size, timeout)))
        decision = wait_for(store, "hosts", timeout + 5, "rank 0 did not compare the ranks")
        if decision["refusal"] is not None:
            return HostMeasurements.from_json(decision["refusal"])
        leaders: dict[str, int] = decision["leaders"]
        if leaders[self.measured.host] == rank and len(leaders) > 1:
            store.set(f"reached/{rank}", json.dumps(self.reach(store, leaders)))
        if rank == 0:
            store.set("reached", json.dumps(collect_reached(store, size, leaders)))
        refusal = wait_for(store, "reached", 4 * CONNECT_TIMEOUT, "rank 0 did not collect the connections")
        return None if refusal is None else HostMeasurements.from_json(refusal)

    def reach(self, store: dist.Store, leaders: dict[str, int]) -> dict[str, str]:
        """Connects to other hosts. Returns host -> why it cannot be reached, or an empty string."""
        names = list(leaders)
        chosen = [names[number] for number in partners(names.index(self.measured.host), len(names))]
        records = {host: read_record(store, leaders[host]) for host in chosen}
        return connect_to_hosts({host: (str(a), int(port), str(t)) for host, (_, (a, port, t)) in records.items()})


def read_record(store: dist.Store, rank: int) -> tuple[RankMeasurement, list[Any]]:
    """What a rank has reported, and its address."""
    record = json.loads(store.get(f"rank/{rank}")[:MAX_RECORD_BYTES])
    return RankMeasurement.from_json(record["rank"]), record["address"]


def decide(store: dist.Store, size: int, timeout: float) -> dict[str, Any]:
    """Returns the first rank of every host, and why the ranks cannot form a process group, or None."""
    deadline = time.monotonic() + timeout
    ranks: list[RankMeasurement] = []
    missing: list[int] = []
    for rank in range(size):
        try:
            store.wait([f"rank/{rank}"], timedelta(seconds=max(0.05, deadline - time.monotonic())))
            ranks.append(read_record(store, rank)[0])
        except (dist.DistStoreError, RuntimeError):
            missing.append(rank)
    leaders = {rank.host: rank.rank for rank in reversed(ranks)}
    reason = ""
    if missing:
        reason = f"rank(s) {', '.join(map(str, missing))} of {size} did not join within {timeout:g} s"
    elif differing := [key for key in MUST_AGREE if len({rank.versions.get(key, "") for rank in ranks}) > 1]:
        reason = f"ranks that differ in {', '.join(differing)} cannot measure together"
    ranks = [rank if leaders[rank.host] == rank.rank else replace(rank, limits=None) for rank in ranks]
    refusal = HostMeasurements(tuple(ranks), missing_ranks=tuple(missing), not_measured=reason) if reason else None
    return {
        "refusal": refusal.to_json() if refusal is not None else None,
        "leaders": dict(sorted(leaders.items(), key=lambda item: item[1])),
    }


def collect_reached(store: dist.Store, size: int, leaders: dict[str, int]) -> dict[str, Any] | None:
    """Returns what is known of the ranks if one host cannot connect to another one, else None."""
    if len(leaders) < 2:
        return None
    reached = []
    for host, rank in leaders.items():
        answers = wait_for(store, f"reached/{rank}", 3 * CONNECT_TIMEOUT, f"host {host} did not try its connections")
        reached += [Reachability(host, target, problem) for target, problem in answers.items()]
    if not any(attempt.problem for attempt in reached):
        return None
    ranks = (read_record(store, rank)[0] for rank in range(size))
    kept = tuple(rank if leaders[rank.host] == rank.rank else replace(rank, limits=None) for rank in ranks)
    return HostMeasurements(kept, reached=tuple(reached), not_measured="hosts cannot connect").to_json()


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
