"""The time from the start of a process to its first step, with an empty compile cache and with a full one.

Run as a program (`python -m benchmarks.gpu.start_row MODEL DEVICE KILL`), it starts a run and prints the seconds until
it is built and its first step is complete; with KILL = 1 it then ends by SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.meshwright_contender import MeshwrightLoop
from benchmarks.gpu.shapes import SHAPES, Shape, tiny
from benchmarks.gpu.timing import synchronize

TIMEOUT = 300.0
MAX_RESTART_RATIO = 1.2
CHOSEN = {"cuda": ("kernels.attention=cudnn", "compile.scope=block"), "cpu": ()}
"""What a run has measured at its start, and a restart reads from its folder."""


def measure(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Starts the same run in processes of their own: with an empty cache, killed after its first step; again, as after
    that crash; and once more, with a cache that is surely complete.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        cold, restarted, warm = (start(shape, device, Path(folder), kill) for kill in (True, False, False))
    ratio = round(until_first_step(restarted) / until_first_step(warm), 3)
    return {
        "cold": cold,
        "restarted": restarted,
        "warm": warm,
        "restart_ratio": ratio,
        "targets": [
            {
                "quantity": "first step after kill -9 / warm",
                "target": f"<= {MAX_RESTART_RATIO:g}",
                "value": ratio,
                "met": ratio <= MAX_RESTART_RATIO,
            }
        ],
    }


def until_first_step(times: dict[str, float]) -> float:
    return times["build_seconds"] + times["first_step_seconds"]


def start(shape: Shape, device: torch.device, folder: Path, kill: bool) -> dict[str, float]:
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    command = [sys.executable, "-m", "benchmarks.gpu.start_row", shape.name, device.type, str(int(kill))]
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    seconds = time.perf_counter() - begin
    if done.returncode != (-signal.SIGKILL if kill else 0):
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {"process_seconds": round(seconds, 2)} | result


def main(name: str, kind: str, kill: str) -> None:
    device = torch.device(kind)
    shape = tiny(SHAPES[name]) if kind == "cpu" else SHAPES[name]
    begin = time.perf_counter()
    loop = MeshwrightLoop(shape, device, CHOSEN[kind])
    built = time.perf_counter()
    loop.step()
    synchronize(device)
    times = {"build_seconds": built - begin, "first_step_seconds": time.perf_counter() - built}
    print(json.dumps({key: round(value, 3) for key, value in times.items()}), flush=True)
    if int(kill):
        os.kill(os.getpid(), signal.SIGKILL)
    loop.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.start_row", description=__doc__)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("kind", choices=("cpu", "cuda"))
    parser.add_argument("kill", choices=("0", "1"), help="whether the process kills itself after the step")
    main(**vars(parser.parse_args()))
