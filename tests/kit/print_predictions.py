"""Prints predictions of models of transformers and of a CNN beside counts: python tests/kit/print_predictions.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "models"))

from meshwright.core.launch.ranks import run_ranks
from meshwright.core.trainer.records.trace_custom_model import trace_workload
from meshwright.planner.calibration.run_prediction import UNKNOWN_HOST
from meshwright.planner.cost.peak_memory import estimate_memory
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.prover.simulator.simulate import simulate
from tests.core.models.test_trace import SAMPLES, counted_flops
from tests.kit.predicted_models import MODELS, config_for, count_real_step, custom_model, sources

LAYOUTS = {"DDP": {}, "ZeRO-3": {"shard": "parameters"}, "pipeline": {"replicate": 1, "pipeline": 2, "accumulation": 2}}


def count_peaks(world, cases):
    return [count_real_step(world, config_for(**LAYOUTS[layout]), name)[3] for name, layout in cases]


def main() -> None:
    cases = [(name, layout) for name in MODELS for layout in LAYOUTS if (name, layout) != ("CNN", "pipeline")]
    peaks = dict(zip(cases, run_ranks(count_peaks, 2, cases, timeout=600.0)[0], strict=True))
    print("| model | parameters | FLOPs per sample | error | layout | peak memory | simulate | plan |")
    print("|---|---|---|---|---|---|---|---|")
    for name, layout in cases:
        config, custom = config_for(**LAYOUTS[layout]), custom_model(name)
        traced = trace_workload(custom, config, sources(name))
        spec, peak = traced.spec, peaks[name, layout]
        costs = [spec.before_cost, *(block.cost for block in spec.blocks), spec.after_cost]
        flops = sum(cost.flops.of(SAMPLES) + cost.backward_flops.of(SAMPLES) for cost in costs)
        simulated = simulate(config, [0], custom, sources(name)).results[0].peak_total
        planned = estimate_memory(PlannedJob.from_config(config, UNKNOWN_HOST, traced=traced))[0].tensors
        print(
            f"| {name} | {traced.parameters:,} | {flops / SAMPLES / 1e6:.1f} M | "
            f"{flops / sum(counted_flops(name)) - 1:+.2%} | {layout} | {peak:,} | {simulated / peak - 1:+.2%} | "
            f"{planned / peak - 1:+.2%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
