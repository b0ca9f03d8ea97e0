"""Which ranks of an attempt run on which host, and how they find each other. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HostPlacement:
    """The ranks of one host in one attempt."""

    first_rank: int
    ranks: int
    """Ranks on this host."""
    hosts: tuple[str, ...]
    """The names of all hosts, in the order of their ranks."""
    addresses: tuple[str, ...]
    """The address of each host, by which the others reach it."""
    control_ports: tuple[int, ...]
    """The port at which the supervisor of each host listens."""
    port: int
    """The port at which rank 0 serves the store of the process group, at the address of the first host."""

    @property
    def world_size(self) -> int:
        return self.ranks * len(self.hosts)

    @property
    def index(self) -> int:
        """The position of this host among the hosts."""
        return self.first_rank // self.ranks

    @property
    def local_ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.ranks)

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))  # not asdict: each of many hosts would copy the names of all of them

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> HostPlacement:
        """Raises ValueError unless the values are those of a placement."""
        try:
            hosts, addresses = tuple(values["hosts"]), tuple(values["addresses"])
            ports = tuple(values["control_ports"])
            placement = cls(values["first_rank"], values["ranks"], hosts, addresses, ports, values["port"])
            numbers = (placement.first_rank, placement.ranks, placement.port, *ports)
            valid = all(type(number) is int and number >= 0 for number in numbers) and placement.ranks > 0
            valid = valid and len(values) == 6 and 0 < placement.port < 65536
            valid = valid and all(type(text) is str for text in hosts + addresses)
            valid = valid and len(hosts) == len(addresses) == len(ports) > 0
            valid = valid and placement.first_rank % placement.ranks == 0 and placement.index < len(hosts)
        except (KeyError, TypeError):
            valid = False
        if not valid:
            raise ValueError("a placement is not valid")
        return placement
