"""With bf16 compute, parameters, optimizer state and the reduction of gradients stay in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from meshwright.base.config import LayoutConfig
from meshwright.base.topology.unsupported import validate
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.local_shard import local_tensor
from tests.kit.small_run import load_cpu_config
from tests.kit.step_harness import build_loader, build_step

MODEL = ["--model.layers=1", "--model.width=16", "--model.heads=2", "--model.kv_heads=2", "--model.ffn=18"]
MODEL += ["--model.vocab=26", "--data.sequence=16", "--batch.global=4", "--batch.micro=2", "--precision.compute=bf16"]
MODEL += ["--optimizer.eps=1e-4", "--optimizer.clip=0.1"]
REPLICATE = ["--layout.replicate=2"]
LAYOUTS = {
    "replicate": REPLICATE,
    "shard": [*REPLICATE, "--layout.shard=parameters"],
    "tensor": ["--layout.replicate=1", "--layout.tensor=2"],
}
LEARNING_RATE = 0.05
TOLERANCE = 1e-3
"""bf16 has 8 significant bits: a product has an error of at most 2e-3, a mean over tokens less. A step changes the loss
by 1e-2."""


def train_in_bf16(world, config):
    """Returns the losses, the dtypes of parameters and optimizer, and the dtypes in which gradients are reduced."""
    reduced: set[torch.dtype] = set()
    # The names differ between the versions of torch.
    for name in {"reduce_scatter_single", "reduce_scatter_tensor", "all_reduce"} & set(dir(dist)):
        record_dtypes(name, reduced)
    step = build_step(world, config, validate(config)[0])
    batches = build_loader(world, config).steps(0, 3)
    stored = {p.dtype for p in step.parallel_model.module.parameters()}
    stored |= {local_tensor(p).dtype for p in step.optimizer.local_parameters}
    losses = [float(step.run(number, LEARNING_RATE, batches).numbers[0]) for number in range(3)]
    return losses, stored, reduced


def record_dtypes(name, reduced):
    right = getattr(dist, name)

    def recording(*args, **options):
        output = args[0] if args else options["output"]
        if output.is_floating_point():
            reduced.add(output.dtype)
        return right(*args, **options)

    setattr(dist, name, recording)


@pytest.fixture(scope="module")
def single_process_losses():
    config = replace(load_cpu_config(overrides=[*MODEL, *REPLICATE]), layout=LayoutConfig(replicate=1))
    [(losses, _, _)] = run_ranks(train_in_bf16, 1, config)
    return losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_stays_close_to_single_process_and_reduces_gradients_in_float32(layout, single_process_losses):
    config = load_cpu_config(overrides=[*MODEL, *LAYOUTS[layout]])
    for losses, stored, reduced in run_ranks(train_in_bf16, 2, config):
        assert losses == pytest.approx(single_process_losses, rel=TOLERANCE)
        assert stored == {torch.float32}
        assert torch.float32 in reduced
        assert reduced <= {torch.float32, torch.float64}  # the square of the norm is summed in float64


def test_bf16_compress_hook_reduces_gradients_in_bf16():
    """Shows that the test above records the dtype of the gradients."""
    config = load_cpu_config(overrides=[*MODEL, *REPLICATE, "--ddp.comm_hook=bf16_compress"])
    results = run_ranks(train_in_bf16, 2, config)
    assert all(torch.bfloat16 in reduced for _, _, reduced in results)
