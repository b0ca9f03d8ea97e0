"""`python -m benchmarks gpu`: training speed on this machine's CUDA device, beside the loops of others.

Every row prints as soon as it is measured, and the JSON file is complete after every row.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import platform
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import ceilings, checkpoint_row, numerics, start_row
from benchmarks.gpu.rows import PAIRS
from benchmarks.gpu.session import TURN_SECONDS, Session, report
from benchmarks.gpu.shapes import SHAPES, Shape, tiny
from benchmarks.gpu.speed_page import write_page

PACKAGES = ("torch", "triton", "transformers", "accelerate", "pytorch-lightning")
SINGLE = {
    "checkpoint": (checkpoint_row.measure, ("b",), 80.0),
    "start": (start_row.measure, ("a", "b"), 100.0),
}
"""Rows that are not pairs: the function that measures them, their models, and about how many seconds they take."""
ROWS = ("ceiling", "numerics", *(row.name for row in PAIRS), *SINGLE)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--models", default="a,b,c", help="models to measure: a, b and c, separated by commas")
    parser.add_argument(
        "--rows",
        default=",".join(ROWS),
        help=f"rows to measure, such as best or best:a+b for two models: {', '.join(ROWS)}",
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender of a row")
    parser.add_argument(
        "--budget", type=float, default=3600.0, metavar="SECONDS", help="start no row that would not end in time"
    )
    parser.add_argument("--quick", action="store_true", help="one round, a quarter of the steps, and a short ceiling")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: runs the code, measures nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file after every row")
    parser.add_argument(
        "--profile", default="", metavar="ROWS", help="list the kernels of a step of both sides of rows"
    )
    parser.add_argument("--add", action="store_true", help="keep the rows of FILE that are not measured again")
    parser.add_argument("--write-docs", action="store_true", help="write the tables of docs/speed.md from the result")
    parser.add_argument(
        "--tables",
        type=Path,
        metavar="FILE",
        help="measure nothing: write the tables of docs/speed.md from this result",
    )
    args = parser.parse_args(arguments)
    if args.tables is not None:
        return write_page(json.loads(args.tables.read_text()))
    if args.add and args.json is None:
        parser.error("--add needs --json FILE")
    models = args.models.split(",")
    rows = {
        name: set(only.split("+") if only else SHAPES)
        for name, _, only in (r.partition(":") for r in args.rows.split(","))
    }
    for names, known in (({*models, *set.union(*rows.values())}, set(SHAPES)), (set(rows), set(ROWS))):
        if unknown := names - known:
            parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(sorted(known))}")
    if not args.tiny and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --tiny runs the code on the CPU")
    warnings.simplefilter("ignore")  # warnings of the contenders are not results
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    rounds = 1 if args.quick or args.tiny else args.rounds
    gc.collect()
    gc.freeze()  # no contender pays for garbage collection of what others have imported
    earlier = json.loads(args.json.read_text()) if args.add and args.json.exists() else {}
    adapt = tiny if args.tiny else with_few_steps if args.quick else with_all_steps
    session = Session(device, rounds, args.budget, args.json, earlier, about(device), adapt)
    session.profiles = set(args.profile.split(","))
    run_rows(session, models, rows, 0.1 if args.tiny else 2.0 if args.quick else 4.0)
    print(json.dumps(session.result, indent=1))
    if args.write_docs:
        write_page(session.result)


def with_few_steps(shape: Shape) -> Shape:
    return replace(shape, steps=max(2, shape.steps // 4))


def with_all_steps(shape: Shape) -> Shape:
    return shape


def run_rows(session: Session, models: list[str], rows: dict[str, set[str]], ceiling_seconds: float) -> None:
    """Measures rows, each with the models that it is wanted for, model by model: Meshwright is built once per model."""
    torch._dynamo.config.recompile_limit = 64  # contenders of one model share the compiler
    if "ceiling" in rows:
        session.result["ceilings"] = ceilings.measure(session.device, ceiling_seconds)
        report(f"ceiling: {session.result['ceilings']}")
    for model in models:
        shape = session.adapt(SHAPES[model])
        wanted = {name for name, only in rows.items() if model in only}
        if "numerics" in wanted:
            session.measure("numerics", model, 15.0, [], partial(numerics.check, shape, session.device))
            torch._dynamo.reset()  # its small batches would make the compiler expect changing shapes
        for row in PAIRS:
            if row.name in wanted and model in row.models:
                estimate = row.setup_seconds + row.rounds(session.rounds) * 2 * TURN_SECONDS
                session.measure(
                    row.name, model, estimate, row.missing(session.device), partial(session.pair, row, shape)
                )
        session.leave_default()
        for name, (measure, known, estimate) in SINGLE.items():
            if name in wanted and model in known:
                session.measure(name, model, estimate, [], partial(measure, shape, session.device))


def about(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if cuda else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
