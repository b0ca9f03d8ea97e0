"""Pipelines on real ranks: micro-batches in flight, activation memory, deferred weight gradients and names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.base.topology.schedule_timeline import build_timeline
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.base.topology.unsupported import validate
from meshwright.core.parallel.pipeline_parallel.pipeline_model import TrackedStage
from meshwright.core.telemetry.step_clock import StepClock
from meshwright.testing import run_ranks
from tests.kit.small_run import load_cpu_config
from tests.kit.step_harness import LR, build_loader, build_step, count_third_step

SMALL = ["--model.width=16", "--model.heads=2", "--model.kv_heads=2", "--model.ffn=18", "--model.vocab=26"]
SMALL += ["--data.sequence=16", "--layout.replicate=1", "--precision.compute=fp64"]


def pipeline_config(schedule, ranks, micro_batches, *more):
    overrides = [
        f"--layout.pipeline={ranks}",
        f"--pipeline.schedule={schedule}",
        f"--batch.global={micro_batches}",
        "--batch.micro=1",
    ]
    return load_cpu_config(
        overrides=[*SMALL, f"--model.layers={ranks * SCHEDULES[schedule].default_stages}", *overrides, *more]
    )


def build_step_and_loader(world, config):
    return build_step(world, config, validate(config)[0]), build_loader(world, config)


def in_flight_peaks(world, configs):
    """For every config: peak micro-batches in flight by stage and in total, and seconds by phase."""
    results = []
    for config in configs:
        step, loader = build_step_and_loader(world, config)
        outcome = step.run(0, LR, loader.steps(0, 1))
        results.append((dict(outcome.in_flight.peak), outcome.in_flight.peak_total, outcome.clock.seconds()))
    return results


CASES = [(schedule, micro_batches) for schedule in SCHEDULES for micro_batches in (4, 8)]


def test_micro_batches_in_flight_equal_the_schedule_timeline():
    ranks = 2
    results = run_ranks(
        in_flight_peaks, ranks, [pipeline_config(schedule, ranks, micro_batches) for schedule, micro_batches in CASES]
    )
    for index, (schedule, micro_batches) in enumerate(CASES):
        expected = build_timeline(schedule, ranks, micro_batches)
        for rank in range(ranks):
            stage_peaks, rank_peak, phases = results[rank][index]
            assert stage_peaks == expected.stage_peaks[rank], (schedule, micro_batches, rank)
            assert rank_peak == expected.rank_peaks[rank], (schedule, micro_batches, rank)
            assert phases["forward"] > 0
            assert phases["backward"] > 0
            assert phases["sync"] > 0


def test_1f1b_keeps_fewer_micro_batches_in_flight_than_gpipe():
    ranks, micro_batches = 4, 6
    results = run_ranks(
        in_flight_peaks, ranks, [pipeline_config(schedule, ranks, micro_batches) for schedule in ("gpipe", "1f1b")]
    )
    assert [results[rank][0][0][rank] for rank in range(ranks)] == [micro_batches] * ranks
    assert [results[rank][1][0][rank] for rank in range(ranks)] == [
        min(ranks - rank, micro_batches) for rank in range(ranks)
    ]


def activations(world, configs):
    return [count_third_step(world, config).memory.peak["activation"] for config in configs]


def test_first_stage_of_1f1b_has_the_activation_memory_of_no_pipeline():
    """It has 1/P of the blocks and P micro-batches in flight."""
    ranks, micro_batches, layers = 2, 4, 8
    small_model = ["--model.vocab=8", f"--model.layers={layers}", "--model.width=32", "--model.ffn=64"]
    configs = [pipeline_config(schedule, ranks, micro_batches, *small_model) for schedule in ("1f1b", "gpipe")]
    unpipelined = replace(configs[0], layout=replace(configs[0].layout, pipeline=1))
    [[without_pipeline]] = run_ranks(activations, 1, [unpipelined])
    first, last = run_ranks(activations, ranks, configs)
    print(f"no pipeline {without_pipeline}, 1f1b {first[0]} and {last[0]}, gpipe {first[1]} and {last[1]}")
    assert first[0] == pytest.approx(without_pipeline, rel=0.15)
    assert last[0] == pytest.approx(without_pipeline / ranks, rel=0.15)
    assert first[1] > 1.8 * first[0]


class WeightGradientSpy:
    """Records which weights of a later stage have a gradient after its first I, and after the W that follows."""

    def __init__(self):
        self.recorded = []
        self.originals = TrackedStage.backward_one_chunk, TrackedStage.backward_weight_one_chunk

    def record(self, stage, index_of_record):
        if stage.stage_index and len(self.recorded) == index_of_record:
            self.recorded.append([p.grad is not None for p in stage.submod.parameters()])

    def __enter__(self):
        backward, weight = self.originals

        def spied_backward(stage, *args, **kwargs):
            backward(stage, *args, **kwargs)
            if not kwargs.get("full_backward", True):
                self.record(stage, 0)

        def spied_weight(stage, *args, **kwargs):
            weight(stage, *args, **kwargs)
            self.record(stage, 1)

        TrackedStage.backward_one_chunk, TrackedStage.backward_weight_one_chunk = spied_backward, spied_weight
        return self.recorded

    def __exit__(self, *_):
        TrackedStage.backward_one_chunk, TrackedStage.backward_weight_one_chunk = self.originals


def record_weight_gradients(world, configs):
    results = []
    for config in configs:
        step, loader = build_step_and_loader(world, config)
        with WeightGradientSpy() as recorded:
            step.gradient(0, next(loader.steps(0, 1)), StepClock(world.device))
        results.append(recorded)
    return results


def test_zero_bubble_schedules_defer_weight_gradients():
    kinds = ("zero-bubble", "zbv")
    configs = [pipeline_config(schedule, 2, 4) for schedule in kinds]
    for results in run_ranks(record_weight_gradients, 2, configs):
        for after_input, after_weight in results:
            assert not any(after_input)
            assert all(after_weight)


def names(world, configs):
    return [list(build_step(world, config, validate(config)[0]).parallel_model.parameters()) for config in configs]


def test_pipeline_stages_have_every_parameter_once_under_its_full_name():
    from meshwright.core.models.init import build_model

    configs = [
        pipeline_config(schedule, 2, 4, f"--model.tie={tie}") for schedule in SCHEDULES for tie in ("false", "true")
    ]
    results = run_ranks(names, 2, configs)
    for index, config in enumerate(configs):
        names_of_ranks = [name for rank in results for name in rank[index]]
        assert sorted(names_of_ranks) == sorted(name for name, _ in build_model(config.model, 0).named_parameters())
