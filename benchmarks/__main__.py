"""`python -m benchmarks` runs the benchmarks of this machine, and `python -m benchmarks gpu` those of a CUDA device."""

from __future__ import annotations

import sys


def main() -> None:
    """Imports only what runs: the two need different packages of others."""
    if sys.argv[1:2] == ["gpu"]:
        from benchmarks.gpu.command import main as gpu

        return gpu(sys.argv[2:])
    from benchmarks.suite import main as suite

    suite(sys.argv[1:])


if __name__ == "__main__":
    main()
