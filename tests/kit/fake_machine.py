"""Provides a made-up machine.toml, for tests of plans that use `--cluster here`."""

from __future__ import annotations

from pathlib import Path

from meshwright.base.hardware.cluster import Cluster, Device, Link, MatmulRate
from meshwright.base.hardware.cluster_file import cluster_toml
from meshwright.base.hardware.resolve_cluster import measured_machine

GB = 1e9


def made_up_machine(
    devices: int = 4, memory: float = 4 * GB, name: str = "made-up processor", rate: float = 20e9
) -> Cluster:
    """Returns one CPU host with `devices` ranks, each with `memory` bytes and `rate` FLOP/s in fp32."""
    matmuls = tuple(
        MatmulRate(precision, size, size, size, rate * fraction)
        for precision, fraction in (("fp32", 1.0), ("bf16", 0.5))
        for size in (64, 512)
    )
    device = Device(name, memory, 8 * GB, {"fp32": 2 * rate, "bf16": rate}, is_cpu=True, measured_matmuls=matmuls)
    link = Link(1 * GB, 50e-6)
    return Cluster("here", device, devices, 1, link, link, 5e-6)


def write_machine(home: Path, cluster: Cluster | None = None) -> Cluster:
    """Writes machine.toml where `meshwright plan measure` would, and returns it as plans read it."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "machine.toml").write_text(cluster_toml(cluster or made_up_machine()))
    return measured_machine()
