"""Runs the benchmarks. The result is one JSON object on standard output and in bench.json; progress is on stderr."""

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

from benchmarks import (
    checkpoint,
    layouts,
    manifest,
    object_store,
    observation,
    optimizers,
    peer_memory,
    pipeline,
    readers,
    recovery,
    rl,
    rollout_log,
    sampler,
    sampling,
    scale,
    setups,
    throughput,
    tokenization,
    traces,
    transformers_loops,
    weights,
    zero,
)
from benchmarks.throughput import TORCH

RESULT = Path("bench.json")
PACKAGES = (
    "meshwright",
    "torch",
    "numpy",
    "xxhash",
    "accelerate",
    "lightning-fabric",
    "torchdata",
    "transformers",
    "tokenizers",
    "datasets",
    "HolisticTraceAnalysis",
    "obstore",
    "s3fs",
    "moto",
    "trl",
)


def main(args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")  # warnings of the peers are not results
    start = time.monotonic()
    result: dict[str, Any] = {"machine": machine()}
    if "throughput" in args.only:
        result["throughput"] = throughput.measure(args.rounds)
    if "transformers" in args.only:
        result["transformers"] = transformers_loops.measure(args.rounds)
    if "layouts" in args.only:
        result["layouts"] = layouts.measure()
    if "zero" in args.only:
        result["zero"] = zero.measure()
    if "pipeline" in args.only:
        result["pipeline"] = pipeline.measure()
    if "sampler" in args.only:
        result["sampler"] = sampler.measure()
    if "tokenization" in args.only:
        result["tokenization"] = tokenization.measure()
    if "checkpoint" in args.only:
        result["checkpoint"] = checkpoint.measure()
    if "manifest" in args.only:
        result["manifest"] = manifest.measure()
    if "weights" in args.only:
        result["weights"] = weights.measure()
    if "sampling" in args.only:
        result["sampling"] = sampling.measure()
    if "optimizers" in args.only:
        result["optimizers"] = optimizers.measure()
    if "observation" in args.only:
        result["observation"] = observation.measure()
    if "readers" in args.only:
        result["readers"] = readers.measure()
    if "recovery" in args.only:
        result["recovery"] = recovery.measure()
    if "scale" in args.only:
        result["scale"] = scale.measure()
    if "setups" in args.only:
        result["setups"] = setups.measure()
    if "peer_memory" in args.only:
        result["peer_memory"] = peer_memory.measure()
    if "traces" in args.only:
        result["traces"] = traces.measure()
    if "object_store" in args.only:
        result["object_store"] = object_store.measure()
    if "rollout_log" in args.only:
        result["rollout_log"] = rollout_log.measure()
    if "rl" in args.only:
        result["rl"] = rl.measure()
    result["targets"] = targets(result)
    result["machine"] |= {"load_at_end": round(os.getloadavg()[0], 2), "seconds": round(time.monotonic() - start, 1)}
    text = json.dumps(result, indent=1)
    RESULT.write_text(text + "\n")
    print(text)
    for target in result["targets"]:
        met = {True: "met", False: "MISSED", None: "not measured"}[target["met"]]
        print(f"{target['name']}: {target['value']} (target {target['target']}) {met}", file=sys.stderr)


def machine() -> dict[str, Any]:
    """What the results depend on. A load above zero at the start comes from other processes."""
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
    """Each target with its measured value, or None if it was not measured."""
    rows: list[dict[str, Any]] = []
    if "throughput" in result:
        for peer, minimum in throughput.TARGETS.items():
            ratio = result["throughput"]["ratio_to"][peer]
            value = ratio["median"] if ratio else None
            rows.append(target(f"throughput / {peer}", value, minimum, ">="))
    if "transformers" in result:
        ratio = result["transformers"]["ratio_to_accelerate"]
        value = ratio["median"] if ratio else None
        rows.append(target("transformers Llama / accelerate", value, transformers_loops.MIN_RATIO, ">="))
    if "layouts" in result:
        for name, row in result["layouts"]["layouts"].items():
            value = row["ratio_to_torch"]["median"]
            rows.append(target(f"layout / {TORCH}, {name}", value, layouts.MIN_RATIO, ">="))
    if "sampler" in result:
        for length in ("10^6", "10^12"):
            value = result["sampler"]["stream"][length]["microseconds_per_sample"]
            rows.append(target(f"sampler, us per sample at {length}", value, sampler.MAX_MICROSECONDS, "<="))
        for quantity, value in result["sampler"]["growth"].items():
            rows.append(target(f"sampler, growth of {quantity} from 10^6 to 10^12", value, sampler.MAX_GROWTH, "<="))
    if "tokenization" in result:
        ratio = result["tokenization"]["ratio_to_datasets"]
        value = ratio["median"] if ratio else None
        rows.append(target("tokenization / datasets.map, 2 processes", value, tokenization.MIN_RATIO, ">="))
    if "optimizers" in result:
        value = result["optimizers"]["muon_over_adamw"]
        rows.append(target("held-out loss of Muon / AdamW, 300 steps", value, optimizers.MAX_RATIO, "<="))
    if "peer_memory" in result:
        row = result["peer_memory"]["overhead"]
        for name, key in (("step time", "overhead"), ("CPU seconds", "cpu_share")):
            value = row[key]["median"]
            rows.append(target(f"snapshots in memory, overhead in {name}", value, peer_memory.MAX_OVERHEAD, "<="))
    if "observation" in result:
        for preset, row in result["observation"].items():
            rows.append(target(f"observation / step time, {preset}", row["share"], observation.MAX_SHARE, "<="))
    if "readers" in result:
        name = f"step time with {readers.READERS} readers of its metrics / without"
        rows.append(target(name, result["readers"]["ratio"], readers.MAX_RATIO, "<="))
        peak = result["readers"]["exporter_peak_bytes"]
        rows.append(target("peak memory of the exporter, bytes", peak, readers.MAX_MEMORY, "<="))
    if "checkpoint" in result:
        rows += checkpoint_targets(result["checkpoint"])
    if "manifest" in result:
        for name, row in result["manifest"]["rows"].items():
            rows.append(target(f"manifest, bytes, {name}", row["format_2"]["bytes"], manifest.MAX_ROOT_BYTES, "<="))
    if "weights" in result:
        for operation in ("import", "export"):
            value = result["weights"][operation]["ratio_to_safetensors"]["median"]
            rows.append(target(f"weights, {operation} / safetensors", value, weights.MIN_RATIO, ">="))
    if "sampling" in result:
        for batch in sampling.BATCHES:
            value = result["sampling"][f"batch_{batch}"]["ratio_to_transformers"]["median"]
            rows.append(target(f"sampling, batch {batch} / transformers", value, sampling.MIN_RATIO, ">="))
    if "recovery" in result:
        value = result["recovery"]["ratio_to_cold_start"][recovery.RANK_KILLED]["median"]
        rows.append(
            target(f"recovery, {recovery.RANK_KILLED} / {recovery.COLD_START}", value, recovery.MAX_RATIO, "<=")
        )
    if "traces" in result:
        rows += traces_targets(result["traces"] or {})
    if "object_store" in result:
        for ranks in object_store.ROUNDS:
            row = (result["object_store"] or {}).get("ranks", {}).get(ranks, {})
            for quantity, bound in object_store.TARGETS.items():
                value = row[f"{quantity}_ratio"]["median"] if row else None
                name = f"object store, {quantity} of a save / {object_store.DCP}, ranks {ranks}"
                rows.append(target(name, value, bound, "<="))
    if "rollout_log" in result:
        bounds = {
            rollout_log.PLAIN: rollout_log.MIN_RATIO_TO_PLAIN,
            rollout_log.SQLITE: rollout_log.MIN_RATIO_TO_SQLITE,
        }
        for group, row in result["rollout_log"]["append"].items():
            for peer, bound in bounds.items():
                value = row["ratio_to"][peer]["median"]
                rows.append(target(f"rollout log, appends of {group} records / {peer}", value, bound, ">="))
    if "rl" in result:
        value = result["rl"]["reward"]["ratio_to_trl"]
        rows.append(target("rl, reward after equal wall time / TRL, median of seeds", value, rl.MIN_RATIO, ">="))
        own = result["rl"]["kills"]["meshwright"]
        lost = own["lost"] + own["trained_twice"] + own["rollouts_unaccounted"]
        rows.append(target("rl, rollouts lost or trained twice after ten kills", lost, 0, "<="))
    return rows


def traces_targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    speed, memory, points = (result.get(key) for key in ("min_speedup", "max_memory_ratio", "max_points"))
    return [
        target("traces, times as fast as HolisticTraceAnalysis, slowest trace", speed, traces.MIN_SPEEDUP, ">="),
        target("traces, memory / HolisticTraceAnalysis, largest", memory, traces.MAX_MEMORY, "<="),
        target("traces, largest difference to HolisticTraceAnalysis, points", points, traces.MAX_POINTS, "<="),
    ]


def checkpoint_targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for ranks, row in result["ranks"].items():
        ratios = {"stall of a save": row["stall_ratio_to"], "restore": row["restore_ratio_to"]}
        for operation, by_peer in ratios.items():
            for peer, ratio in by_peer.items():
                name = f"checkpoint, {operation} / {peer}, ranks {ranks}"
                rows.append(target(name, ratio["median"], checkpoint.TARGETS[peer], "<="))
    share = result["digests"]["share"]["median"]
    rows.append(target("checkpoint, share of digests in a save", share, checkpoint.MAX_DIGEST_SHARE, "<="))
    ratio = result["rates"]["save_to_plain"]["median"]
    return [*rows, target("checkpoint, rate of a save / plain write", ratio, checkpoint.MIN_WRITE_RATIO, ">=")]


def target(name: str, value: float | None, bound: float, comparison: str) -> dict[str, Any]:
    met = None if value is None else value >= bound if comparison == ">=" else value <= bound
    return {"name": name, "value": value, "target": f"{comparison} {bound}", "met": met}
