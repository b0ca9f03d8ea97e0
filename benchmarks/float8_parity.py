"""Loss parity of float8: the losses of float8 runs against the spread of bf16 runs with the same seeds, on real text.

    python -m benchmarks.float8_parity [--steps N] [--seeds N] [--float8-seeds N] [--lr LR] [--small]

The text is the source code of the Python standard library, whose bytes are the tokens. The final loss of a run is the
mean over its last 20 steps. One JSON object goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from meshwright.base.config import load_config
from meshwright.base.records.heartbeat import Heartbeat
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.launch.job import make_job
from meshwright.core.parallel.world import World
from meshwright.core.trainer.loop import Training

LAST_STEPS = 20
SETTINGS = (
    "precision.compute=bf16",
    "data.kind=stdlib",
    "eval.every=0",
    "eval.holdout=0",
    "checkpoint.mode=off",
    "model.family=llama",
    "model.vocab=256",
    "schedule.warmup=30",
)
MODEL = ("model.width=768", "model.layers=12", "model.heads=12", "model.kv_heads=4", "model.ffn=2048")
"""About 83 million parameters."""
SMALL_MODEL = ("model.width=64", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.ffn=128")
BATCH = ("batch.global=16", "data.sequence=1024")
ON_CUDA = ("compile.scope=block", "kernels.attention=cudnn")
"""Nothing is measured before the first step."""
SMALL_BATCH = ("batch.global=4", "data.sequence=64")


def parity(
    steps: int = 300,
    seeds: Sequence[int] = (0, 1, 2),
    float8_seeds: Sequence[int] = (0, 1, 2),
    small: bool = False,
    lr: float = 1e-3,
) -> dict[str, Any]:
    """The final losses of both precisions, and whether the mean of float8 is inside the spread of bf16."""
    finals: dict[str, dict[int, float]] = {"float8": {}, "bf16": {}}
    for name, of_precision in (("float8", float8_seeds), ("bf16", seeds)):
        for seed in of_precision:
            start = time.monotonic()
            losses = train_losses(steps, seed, name == "float8", small, lr)
            finals[name][seed] = final = round(fmean(losses[-LAST_STEPS:]), 5)
            print(f"{name} seed {seed}: final loss {final:.5f} ({time.monotonic() - start:.1f} s)", file=sys.stderr)
    bf16, float8 = finals["bf16"], finals["float8"]
    lowest, highest, mean = min(bf16.values()), max(bf16.values()), round(fmean(float8.values()), 5)
    return {
        "steps": steps,
        "lr": lr,
        "final_losses": finals,
        "bf16_spread": [lowest, highest],
        "float8_mean": mean,
        "inside": lowest <= mean <= highest,
        "differences_of_seeds": {seed: round(float8[seed] - bf16[seed], 5) for seed in float8 if seed in bf16},
    }


def train_losses(steps: int, seed: int, float8: bool, small: bool, lr: float) -> list[float]:
    """The loss of every step of one run through the trainer."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (*SMALL_MODEL, *SMALL_BATCH) if small else (*MODEL, *BATCH)
    own = (f"steps={steps}", f"seed={seed}", f"precision.float8={str(float8).lower()}", f"optimizer.lr={lr}")
    chosen = ON_CUDA if device.type == "cuda" else ()
    config = load_config(overrides=[*SETTINGS, *shape, *own, f"launch.device={device.type}", *chosen], ranks=1)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        (run := Path(folder, "run")).mkdir()
        job = make_job(config, RunFolder(run))
        training = Training(job, World(device=device, heartbeat=Heartbeat(Path(folder, "heartbeat"))))
        for _ in range(steps):
            training.run_step()
        training.recorder.flush()
        training.signals.close()
        training.saver.close()
        training.log.close()
        training.spans.close()
        records = map(json.loads, job.folder.events(0).read_text().splitlines())
        return [record["loss"] for record in records if record["kind"] == "step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3, help="runs in bf16")
    parser.add_argument("--float8-seeds", type=int, default=3, help="runs in float8, with the first of these seeds")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--small", action="store_true", help="a model and a batch for a CPU")
    args = parser.parse_args()
    print(json.dumps(parity(args.steps, range(args.seeds), range(args.float8_seeds), args.small, args.lr)))


if __name__ == "__main__":
    main()
