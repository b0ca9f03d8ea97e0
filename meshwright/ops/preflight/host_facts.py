"""Reads the name, the versions and the limits of this host."""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
from pathlib import Path

import torch

from meshwright.core.trainer.identity import code_fingerprint
from meshwright.errors import ConfigError
from meshwright.ops.preflight.measurements import HostLimits
from meshwright.version import __version__

MAX_HOST_NAME = 255
"""Characters of a host name."""


def host_name() -> str:
    """Returns MESHWRIGHT_HOST_NAME, or the name of this machine."""
    name = os.environ.get("MESHWRIGHT_HOST_NAME", "").strip() or socket.gethostname()
    if len(name) > MAX_HOST_NAME or not name.isprintable():
        raise ConfigError(
            "MESHWRIGHT_HOST_NAME is not a host name", f"expected up to {MAX_HOST_NAME} printable letters"
        )
    return name


def read_versions(device: torch.device, config_fingerprint: str = "") -> dict[str, str]:
    """Returns the version or fingerprint of every component that all hosts must agree on."""
    versions = {
        "meshwright": __version__,
        "code": code_fingerprint(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device type": device.type,
    }
    if config_fingerprint:
        versions["config"] = config_fingerprint
    if device.type == "cuda":
        versions |= {
            "cuda": torch.version.cuda or "none",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": driver_version(),
            "device": torch.cuda.get_device_name(device),
        }
    return versions


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Returns the version of the kernel module of the NVIDIA driver, or "unknown"."""
    try:
        match = re.search(r"Kernel Module.*?(\d+\.\d+(\.\d+)?)", file.read_text(errors="replace")[:4096])
    except OSError:
        return "unknown"
    return match[1] if match else "unknown"


def read_limits() -> HostLimits:
    """Returns the limits of this process and this host."""
    try:
        shared = os.statvfs("/dev/shm")
        shared_memory = shared.f_frsize * shared.f_blocks
    except OSError:
        shared_memory = 0
    return HostLimits(
        soft_limit(resource.RLIMIT_NOFILE),
        shared_memory,
        soft_limit(resource.RLIMIT_MEMLOCK),
        local_ports(),
        any(Path("/sys/class/infiniband").glob("*")),
    )


def soft_limit(kind: int) -> int | None:
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def local_ports(file: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> int | None:
    """Returns the number of ports for outgoing connections, or None if it is unknown."""
    try:
        first, last = map(int, file.read_text().split())
    except (OSError, ValueError):
        return None
    return last - first + 1
