"""`python -m benchmarks` runs the benchmarks of this machine, and `python -m benchmarks gpu` those of a CUDA device.

The result is one JSON object on standard output and in bench.json; progress is on standard error.
"""

from __future__ import annotations

import argparse
import sys

BENCHMARKS = (
    "throughput",
    "transformers",
    "layouts",
    "zero",
    "pipeline",
    "sampler",
    "tokenization",
    "checkpoint",
    "manifest",
    "optimizers",
    "observation",
    "readers",
    "weights",
    "sampling",
    "recovery",
    "scale",
    "setups",
    "peer_memory",
    "traces",
    "object_store",
    "rollout_log",
    "rl",
)


def main() -> None:
    """Imports only what runs: the two need different packages of others, and `--help` needs none."""
    if sys.argv[1:2] == ["gpu"]:
        from benchmarks.gpu.command import main as gpu

        return gpu(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=BENCHMARKS, nargs="+", default=BENCHMARKS)
    parser.add_argument(
        "--rounds", type=int, default=120, help="rounds of the throughput benchmarks, each with one step of every loop"
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: expected at least 1")
    from benchmarks.suite import main as suite

    suite(args)


if __name__ == "__main__":
    main()
