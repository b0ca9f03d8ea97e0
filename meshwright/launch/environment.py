"""What started this process, told from its environment alone. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """torchrun, or anything that speaks its variables, has made this process a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment
