"""Exports the coefficients of the planner for the calculators of the handbook, as javascripts/calculator-data.js.

The state of a rank is a table by number of ranks. Other figures are affine in what a reader changes: communication in
micro-batches, activations in tokens. Two evaluations give their coefficients, and others check them, so that a formula
of the planner that changes its form ends the build.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from formulas import LEVELS, block_bytes, state_bytes, volume, wire

from meshwright.base.config import load_config
from meshwright.base.topology.collectives import COLLECTIVES
from meshwright.base.topology.schedules import SCHEDULES

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

MODELS = ("llama-1b", "llama-8b", "llama-70b", "llama-405b")
RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
MODES = ("none", "selective", "full")
CLASSES = ("parameter", "gradient", "optimizer")
SCRIPT = "javascripts/calculator-data.js"


def fit(
    values: Callable[[int], float], variable: Callable[[int], float], points: Sequence[int], what: str
) -> list[float]:
    """The coefficients [a, b] of values = a + b x variable from the first two points; the others must agree."""
    first, second = points[:2]
    slope = (values(second) - values(first)) / (variable(second) - variable(first))
    start = values(first) - slope * variable(first)
    for point in points:
        if abs(start + slope * variable(point) - values(point)) > 1e-6 * max(1.0, abs(values(point))):
            raise ValueError(f"{what} is not affine at {point}: {values(point)}")
    return [start, slope]


def reciprocal(ranks: int) -> float:
    return 1 / ranks


def identity(count: int) -> float:
    return float(count)


def state_rows(model: str, level: str, accumulation: int) -> list[list[int]]:
    """Bytes of each memory class, by number of ranks."""
    return [[state_bytes(model, level, ranks, name, accumulation) for name in CLASSES] for ranks in RANKS]


def activation_coefficients(model: str) -> dict[str, Any]:
    """Bytes that a block saves per token, by mode of activation checkpointing."""

    def saved(mode: str) -> list[float]:
        return fit(
            lambda tokens: block_bytes(model, mode, f"data.sequence={tokens}"),
            identity,
            (1024, 4096, 8192),
            f"{mode} {model}",
        )

    layers = load_config(overrides=[f"preset={model}"]).model.layers
    return {"layers": layers, "modes": {mode: saved(mode) for mode in MODES}}


def calculator_data() -> dict[str, Any]:
    """All coefficients."""
    return {
        "ranks": RANKS,
        "levels": LEVELS,
        "state": {
            model: {level: {str(m): state_rows(model, level, m) for m in (1, 2)} for level in LEVELS}
            for model in MODELS
        },
        "volume": {
            level: fit(lambda m, name=level: volume(name, 8, m) * 8 / 7, identity, (1, 2, 16), level)  # type: ignore[misc]
            for level in LEVELS
        },
        "wire": {
            name: fit(lambda ranks, name=name: wire(name, ranks), reciprocal, (2, 4, 64), name)  # type: ignore[misc]
            for name in COLLECTIVES
            if name not in ("barrier", "other")
        },
        "schedules": {
            name: {
                "divisor": fit(schedule.bubble_divisor, identity, (1, 2, 4), name),
                "stages": [schedule.min_stages, schedule.max_stages or 8, schedule.default_stages],
                "in_flight": "all" if schedule.all_forward_first else "1f1b" if schedule.single_stage else "",
            }
            for name, schedule in SCHEDULES.items()
        },
        "activations": {model: activation_coefficients(model) for model in MODELS},
    }


def calculator_script() -> str:
    """The coefficients as a script: a page that is opened as a file may load scripts, and no JSON."""
    data = json.dumps(calculator_data())
    return f"// Written by docs/hooks/calculators.py from the planner.\nwindow.MESHWRIGHT_PLANNER = {data};\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    files.append(File.generated(config, SCRIPT, content=calculator_script()))
    return files
