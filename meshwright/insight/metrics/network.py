"""The bytes that the network interfaces of this host have received and transmitted, from the kernel. Torch-free."""

from __future__ import annotations

from pathlib import Path

MAX_INTERFACES = 32
"""Interfaces that are exported: those with the most bytes. A host of containers has hundreds."""
RECEIVED, TRANSMITTED = 0, 8
"""Columns of /proc/net/dev."""


def read_network_bytes(path: Path = Path("/proc/net/dev")) -> dict[str, tuple[int, int]]:
    """Interface -> (bytes received, bytes transmitted); empty where the kernel does not tell."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, colon, columns = line.partition(":")
        values = columns.split()
        if colon and len(values) > TRANSMITTED and values[RECEIVED].isdigit() and values[TRANSMITTED].isdigit():
            found[name.strip()] = int(values[RECEIVED]), int(values[TRANSMITTED])
    busiest = sorted(found, key=lambda name: -sum(found[name]))[:MAX_INTERFACES]
    return {name: found[name] for name in sorted(busiest)}
