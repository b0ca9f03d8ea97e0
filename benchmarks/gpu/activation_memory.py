"""Step time and peak memory of a model under every way to keep fewer activations, and which of them are Pareto-optimal.

`python -m benchmarks.gpu.activation_memory` prints the table for the Llama of 1.2B. The policies of selective
checkpointing name the matrix products of a block whose results are saved, besides attention.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.checkpoint import CheckpointPolicy

from benchmarks.gpu.meshwright_contender import MeshwrightLoop
from benchmarks.gpu.shapes import SHAPES, Shape, tiny
from benchmarks.gpu.timing import Entrant, free_memory
from meshwright.core.parallel.activation_memory import activation_checkpoint
from meshwright.core.parallel.activation_memory.activation_checkpoint import ATTENTION, MATMULS

PRODUCTS = ("q", "k", "v", "out", "gate", "up", "down")
"""The matrix products of a block of the Llama, in the order of its forward pass."""
FULL, SELECTIVE = "activation_checkpoint.mode=full", "activation_checkpoint.mode=selective"
SETTINGS: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": (SELECTIVE,),
    "full": (FULL,),
    "full, segments of 2": (FULL, "activation_checkpoint.segment=2"),
    "full, offload": (FULL, "activation_checkpoint.offload=true"),
    **{f"memory budget {budget}": (f"activation_checkpoint.memory_budget={budget}",) for budget in (0.7, 0.5, 0.3)},
}
SAVED: dict[str, tuple[str, ...]] = {
    "attention": (),
    "attention, out": ("out",),
    "attention, up": ("up",),
    "attention, out, up": ("out", "up"),
    "attention, q, v, gate": ("q", "v", "gate"),
    "attention, q, k, v, out": ("q", "k", "v", "out"),
    "attention, q, k, v, out, up": ("q", "k", "v", "out", "up"),
    "attention, all products": PRODUCTS,
}
POLICIES = (*SETTINGS, *SAVED)


class SavedProducts:
    """A selective policy that saves attention and the named matrix products of one forward pass of a block."""

    def __init__(self, saved: Sequence[str]) -> None:
        self.saved, self.seen = saved, {False: 0, True: 0}

    def __call__(self, context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name = operation.__name__.partition(".")[0]
        saved = name in ATTENTION
        if name in MATMULS:
            saved = PRODUCTS[self.seen[context.is_recompute] % len(PRODUCTS)] in self.saved
            self.seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def policy_of(name: str) -> Iterator[tuple[str, ...]]:
    """Yields the settings of a run under the policy, which holds inside."""
    if name in SETTINGS:
        yield SETTINGS[name]
        return
    with patch.object(activation_checkpoint, "SelectivePolicy", partial(SavedProducts, SAVED[name])):
        yield (SELECTIVE,)


def measure(shape: Shape, device: torch.device, policies: Sequence[str] = POLICIES) -> list[dict[str, Any]]:
    """One row per policy: milliseconds per step and GiB at the peak of a step. Rows that another one beats in both are
    not Pareto-optimal.
    """
    rows: list[dict[str, Any]] = []
    for name in policies:
        try:
            rows.append({"policy": name, **measure_policy(shape, device, name)})
        except Exception as error:  # noqa: BLE001 - the other policies are measured all the same
            rows.append({"policy": name, "error": f"{type(error).__name__}: {error}"[:300]})
        print(rows[-1], file=sys.stderr, flush=True)
    measured = [row for row in rows if "error" not in row]
    for row in measured:
        row["pareto"] = not any(beats(other, row) for other in measured)
    return rows


def measure_policy(shape: Shape, device: torch.device, name: str) -> dict[str, float]:
    torch._dynamo.reset()  # equal blocks under another policy are other code
    with policy_of(name) as settings:
        build = partial(MeshwrightLoop, shape, device, settings)
        entrant = Entrant.enter(build, device, shape.tokens, shape.flops_per_token)
        try:
            turn = entrant.run_turn(shape.steps)
        finally:
            entrant.leave()
            free_memory(device)
    return {"step_ms": round(turn.seconds * 1e3, 2), "peak_gib": round(turn.peak / 2**30, 2)}


def beats(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether the first is better in one quantity, and no worse in the other."""
    pairs = [(first[key], second[key]) for key in ("step_ms", "peak_gib")]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, relative to `none`, fastest first."""
    measured = sorted((row for row in rows if "error" not in row), key=lambda row: row["step_ms"])
    none = next((row for row in measured if row["policy"] == "none"), {"step_ms": 0.0, "peak_gib": 0.0})
    lines = ["| saved for backward | ms per step | | peak GiB | | Pareto-optimal |", "|---|---|---|---|---|---|"]
    for row in measured:
        time, memory = (row[key] / none[key] - 1 if none[key] else 0.0 for key in ("step_ms", "peak_gib"))
        figures = f"{row['step_ms']:.1f} | {time:+.1%} | {row['peak_gib']:.1f} | {memory:+.0%}"
        lines.append(f"| {row['policy']} | {figures} | {'yes' if row['pareto'] else ''} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.activation_memory", description=__doc__)
    parser.add_argument("--policies", default=";".join(POLICIES), help="policies to measure, separated by semicolons")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: runs the code, measures nothing")
    args = parser.parse_args(arguments)
    shape = replace(tiny(SHAPES["b"]) if args.tiny else SHAPES["b"], steps=args.steps)
    rows = measure(shape, torch.device("cpu") if args.tiny else torch.device("cuda", 0), args.policies.split(";"))
    print(table(rows), file=sys.stderr)
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
