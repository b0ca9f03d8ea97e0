"""Low-rank factors on every axis: their gradients are those of one process, and nothing else has a gradient."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from meshwright.base.topology.unsupported import validate
from meshwright.core.models.init import init_matrix_shard
from meshwright.core.parallel.local_shard import full_tensor, local_shard
from meshwright.core.telemetry.step_clock import StepClock
from meshwright.core.torch_private import clear_dtensor_cache
from meshwright.planner.cost.comm_volume import comm_volume
from meshwright.planner.cost.peak_memory import state_memory
from meshwright.testing import run_ranks
from tests.kit.small_run import load_cpu_config
from tests.kit.step_harness import build_loader, build_step, count_step_bytes

SMALL = [
    "--model.width=16",
    "--model.heads=4",
    "--model.kv_heads=2",
    "--model.ffn=24",
    "--model.vocab=26",
    "--model.layers=4",
    "--model.separator=0",
    "--data.sequence=16",
    "--precision.compute=fp64",
    "--batch.global=8",
    "--batch.micro=1",
    "--lora.rank=3",
    "--layout.replicate=1",
]
DENSE = ["--lora.targets=*.attention.*,*.ffn.*"]
EXPERTS = [
    "--model.experts=4",
    "--model.experts_active=2",
    "--model.experts_shared=1",
    "--lora.targets=*.attention.*,*.ffn.shared.*",
]
LAYOUTS = {
    "DDP": [*DENSE, "--layout.replicate=4"],
    "ZeRO-3": [*DENSE, "--layout.replicate=4", "--layout.shard=parameters", "--activation_checkpoint.mode=selective"],
    "HSDP": [*DENSE, "--layout.replicate=2", "--layout.shard=parameters", "--layout.shard_degree=2"],
    "ZeRO-2 x tensor": [*DENSE, "--layout.replicate=2", "--layout.tensor=2", "--layout.shard=gradients"],
    "context x tensor": [*DENSE, "--layout.context=2", "--layout.tensor=2", "--activation_checkpoint.mode=full"],
    "ZeRO-1 x context": [*DENSE, "--layout.replicate=2", "--layout.shard=optimizer", "--layout.context=2"],
    "pipeline x tensor": [*DENSE, "--layout.pipeline=2", "--layout.tensor=2", "--activation_checkpoint.mode=full"],
    "pipeline x ZeRO-1": [
        *DENSE,
        "--layout.pipeline=2",
        "--layout.replicate=2",
        "--layout.shard=optimizer",
        "--pipeline.schedule=interleaved",
        "--model.tie=true",
    ],
    "expert x ZeRO-3": [*EXPERTS, "--layout.replicate=4", "--layout.shard=parameters", "--layout.expert=2"],
    "expert x tensor": [*EXPERTS, "--layout.replicate=2", "--layout.tensor=2", "--layout.expert=2"],
}

LONG = {"ZeRO-2 x tensor", "ZeRO-1 x context", "pipeline x tensor", "expert x ZeRO-3"}
"""Layouts of `make test-all` alone; the others use every axis, DDP, FSDP2 and hybrid sharding."""


def lora_config(options):
    return load_cpu_config(overrides=[*SMALL, *options])


def one_process(options):
    """The same model on one rank."""
    return lora_config([option for option in options if not option.startswith(("--layout.", "--pipeline."))])


def gradients(world, configs):
    """For every config: the gradients of the parameters that this rank has, by name. B is random instead of zero, which
    would make every gradient of A zero.
    """
    results = []
    for config in configs:
        clear_dtensor_cache()  # a redistribution of an earlier mesh with the same ranks would be found
        step, loader = build_step(world, config, validate(config)[0]), build_loader(world, config)
        named = step.parallel_model.parameters()
        for name, parameter in named.items():
            if name.endswith("lora_b"):
                shard = local_shard(parameter)
                init_matrix_shard(shard.local, name, shard.shape, shard.offset, 0.1, seed=1)
        step.gradient(0, next(loader.steps(0, 1)), StepClock(world.device, world.heartbeat, 0))
        results.append({name: full_tensor(p.grad) for name, p in named.items() if p.grad is not None})
    return results


@cache
def found(long: bool):
    """Layout -> (gradients by name, those of one process), of all quick or all long layouts from one launch."""
    chosen = {layout: options for layout, options in LAYOUTS.items() if (layout in LONG) == long}
    by_rank = run_ranks(gradients, 4, [lora_config(options) for options in chosen.values()])
    [alone] = run_ranks(gradients, 1, [one_process(options) for options in chosen.values()])
    return {
        layout: ({name: gradient for rank in by_rank for name, gradient in rank[index].items()}, alone[index])
        for index, layout in enumerate(chosen)
    }


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=pytest.mark.long) if layout in LONG else layout for layout in LAYOUTS]
)
def test_gradients_of_factors_are_those_of_one_process(layout):
    distributed, expected = found(layout in LONG)[layout]
    assert distributed.keys() == expected.keys()
    assert all(name.endswith(("lora_a", "lora_b")) for name in expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(distributed[name], gradient, rtol=1e-10, atol=1e-14, msg=name)
        assert gradient.abs().max() > 1e-8


def counted_bytes(world, configs):
    counted = []
    for config in configs:
        clear_dtensor_cache()
        counted.append(count_step_bytes(world, config))
    return counted


@pytest.mark.long
def test_communication_and_memory_of_factors_are_predicted_exactly():
    configs = [lora_config(options) for layout, options in LAYOUTS.items() if "expert" not in layout]
    by_rank = run_ranks(counted_bytes, 4, configs)
    for index, config in enumerate(configs):
        layout, batch = validate(config)
        for rank in range(4):
            volumes, memory = by_rank[rank][index]
            assert volumes == comm_volume(config, layout, batch, rank), (str(layout), rank)
            assert memory == state_memory(config, layout, batch, rank), (str(layout), rank)
