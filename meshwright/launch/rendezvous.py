"""Ranks find each other, compare what they are, and form the process group; what keeps them apart is named within a
bound.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from meshwright.config import LaunchConfig
from meshwright.errors import ConfigError, IdentityError, PeerError
from meshwright.launch.environment import started_by_torchrun
from meshwright.parallel.world import World
from meshwright.telemetry.heartbeat import Heartbeat


@dataclass(frozen=True)
class RendezvousInfo:
    """Where a rank stands before it knows the others, and where they meet: a file on one host, an address across
    hosts.
    """

    rank: int
    size: int
    local_rank: int
    file: str = ""
    address: str = ""
    port: int = 0
    hosts_store: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RendezvousInfo | None:
        """The place that torchrun (or anything that speaks its variables) gave this process; None if it gave none."""
        if not started_by_torchrun(environment):
            return None
        try:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local_rank, port = int(environment.get("LOCAL_RANK", rank)), int(environment.get("MASTER_PORT", "29500"))
        except ValueError as error:
            raise ConfigError(
                f"RANK, WORLD_SIZE, LOCAL_RANK or MASTER_PORT is no number: {error}", "allowed: what torchrun sets"
            ) from None
        if not 0 <= port < 65536:
            raise ConfigError(f"MASTER_PORT = {port} is no port", "allowed: from 0 to 65535")
        if not 0 <= rank < size:
            raise ConfigError(f"RANK = {rank} is not below WORLD_SIZE = {size}", f"allowed: from 0 to {size - 1}")
        agent_hosts = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank, size, local_rank, "", environment.get("MASTER_ADDR", "localhost"), port, rank == 0 and not agent_hosts
        )


def join_process_group(
    place: RendezvousInfo, launch: LaunchConfig, facts: Mapping[str, Any], page: Heartbeat | None = None
) -> World:
    """This rank's World, once every rank has come and said the same facts."""
    device = select_device(launch, place)
    if place.size == 1:
        return World(0, 1, device, page or Heartbeat())
    store = dist.PrefixStore(
        f"{torchrun_restart_count()}/{next(JOIN_COUNTER)}", connect_store(place, launch.rendezvous_timeout)
    )
    store.set(f"host/{place.rank}", socket.gethostname())
    check_facts_agree(
        store,
        place,
        dict(facts)
        | {
            "world size": place.size,
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
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=launch.collective_timeout),
    )
    hosts = tuple(store.get(f"host/{rank}").decode() for rank in range(place.size if place.rank == 0 else 0))
    return World(place.rank, place.size, device, page or Heartbeat(), hosts)


JOIN_COUNTER = count()
"""A process may train more than once; each time the ranks meet under keys that nobody has used."""


def torchrun_restart_count() -> str:
    """Which restart of torchrun's this is: its store outlives the ranks."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def connect_store(place: RendezvousInfo, timeout: float) -> dist.Store:
    bound = timedelta(seconds=timeout)
    if place.file:
        # One host: Gloo binds to the loopback, whatever the host's name resolves to.
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        )
        store: dist.Store = dist.FileStore(place.file, place.size)
        store.set_timeout(bound)
        return store
    where = f"{place.address}:{place.port}"
    try:
        socket.getaddrinfo(place.address, place.port)
    except OSError as error:
        raise PeerError(
            f"rank {place.rank}: the name {place.address!r} does not resolve ({error.strerror})", "check MASTER_ADDR"
        ) from None
    try:
        return dist.TCPStore(
            place.address, place.port, is_master=place.hosts_store, timeout=bound, wait_for_workers=False
        )
    except (dist.DistNetworkError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise PeerError(
                f"rank {place.rank}: port {place.port} on {place.address} is in use",
                "give another MASTER_PORT, or end what holds it",
            ) from None
        raise PeerError(
            f"rank {place.rank}: {where} did not answer within {timeout:g} s",
            "check MASTER_ADDR and MASTER_PORT, and that rank 0 is up",
        ) from None


def check_facts_agree(store: dist.Store, place: RendezvousInfo, facts: dict[str, Any], timeout: float) -> None:
    """Rank 0 reads what every rank says of itself and gives the verdict; all ranks raise the same mismatch."""
    store.set(f"facts/{place.rank}", json.dumps(facts, sort_keys=True))
    if place.rank == 0:
        store.set("verdict", compare_facts(store, place.size, timeout))
    store.set_timeout(timedelta(seconds=timeout + 5))  # rank 0 may need the whole bound to find out who is missing
    try:
        verdict = store.get("verdict").decode()
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError):
        raise PeerError(f"rank {place.rank}: rank 0 gave no verdict within {timeout:g} s", "look at rank 0") from None
    if verdict:
        kind, _, message = verdict.partition(" ")
        raise (
            PeerError(message, "start every rank")
            if kind == "missing"
            else IdentityError(message, "start every rank from the same code and the same config")
        )


def compare_facts(store: dist.Store, size: int, timeout: float) -> str:
    end = time.monotonic() + timeout
    said: dict[int, dict[str, Any]] = {}
    missing = []
    for rank in range(size):
        try:
            store.wait([f"facts/{rank}"], timedelta(seconds=max(0.05, end - time.monotonic())))
            said[rank] = json.loads(store.get(f"facts/{rank}"))
        except (dist.DistStoreError, RuntimeError):
            missing.append(rank)
    if missing:
        return f"missing rank(s) {', '.join(map(str, missing))} of {size} did not join within {timeout:g} s"
    differing = []
    for key in sorted({key for facts in said.values() for key in facts}):
        by_value: dict[str, list[int]] = {}
        for rank, facts in said.items():
            by_value.setdefault(str(facts.get(key)), []).append(rank)
        if len(by_value) > 1:
            differing.append(
                f"{key} is "
                + ", ".join(f"{value} on rank(s) {', '.join(map(str, ranks))}" for value, ranks in by_value.items())
            )
    return f"differ ranks do not agree: {'; '.join(differing)}" if differing else ""


def select_device(launch: LaunchConfig, place: RendezvousInfo) -> torch.device:
    if launch.device == "cpu" or (launch.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("launch.device = cuda and torch finds no CUDA device", "allowed: auto, cpu")
    devices = torch.cuda.device_count()
    if place.size > devices and place.file:  # NCCL lets ranks share a device only if it takes them for other hosts
        os.environ.setdefault("NCCL_HOSTID", f"rank-{place.rank}")
    torch.cuda.set_device(place.local_rank % devices)
    return torch.device("cuda", place.local_rank % devices)
