"""One run of the GPU benchmark: rows within a budget of seconds, each on record as soon as it is measured."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kernel_profile import profile_step
from benchmarks.gpu.meshwright_contender import MeshwrightLoop, predict
from benchmarks.gpu.rows import PairRow, Side
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import Entrant, Turn, free_memory, ratios

TURN_SECONDS = 7.5
"""About how long a turn takes on an H200, for `--budget`."""


class Session:
    """The rows that were measured, and Meshwright as it is by default, which stays built while rows use its model."""

    def __init__(
        self,
        device: torch.device,
        rounds: int,
        budget: float,
        path: Path | None,
        earlier: dict[str, Any],
        about: dict[str, Any],
        adapt: Callable[[Shape], Shape] = lambda shape: shape,
    ) -> None:
        """`adapt` makes the shapes smaller, for a quick look or for the CPU."""
        self.device, self.rounds, self.path, self.adapt = device, rounds, path, adapt
        self.begin, self.budget = time.monotonic(), budget
        self.result: dict[str, Any] = earlier | about | {"rows": earlier.get("rows", []), "skipped": []}
        self.default: tuple[Shape, Entrant] | None = None
        self.profiles: set[str] = set()
        """the rows of which the kernels of a step of both sides are listed"""

    def measure(
        self, name: str, model: str, seconds: float, missing: list[str], run: Callable[[], dict[str, Any]]
    ) -> None:
        """Measures a row if its packages are there and its estimated seconds fit the budget. A row that fails is on
        record with its error, and the next one runs.
        """
        elapsed = time.monotonic() - self.begin
        if missing:
            return self.skip(name, model, f"missing: {', '.join(missing)}")
        if elapsed + seconds > self.budget:
            return self.skip(name, model, f"about {seconds:.0f} s do not fit in {self.budget - elapsed:.0f} s")
        begin = time.monotonic()
        row: dict[str, Any] = {"row": name, "model": model, "rounds": self.rounds, "date": self.result["date"]}
        try:
            row |= run()
        except Exception as error:  # noqa: BLE001 - a contender may fail in any way
            traceback.print_exc(limit=-2)
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        free_memory(self.device)
        row["seconds"] = round(time.monotonic() - begin, 1)
        rows = self.result["rows"]
        index = next((i for i, other in enumerate(rows) if (other["row"], other["model"]) == (name, model)), len(rows))
        rows[index : index + 1] = [row]  # a row that is measured again keeps its place in the tables
        self.write()
        report(describe(row))

    def skip(self, name: str, model: str, reason: str) -> None:
        self.result["skipped"].append({"row": name, "model": model, "reason": reason})
        self.write()
        report(f"{name} {model}: skipped, {reason}")

    def write(self) -> None:
        self.result["seconds"] = round(time.monotonic() - self.begin, 1)
        if self.path is not None:
            self.path.write_text(json.dumps(self.result, indent=1) + "\n")

    def pair(self, row: PairRow, shape: Shape) -> dict[str, Any]:
        """Two contenders in turns: first, second, first, second."""
        # Meshwright by default is built first and stays; what is built last leaves first, as signal handlers require.
        order = sorted((row.first, row.second), key=lambda side: side.make is not None)
        if shape.name in row.apart:
            return self.compare(row, shape, *self.take_turns_apart(row, shape))
        with ExitStack() as stack:
            entrants = {side.title: self.enter(side, shape, stack) for side in order}
            first, second = entrants[row.first.title], entrants[row.second.title]
            since = len(first.turns), len(second.turns)
            for _ in range(row.rounds(self.rounds)):
                for entrant in (first, second):
                    entrant.run_turn(shape.steps)
                    free_memory(self.device)
            ratio = ratios(first.turns[since[0] :], second.turns[since[1] :])
            results = first.result(since[0]), second.result(since[1])
            if row.name in self.profiles:
                for result, entrant in zip(results, (first, second), strict=True):
                    result |= profile_step(entrant)
        return self.compare(row, shape, ratio, *results)

    def take_turns_apart(self, row: PairRow, shape: Shape) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Both sides in turns, each built anew for its turn: memory has no room for both."""
        turns: tuple[list[Turn], list[Turn]] = [], []
        results: list[dict[str, Any]] = [{}, {}]
        self.leave_default()
        for _ in range(row.rounds(self.rounds)):
            for index, side in enumerate((row.first, row.second)):
                with ExitStack() as stack:
                    entrant = self.enter(side, shape, stack)
                    entrant.turns[:] = turns[index]
                    entrant.run_turn(shape.steps)
                    turns[index][:] = entrant.turns
                    results[index] = entrant.result()
                self.leave_default()
        return ratios(*turns), results[0], results[1]

    def compare(
        self, row: PairRow, shape: Shape, ratio: dict[str, Any], first: dict[str, Any], second: dict[str, Any]
    ) -> dict[str, Any]:
        """The record of a row from the figures of both sides, with predictions and targets."""
        results = first, second
        if row.by_utilization and results[1]["tflops"]:
            ratio = {"median": round(results[0]["tflops"] / results[1]["tflops"], 4)}
        memory = round(results[0]["peak_gib"] / results[1]["peak_gib"], 4) if results[1]["peak_gib"] else None
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        predicted = [predictions(side, shape, device) for side in (row.first, row.second)]
        return {
            "rounds": row.rounds(self.rounds),
            "first": {"title": row.first.title, **results[0], **predicted[0]},
            "second": {"title": row.second.title, **results[1], **predicted[1]},
            "ratio": ratio,
            "memory_ratio": memory,
            "targets": [*targets(row, shape.name, ratio["median"], memory), *self.targets_to(row, shape.name, ratio)],
        }

    def targets_to(self, row: PairRow, model: str, ratio: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The targets relative to contenders that were timed beside Meshwright in rows of their own."""
        for name, bound in row.min_speed_to.items():
            for other in self.result["rows"]:
                if (other["row"], other["model"]) == (name, model) and "ratio" in other:
                    value = round(ratio["median"] * other["ratio"]["median"], 4)
                    quantity = f"speed / {other['second']['title']}"
                    yield {"quantity": quantity, "target": f">= {bound:.4g}", "value": value, "met": value >= bound}

    def enter(self, side: Side, shape: Shape, stack: ExitStack) -> Entrant:
        """Builds a side, which leaves with the stack, or returns Meshwright by default."""
        shape = self.adapt(side.shape) if side.shape is not None else shape
        if side.make is not None:
            build = partial(side.make, shape, self.device)
            entrant = Entrant.enter(build, self.device, shape.tokens, shape.flops_per_token)
            stack.callback(entrant.leave)
            return entrant
        if self.default is None or self.default[0] != shape:
            self.leave_default()
            build = partial(MeshwrightLoop, shape, self.device)
            self.default = shape, Entrant.enter(build, self.device, shape.tokens, shape.flops_per_token)
        return self.default[1]

    def leave_default(self) -> None:
        """Ends Meshwright on the model that the last rows used; code compiled for it is discarded."""
        if self.default is not None:
            self.default[1].leave()
            self.default = None
            torch._dynamo.reset()


def predictions(side: Side, shape: Shape, device: str) -> dict[str, Any]:
    """What the planner predicts for a side, if it knows the run and the device."""
    if side.settings is None or (found := predict(side.shape or shape, side.settings, device)) is None:
        return {}
    return {"predicted": found}


def targets(row: PairRow, model: str, speed: float, memory: float | None) -> list[dict[str, Any]]:
    """The targets of a row on a model, and whether they are met."""
    result = []
    if (bound := row.min_speed.get(model)) is not None:
        result.append({"quantity": "speed", "target": f">= {bound:.4g}", "value": speed, "met": speed >= bound})
    if (bound := row.max_memory.get(model)) is not None and memory is not None:
        result.append({"quantity": "memory", "target": f"<= {bound:.4g}", "value": memory, "met": memory <= bound})
    return result


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    head = f"{row['row']} {row['model']}".rstrip()
    if "error" in row:
        return f"{head}: FAILED, {row['error']}"
    met = "".join(f"; {t['quantity']} {t['target']} {'met' if t['met'] else 'MISSED'}" for t in row.get("targets", []))
    if "ratio" not in row:
        body = {key: value for key, value in row.items() if key not in ("row", "model", "date", "targets")}
        return f"{head}: {json.dumps(body)}{met}"
    sides = " | ".join(
        f"{side['title']} {side['step_ms']:.2f} ms [{side['step_ms_range'][0]:.2f}-{side['step_ms_range'][1]:.2f}] "
        f"{side['tokens_per_second']:,} tokens/s {side['tflops']:.0f} TFLOP/s {side['peak_gib']:.1f} GiB "
        f"(steps {side['peak_gib_of_steps']:.1f}) setup {side['setup_seconds']} s loss {side['loss']}"
        for side in (row["first"], row["second"])
    )
    return f"{head}: {sides} | ratio {row['ratio']['median']} {row['ratio'].get('range', '')}{met} ({row['seconds']} s)"


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
