"""Names the processor of this host as the kernel reports it; torch-free."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def processor_name() -> str:
    """Returns the model name of the CPU, or `cpu` if it is unknown."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"
