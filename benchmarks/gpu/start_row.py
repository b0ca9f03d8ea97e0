"""The time from the start of a process to its first step, with an empty compile cache and with a full one.

Run as a program (`python -m benchmarks.gpu.start_row MODEL FOLDER`), it starts a run in the folder, and prints the
seconds until it is built and until its first steps are complete.
"""

from __future__ import annotations

import json
import os
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


def measure(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Starts the same run twice in processes of their own."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        cold, warm, again = (start(shape, device, Path(folder)) for _ in range(3))
    return {"cold": cold, "warm": warm, "warm_again": again}


def start(shape: Shape, device: torch.device, folder: Path) -> dict[str, float]:
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    command = [sys.executable, "-m", "benchmarks.gpu.start_row", shape.name, device.type]
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {"process_seconds": round(seconds, 2)} | result


def main(name: str, kind: str) -> None:
    device = torch.device(kind)
    shape = tiny(SHAPES[name]) if kind == "cpu" else SHAPES[name]
    begin = time.perf_counter()
    loop = MeshwrightLoop(shape, device)
    built = time.perf_counter()
    loop.step()
    synchronize(device)
    stepped = time.perf_counter()
    loop.step()
    synchronize(device)
    done = time.perf_counter()
    loop.close()
    times = {
        "build_seconds": built - begin,
        "first_step_seconds": stepped - built,
        "second_step_seconds": done - stepped,
    }
    print(json.dumps({key: round(value, 3) for key, value in times.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
