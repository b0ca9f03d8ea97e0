"""Rendezvous: ranks connect to a store, check that they agree on config and code, and form the process group. A missing
or differing rank is named within `launch.rendezvous_timeout`.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from meshwright.base.config import LaunchConfig
from meshwright.base.environment import started_by_torchrun
from meshwright.base.records.heartbeat import Heartbeat
from meshwright.base.topology.placement import HostPlacement
from meshwright.core.parallel.world import World, device_type
from meshwright.core.recover.lease import host_name
from meshwright.errors import ConfigError, IdentityError, PeerError
from meshwright.ops.engines.torchrun_elastic import agree_on_generation

SIOCGIFADDR = 0x8915
"""The request for the IPv4 address of a network interface (netdevice(7))."""


@dataclass(frozen=True)
class RendezvousInfo:
    """What a rank needs to join the process group: its rank, the world size and the location of the store, a file on
    one host or a TCP address across hosts.
    """

    rank: int
    world_size: int
    local_rank: int
    store_file: str = ""
    master_addr: str = ""
    master_port: int = 0
    hosts_store: bool = False
    """Whether this process serves the TCP store."""
    host: str = ""
    """The name of this host in records; by default its own."""
    address: str = ""
    """The address by which other hosts reach this one: collectives use its network interface."""

    @classmethod
    def from_placement(cls, placement: HostPlacement, local_rank: int) -> RendezvousInfo:
        """A rank of this host in a job on several hosts; rank 0 serves the store."""
        rank, index = placement.first_rank + local_rank, placement.index
        return cls(
            rank,
            placement.world_size,
            local_rank,
            master_addr=placement.addresses[0],
            master_port=placement.port,
            hosts_store=rank == 0,
            host=placement.hosts[index],
            address=placement.addresses[index],
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RendezvousInfo | None:
        """What torchrun, or a launcher that sets its variables, passed to this process; None if nothing did."""
        if not started_by_torchrun(environment):
            return None
        try:
            rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local_rank, port = int(environment.get("LOCAL_RANK", rank)), int(environment.get("MASTER_PORT", "29500"))
        except ValueError as error:
            raise ConfigError(
                f"RANK, WORLD_SIZE, LOCAL_RANK or MASTER_PORT is not a number: {error}",
                "expected the values that torchrun sets",
            ) from None
        if not 0 <= port < 65536:
            raise ConfigError(f"MASTER_PORT = {port} is not a port", "expected 0 to 65535")
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"RANK = {rank} is not below WORLD_SIZE = {world_size}", f"expected 0 to {world_size - 1}"
            )
        agent_hosts_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank,
            world_size,
            local_rank,
            master_addr=environment.get("MASTER_ADDR", "localhost"),
            master_port=port,
            hosts_store=rank == 0 and not agent_hosts_store,
        )


def join_process_group(
    rendezvous: RendezvousInfo, launch: LaunchConfig, facts: Mapping[str, Any], heartbeat: Heartbeat | None = None
) -> World:
    """Joins the process group and returns the rank's World, once every rank has reported the same `facts`."""
    device = select_device(launch, rendezvous)
    if rendezvous.world_size == 1:
        return World(0, 1, device, heartbeat or Heartbeat())
    store, generation = connect_store(rendezvous, launch.rendezvous_timeout), torchrun_restart_count()
    if launch.elastic and started_by_torchrun():
        generation = agree_on_generation(store, rendezvous.rank, rendezvous.world_size, launch.rendezvous_timeout)
    store = dist.PrefixStore(f"{generation}/{next(JOIN_COUNTER)}", store)
    store.set(f"host/{rendezvous.rank}", rendezvous.host or host_name())
    if rendezvous.address and (interface := interface_of(rendezvous.address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    check_facts_agree(
        store,
        rendezvous,
        dict(facts)
        | {
            "world size": rendezvous.world_size,
            "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:2])),
            "device": device.type,
        },
        launch.rendezvous_timeout,
    )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timedelta(seconds=launch.collective_timeout),
    )
    hosts = tuple(
        store.get(f"host/{rank}").decode() for rank in range(rendezvous.world_size if rendezvous.rank == 0 else 0)
    )
    return World(rendezvous.rank, rendezvous.world_size, device, heartbeat or Heartbeat(), hosts)


def interface_of(address: str) -> str:
    """The network interface of this host that has an IPv4 address, or the address of a name; '' if none has."""
    try:
        wanted = socket.inet_aton(socket.gethostbyname(address))
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24] == wanted:
                    return name
    return ""


JOIN_COUNTER = count()
"""A process may join more than once; every time it uses new keys in the store."""


