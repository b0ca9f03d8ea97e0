"""Runs the benchmarks: one JSON object on standard output and in bench.json, progress on standard error."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks import checkpoint, layouts, pipeline, recovery, sampler, throughput, zero
from benchmarks.throughput import PLAIN

RESULT = Path("bench.json")
PACKAGES = ("meshwright", "torch", "numpy", "xxhash", "accelerate", "lightning-fabric", "torchdata")
PARTS = ("throughput", "layouts", "zero", "pipeline", "sampler", "checkpoint", "recovery")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--rounds", type=int, default=120, help="rounds of the throughput, each a step of every loop")
    words = parser.parse_args()
    if words.rounds < 1:
        parser.error("--rounds: allowed: at least 1")
    warnings.simplefilter("ignore")  # what peers say of themselves is no result
    start = time.monotonic()
    result: dict[str, Any] = {"machine": machine()}
    if "throughput" in words.only:
        result["throughput"] = throughput.measure(words.rounds)
    if "layouts" in words.only:
        result["layouts"] = layouts.measure()
    if "zero" in words.only:
        result["zero"] = zero.measure()
    if "pipeline" in words.only:
        result["pipeline"] = pipeline.measure()
    if "sampler" in words.only:
        result["sampler"] = sampler.measure()
    if "checkpoint" in words.only:
        result["checkpoint"] = checkpoint.measure()
    if "recovery" in words.only:
        result["recovery"] = recovery.measure()
    result["targets"] = targets(result)
    result["machine"] |= {"load_at_end": round(os.getloadavg()[0], 2), "seconds": round(time.monotonic() - start, 1)}
    text = json.dumps(result, indent=1)
    RESULT.write_text(text + "\n")
    print(text)
    for target in result["targets"]:
        met = {True: "met", False: "MISSED", None: "not measured"}[target["met"]]
        print(f"{target['name']}: {target['value']} (target {target['target']}) {met}", file=sys.stderr)


def machine() -> dict[str, Any]:
    """What the figures depend on. A load above zero at the start was somebody else's."""
    return {
        "platform": platform.platform(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target with its value; what was not measured has none."""
    rows: list[dict[str, Any]] = []
    if "throughput" in result:
        for peer, least in throughput.TARGETS.items():
            compared = result["throughput"]["ratio_to"][peer]
            value = compared["median"] if compared else None
            rows.append(target(f"throughput / {peer}", value, least, ">="))
    if "layouts" in result:
        for name, one in result["layouts"]["layouts"].items():
            rows.append(target(f"layout / {PLAIN}, {name}", one["ratio_to_plain"]["median"], layouts.LEAST, ">="))
    if "sampler" in result:
        for length in ("10^6", "10^12"):
            value = result["sampler"]["stream"][length]["microseconds_a_sample"]
            rows.append(target(f"sampler, us a sample at {length}", value, sampler.MOST_MICROSECONDS, "<="))
        for what, value in result["sampler"]["growth"].items():
            rows.append(target(f"sampler, growth of {what} from 10^6 to 10^12", value, sampler.MOST_GROWTH, "<="))
    if "checkpoint" in result:
        rows += targets_of_checkpoint(result["checkpoint"])
    if "recovery" in result:
        value = result["recovery"]["ratio_to_cold_start"][recovery.RANK]["median"]
        rows.append(target(f"recovery, {recovery.RANK} / {recovery.COLD}", value, recovery.MOST, "<="))
    return rows


def targets_of_checkpoint(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for ranks, one in found["ranks"].items():
        compared = {"stall of a save": one["stall_ratio_to"], "restore": one["restore_ratio_to"]}
        for what, by_peer in compared.items():
            for peer, ratio in by_peer.items():
                name = f"checkpoint, {what} / {peer}, ranks {ranks}"
                rows.append(target(name, ratio["median"], checkpoint.TARGETS[peer], "<="))
    share = found["digests"]["share"]["median"]
    return [*rows, target("checkpoint, digests' share of a save", share, checkpoint.MOST_DIGEST, "<=")]


def target(name: str, value: float | None, bound: float, sense: str) -> dict[str, Any]:
    met = None if value is None else value >= bound if sense == ">=" else value <= bound
    return {"name": name, "value": value, "target": f"{sense} {bound}", "met": met}


if __name__ == "__main__":
    main()
