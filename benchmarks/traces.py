"""Diagnosis of profiler traces next to HolisticTraceAnalysis: the same figures, the time and the peak memory.

The folder of traces is given by the environment variable TRACES. Each tool reads each trace in a process of its own, in
turns; HTA_PYTHON names an interpreter that has HolisticTraceAnalysis, if this one does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROUNDS = 3
MIN_SPEEDUP, MAX_MEMORY, MAX_POINTS = 10.0, 0.25, 1.0
"""Targets on every trace: times as fast as HolisticTraceAnalysis, share of its memory, and difference of shares."""
TIMEOUT = 600

PREAMBLE = "import json, sys, time; begun = time.perf_counter()\n"
EPILOGUE = """
now = time.perf_counter()
# ru_maxrss would include the memory of the parent before exec
peak = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"figures": figures, "seconds": now - imported, "with_imports": now - begun, "peak_bytes": peak}))
"""
OURS = """
from pathlib import Path
from meshwright.insight.diagnose.trace.diagnose import diagnose_traces
imported = time.perf_counter()
diagnosis = diagnose_traces([Path(sys.argv[1])])
parts = diagnosis.ranks[0].breakdown
figures = {
    "idle": 100 * parts.share(parts.idle),
    "compute": 100 * parts.share(parts.compute),
    "not compute": 100 * parts.share(parts.exposed + parts.memory),
    "overlap": 100 * parts.overlap if parts.communication else None,
}
"""
HTA = """
import logging, math, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
imported = time.perf_counter()
analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
times = analysis.get_temporal_breakdown(visualize=False).iloc[0]
overlap = float(analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].iloc[0])
analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
figures = {
    "idle": float(times["idle_time_pctg"]),
    "compute": float(times["compute_time_pctg"]),
    "not compute": float(times["non_compute_time_pctg"]),
    "overlap": None if math.isnan(overlap) else overlap,
}
"""


def measure() -> dict[str, Any] | None:
    """Measures every trace in the folder TRACES; None if there is no folder or no HolisticTraceAnalysis."""
    folder = os.environ.get("TRACES", "")
    traces = sorted(Path(folder).glob("*.json*")) if folder else []
    peer = os.environ.get("HTA_PYTHON", sys.executable)
    if not traces or subprocess.run([peer, "-c", "import hta"], capture_output=True, timeout=TIMEOUT).returncode:
        print(
            "traces: not measured; TRACES names a folder of traces, HolisticTraceAnalysis is the peer", file=sys.stderr
        )
        return None
    rows = {}
    for trace in traces:
        print(f"traces: {trace.name}", file=sys.stderr, flush=True)
        rows[trace.name] = compare(trace, peer)
    return {
        "traces": rows,
        "min_speedup": min(row["speedup"] for row in rows.values()),
        "max_memory_ratio": max(row["memory_ratio"] for row in rows.values()),
        "max_points": max(row["max_points"] for row in rows.values()),
    }


def compare(trace: Path, peer: str) -> dict[str, Any]:
    """Both tools on one trace, in turns."""
    runs: dict[str, list[dict[str, Any]]] = {"meshwright": [], "hta": []}
    for _ in range(ROUNDS):
        runs["hta"].append(run(peer, HTA, trace))
        runs["meshwright"].append(run(sys.executable, OURS, trace))
    ours, hta = best(runs["meshwright"]), best(runs["hta"])
    figures, expected = runs["meshwright"][0]["figures"], runs["hta"][0]["figures"]
    known = [name for name in expected if expected[name] is not None]
    return {
        "figures": {"meshwright": rounded(figures), "hta": rounded(expected)},
        "max_points": round(max(abs(figures[name] - expected[name]) for name in known), 2),
        "seconds": {"meshwright": round(ours["seconds"], 3), "hta": round(hta["seconds"], 3)},
        "speedup": round(hta["seconds"] / ours["seconds"], 1),
        "speedup_with_imports": round(hta["with_imports"] / ours["with_imports"], 1),
        "peak_bytes": {"meshwright": int(ours["peak_bytes"]), "hta": int(hta["peak_bytes"])},
        "memory_ratio": round(ours["peak_bytes"] / hta["peak_bytes"], 3),
    }


def best(results: list[dict[str, Any]]) -> dict[str, float]:
    """The shortest time, which other processes disturb least, and the largest memory."""
    times = {key: min(result[key] for result in results) for key in ("seconds", "with_imports")}
    return times | {"peak_bytes": max(result["peak_bytes"] for result in results)}


def rounded(figures: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 2) for name, value in figures.items()}


def run(interpreter: str, script: str, trace: Path) -> dict[str, Any]:
    """Runs one tool in a process of its own and returns what it prints last."""
    command = [interpreter, "-c", PREAMBLE + script + EPILOGUE, str(trace)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result
