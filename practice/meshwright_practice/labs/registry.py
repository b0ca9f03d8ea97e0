"""The labs in the order in which they are best done. Torch-free."""

from __future__ import annotations

import difflib
from importlib import import_module

from meshwright.errors import ConfigError
from meshwright_practice.labs.lab import PACKAGE, Lab

ORDER = (
    "ring_all_reduce",
    "gradient_buckets",
    "zero_stages",
    "tensor_parallel_linear",
    "resumable_sampler",
    "crash_safe_checkpoint",
    "pipeline_1f1b",
    "ring_attention",
    "expert_dispatch",
    "straggler_hunt",
    "five_part_scenario",
)
"""Folders of the labs. Each one's package has the value `LAB`."""


def all_labs() -> list[Lab]:
    return [load_lab(name) for name in ORDER]


def load_lab(name: str) -> Lab:
    lab: Lab = import_module(f"{PACKAGE}.{name}").LAB
    return lab


def find_lab(name: str) -> Lab:
    """The lab of a name that the user typed; hyphens and underscores are equivalent."""
    wanted = name.replace("-", "_")
    if wanted in ORDER:
        return load_lab(wanted)
    close = difflib.get_close_matches(wanted, ORDER, n=1)
    suggestion = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"there is no lab {name!r}", f"{suggestion}expected one of {', '.join(ORDER)}")
