"""A family that is declared by its spec alone trains on every axis: its gradients are those of one process."""

from __future__ import annotations

import pytest
import torch
from step_harness import build_loader, build_step, count_step_bytes

from meshwright.config import load_config
from meshwright.parallel.local_shard import full_tensor
from meshwright.planner.exact.comm_volume import comm_volume
from meshwright.planner.exact.state_memory import state_memory
from meshwright.telemetry.step_clock import StepClock
from meshwright.testing import run_ranks
from meshwright.topology.unsupported import validate
from meshwright.torch_private import clear_dtensor_cache

GEMMA2 = [
    "--model.family=gemma2",
    "--model.width=16",
    "--model.heads=4",
    "--model.kv_heads=2",
    "--model.ffn=24",
    "--model.vocab=26",
    "--model.layers=4",
    "--model.separator=0",
    "--model.options.head_size=6",
    "--model.options.query_scale=0.01",
    "--model.options.attention_softcap=0.1",
    "--model.options.logit_softcap=0.05",
    "--model.options.window=3",
    "--data.sequence=16",
    "--precision.compute=fp64",
    "--batch.global=8",
    "--batch.micro=1",
]
"""The caps are so low that scores and logits of initial weights reach them."""
LAYOUTS = {
    "DDP": ["--layout.replicate=4"],
    "ZeRO-3": ["--layout.replicate=4", "--layout.shard=parameters", "--activation_checkpoint.mode=selective"],
    "HSDP": ["--layout.replicate=2", "--layout.shard=parameters", "--layout.shard_degree=2"],
    "ZeRO-2 x tensor": ["--layout.replicate=2", "--layout.tensor=2", "--layout.shard=gradients"],
    "context x tensor": ["--layout.context=2", "--layout.tensor=2"],
    "ZeRO-1 x context": ["--layout.replicate=2", "--layout.shard=optimizer", "--layout.context=2"],
    "pipeline x tensor": ["--layout.pipeline=2", "--layout.tensor=2", "--activation_checkpoint.mode=full"],
    "pipeline x context": ["--layout.pipeline=2", "--layout.context=2", "--pipeline.schedule=interleaved"],
}


def family_config(layout, tie):
    return load_config(
        overrides=[*GEMMA2, f"--model.tie={tie}", "--context.method=all-to-all", "--layout.replicate=1", *layout]
    )


def gradients(world, configs):
    """For every config: the gradients of the parameters that this rank has, by name."""
    results = []
    for config in configs:
        clear_dtensor_cache()  # a redistribution of an earlier mesh with the same ranks would be found
        step, loader = build_step(world, config, validate(config)[0]), build_loader(world, config)
        step.gradient(0, next(loader.steps(0, 1)), StepClock(world.device, world.heartbeat, 0))
        named = step.parallel_model.parameters()
        results.append({name: full_tensor(p.grad) for name, p in named.items() if p.grad is not None})
    return results


@pytest.fixture(scope="module")
def found():
    """(tie, layout) -> gradients by name; the layout "" is one process."""
    cases = [(tie, layout) for tie in ("true", "false") for layout in LAYOUTS]
    by_rank = run_ranks(gradients, 4, [family_config(LAYOUTS[layout], tie) for tie, layout in cases])
    merged = {
        case: {name: gradient for rank in by_rank for name, gradient in rank[index].items()}
        for index, case in enumerate(cases)
    }
    [alone] = run_ranks(gradients, 1, [family_config([], tie) for tie in ("true", "false")])
    return merged | {("true", ""): alone[0], ("false", ""): alone[1]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tie", ["true", "false"])
def test_gradients_of_gemma2_are_those_of_one_process(layout, tie, found):
    expected, distributed = found[tie, ""], found[tie, layout]
    assert distributed.keys() == expected.keys()
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
def test_communication_and_memory_of_gemma2_are_predicted_exactly():
    layouts = [options for name, options in LAYOUTS.items() if "pipeline" not in name]
    configs = [family_config(layout, tie) for layout in layouts for tie in ("true", "false")]
    by_rank = run_ranks(counted_bytes, 4, configs)
    for index, config in enumerate(configs):
        layout, batch = validate(config)
        for rank in range(4):
            volumes, memory = by_rank[rank][index]
            assert volumes == comm_volume(config, layout, batch, rank), (str(layout), rank)
            assert memory == state_memory(config, layout, batch, rank), (str(layout), rank)
