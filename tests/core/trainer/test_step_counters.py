"""A counted step runs the same compiled code as any other, and counts what the eager step counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from meshwright.base.config import RunConfig
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.records.memory_classes import TENSOR_CLASSES
from meshwright.base.topology.unsupported import validate
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.local_shard import local_tensor
from meshwright.core.parallel.world import World
from meshwright.core.telemetry.comm_counter import CollectiveTotal
from meshwright.core.trainer.records.step_counters import StepCounters, count_step
from tests.kit.small_run import small_config
from tests.kit.step_harness import LR, build_loader, build_step

LAYOUTS = {
    "shard": ["--layout.replicate=2", "--layout.shard=parameters"],
    "tensor": ["--layout.replicate=1", "--layout.tensor=2"],
}
STATE = ("parameter", "gradient", "optimizer")
CALLS: list[str] = []
"""One entry per call of a compiled graph."""


def recording_backend(module: fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
    """A compiler that runs the graph as it is and records the call."""

    def run(*args: Any) -> Any:
        CALLS.append("graph")
        return module.forward(*args)

    return run


def train_three_steps(world: World, config: RunConfig, counted: bool) -> tuple[StepCounters | None, list[Tensor], int]:
    """The counters of the third step, the parameters after it, and how often it called compiled graphs."""
    torch.compiler.reset()
    layout, _ = validate(config)
    step, loader = build_step(world, config, layout), build_loader(world, config)
    step.warmup_backward(loader.first)
    batches = loader.steps(0, 3)
    for number in range(2):
        step.run(number, LR, batches)
    CALLS.clear()
    counters: StepCounters | None = None
    if counted:
        with count_step(step.parallel_model, step.optimizer, compiled=bool(config.compile.enabled)) as counters:
            step.run(2, LR, batches, counters.enter)
    else:
        step.run(2, LR, batches)
    parameters = [local_tensor(p).detach().clone() for p in step.parallel_model.module.parameters()]
    return counters, parameters, len(CALLS)


Counted = tuple[list[CollectiveTotal], dict[str, int]]


def compare_compiled_with_eager(
    world: World, configs: list[RunConfig]
) -> list[tuple[Counted, Counted, int, int, list[bool]]]:
    compile_ = torch.compile
    torch.compile = lambda function, **_options: compile_(function, backend=recording_backend)  # type: ignore[assignment,misc]
    results = []
    for config in configs:
        without = replace(config, compile=replace(config.compile, enabled=False))
        eager, expected, _ = train_three_steps(world, without, True)
        compiled, after, calls = train_three_steps(world, config, True)
        _, uncounted, uncounted_calls = train_three_steps(world, config, False)
        assert eager is not None
        assert compiled is not None
        equal = [all(torch.equal(a, b) for a, b in zip(after, others, strict=True)) for others in (uncounted, expected)]
        summaries = [(c.rows(), {name: c.memory.peak[name] for name in STATE}) for c in (eager, compiled)]
        results.append((*summaries, calls, uncounted_calls, equal))
    return results


def test_counted_step_runs_compiled_code_and_counts_what_the_eager_step_counts():
    configs = [
        with_device_defaults(small_config("--compile.enabled=true", *options, ranks=None), "cpu")
        for options in LAYOUTS.values()
    ]
    for of_rank in run_ranks(compare_compiled_with_eager, 2, configs):
        for name, (eager, compiled, calls, uncounted_calls, equal) in zip(LAYOUTS, of_rank, strict=True):
            assert eager == compiled, name
            assert calls == uncounted_calls > 0, name
            assert equal[0], f"{name}: counting changed the bits of a compiled step"
            assert equal[1], f"{name}: the graphs of blocks, run as they are, changed the bits of the parameters"


class FakeTracker:
    """What a tracker has seen."""

    peak = at_peak = dict.fromkeys(TENSOR_CLASSES, 10)
    peak_total = 70
    current_bytes = dict.fromkeys(TENSOR_CLASSES, 1)


class FakeCommCounter:
    def rows(self) -> list[CollectiveTotal]:
        return []


@pytest.mark.parametrize(("device", "allocated", "unseen"), [("cuda", 100, 30), ("cuda", 60, 0), ("cpu", 0, 0)])
def test_what_compiled_code_allocates_counts_as_activations(device, allocated, unseen):
    counters = StepCounters(FakeTracker(), FakeCommCounter(), torch.device(device), True, allocated)  # type: ignore[arg-type]
    memory = counters.to_json()["memory"]
    assert memory["peak_total"] == counters.peak_total == 70 + unseen == sum(memory["at_peak"].values())
    assert memory["at_peak"]["activation"] == memory["peak"]["activation"] == 10 + unseen
    assert ("excluded" in memory) == (device == "cpu")