def torchrun_restart_count() -> str:
    """The number of torchrun's restarts: its store outlives the ranks, so the keys must differ."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def connect_store(rendezvous: RendezvousInfo, timeout: float) -> dist.Store:
    """Connects to the store; raises PeerError if the host name, the port or rank 0 is the problem."""
    limit = timedelta(seconds=timeout)
    if rendezvous.store_file:
        # On one host Gloo uses the loopback interface, whatever the host's name resolves to.
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        )
        store: dist.Store = dist.FileStore(rendezvous.store_file, rendezvous.world_size)
        store.set_timeout(limit)
        return store
    try:
        socket.getaddrinfo(rendezvous.master_addr, rendezvous.master_port)
    except OSError as error:
        raise PeerError(
            f"rank {rendezvous.rank}: the name {rendezvous.master_addr!r} does not resolve ({error.strerror})",
            "try another MASTER_ADDR",
        ) from None
    try:
        return dist.TCPStore(
            rendezvous.master_addr,
            rendezvous.master_port,
            is_master=rendezvous.hosts_store,
            timeout=limit,
            wait_for_workers=False,
        )
    except (dist.DistNetworkError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise PeerError(
                f"rank {rendezvous.rank}: port {rendezvous.master_port} on {rendezvous.master_addr} is in use",
                "try another MASTER_PORT, or stop the process that uses it",
            ) from None
        raise PeerError(
            f"rank {rendezvous.rank}: {rendezvous.master_addr}:{rendezvous.master_port} did not answer within "
            f"{timeout:g} s",
            "expected rank 0 to run at MASTER_ADDR and MASTER_PORT",
        ) from None


def check_facts_agree(store: dist.Store, rendezvous: RendezvousInfo, facts: dict[str, Any], timeout: float) -> None:
    """Rank 0 compares the facts of all ranks; every rank raises the same error if a rank is missing or differs."""
    store.set(f"facts/{rendezvous.rank}", json.dumps(facts, sort_keys=True))
    if rendezvous.rank == 0:
        store.set("comparison", compare_facts(store, rendezvous.world_size, timeout))
    store.set_timeout(timedelta(seconds=timeout + 5))  # rank 0 may need the whole timeout to find a missing rank
    try:
        comparison = store.get("comparison").decode()
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError):
        raise PeerError(
            f"rank {rendezvous.rank}: rank 0 did not compare the ranks within {timeout:g} s", "try the log of rank 0"
        ) from None
    if comparison:
        kind, _, message = comparison.partition(" ")
        raise (
            PeerError(message, "try to start every rank")
            if kind == "missing"
            else IdentityError(message, "try to start every rank from the same code and config")
        )


def compare_facts(store: dist.Store, size: int, timeout: float) -> str:
    """What keeps the ranks from starting: "missing ..." or "differ ...", or '' if they agree."""
    deadline = time.monotonic() + timeout
    reported: dict[int, dict[str, Any]] = {}
    missing = []
    for rank in range(size):
        try:
            store.wait([f"facts/{rank}"], timedelta(seconds=max(0.05, deadline - time.monotonic())))
            reported[rank] = json.loads(store.get(f"facts/{rank}"))
        except (dist.DistStoreError, RuntimeError):
            missing.append(rank)
    if missing:
        return f"missing rank(s) {', '.join(map(str, missing))} of {size} did not join within {timeout:g} s"
    differing = []
    for key in sorted({key for facts in reported.values() for key in facts}):
        by_value: dict[str, list[int]] = {}
        for rank, facts in reported.items():
            by_value.setdefault(str(facts.get(key)), []).append(rank)
        if len(by_value) > 1:
            differing.append(
                f"{key} is "
                + ", ".join(f"{value} on rank(s) {', '.join(map(str, ranks))}" for value, ranks in by_value.items())
            )
    return f"differ ranks do not agree: {'; '.join(differing)}" if differing else ""


def select_device(launch: LaunchConfig, rendezvous: RendezvousInfo) -> torch.device:
    """The device of a rank; on CUDA the local rank decides which one."""
    if device_type(launch) == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        found = "no CUDA device" if not torch.cuda.device_count() else "CUDA devices that it cannot use"
        raise ConfigError(f"launch.device = {launch.device}, but torch finds {found}", "try launch.device = cpu")
    devices = torch.cuda.device_count()
    if (
        rendezvous.world_size > devices and rendezvous.store_file
    ):  # NCCL shares a device between ranks only if they seem to be on different hosts
        os.environ.setdefault("NCCL_HOSTID", f"rank-{rendezvous.rank}")
    torch.cuda.set_device(rendezvous.local_rank % devices)
    return torch.device("cuda", rendezvous.local_rank % devices)
