"""What started this process, told from its environment alone. Torch-free."""

from __future__ import annotations

import os


def started_by_torchrun() -> bool:
    """torchrun, or anything that speaks its variables, has made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
