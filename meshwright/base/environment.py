"""Reads from the environment what started this process. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or another launcher that sets torchrun's variables, started this process as a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment
