"""A parallelized model is freed once nothing refers to it: a process may train more than once."""

from __future__ import annotations

import gc
import weakref

import pytest

from meshwright.base.topology.unsupported import validate
from meshwright.core.telemetry.step_clock import StepClock
from meshwright.testing import run_ranks
from tests.kit.small_run import small_config
from tests.kit.step_harness import build_loader, build_step

LAYOUTS = {
    "DDP": ["--layout.replicate=2"],
    "FSDP2": ["--layout.replicate=2", "--layout.shard=parameters"],
    "pipeline": ["--layout.replicate=1", "--layout.pipeline=2", "--batch.micro=4"],
}


def is_freed(world, config):
    """Computes the gradients of a step, and returns whether the model is freed afterwards."""
    step, loader = build_step(world, config, validate(config)[0]), build_loader(world, config)
    step.gradient(0, next(loader.steps(0, 1)), StepClock(world.device, world.heartbeat, 0))
    module = weakref.ref(step.parallel_model.module)
    del step, loader
    gc.collect()
    return module() is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_is_freed_with_its_step(layout):
    assert run_ranks(is_freed, 2, small_config(*LAYOUTS[layout], ranks=None)) == [True, True]
