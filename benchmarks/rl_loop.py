"""One run of examples/rl.toml for the benchmark `rl`, in a process of its own: python -m benchmarks.rl_loop SPEC.

SPEC is JSON: `folder` of the run, `overrides` of its settings, and its `steps`, or `seconds` after which it stops.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import meshwright
from benchmarks.rl_records import load_run_config

MAX_STEPS = 10_000


class StopAfter(meshwright.Callback):
    """Stops a run some seconds after its first attempt has started."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began = seconds, 0.0

    def on_start(self, _record: dict[str, Any], _run: Any) -> None:
        self.began = time.monotonic()

    def on_step(self, _record: dict[str, Any], run: Any) -> None:
        if time.monotonic() - self.began > self.seconds:
            run.stop("the time of the benchmark is over")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", help="what the process does, as JSON")
    spec = json.loads(parser.parse_args().spec)
    config = load_run_config([*spec["overrides"], f"--steps={spec.get('steps') or MAX_STEPS}"])
    seconds = spec.get("seconds")
    callbacks = [StopAfter(seconds)] if seconds else []
    result = meshwright.train(config, run=spec["folder"], callbacks=callbacks, quiet=True)
    print(json.dumps({"digest": result.digest, "steps": result.steps}))


if __name__ == "__main__":
    main()
