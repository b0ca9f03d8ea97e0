"""Packed samples bring their documents: the gradients of every layout are those of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.base.config import IGNORE_INDEX, DataConfig
from meshwright.base.topology.unsupported import validate
from meshwright.core.data.loader import Loader
from meshwright.core.data.source import ConcatenatedSource
from meshwright.core.data.stream import Stream
from meshwright.core.parallel.local_shard import full_tensor
from meshwright.core.telemetry.step_clock import StepClock
from meshwright.core.torch_private import clear_dtensor_cache
from meshwright.testing import run_ranks
from tests.kit.small_run import load_cpu_config
from tests.kit.step_harness import build_step

SMALL = [
    "--model.width=16",
    "--model.heads=4",
    "--model.ffn=24",
    "--model.vocab=26",
    "--model.layers=2",
    "--data.sequence=16",
    "--precision.compute=fp64",
    "--batch.global=4",
    "--batch.micro=1",
    "--layout.replicate=1",
]
LAYOUTS = {
    "context": ["--layout.context=2"],
    "all-to-all": ["--layout.context=2", "--context.method=all-to-all"],
    "pipeline": ["--layout.pipeline=2"],
    "tensor": ["--layout.tensor=2"],
    "ZeRO-3": ["--layout.replicate=2", "--layout.shard=parameters"],
}


class PackedSource:
    """Random samples of three documents, some of whose labels do not count."""

    name, packed = "packed", True

    def __len__(self):
        return 100

    def __getitem__(self, index):
        draws = np.random.default_rng(index)
        tokens = draws.integers(0, 26, 17)
        labels = np.where(draws.random(16) < 0.5, tokens[1:], IGNORE_INDEX)
        return tokens[:-1], labels, np.searchsorted([3 + index % 3, 11], np.arange(16), "right")

    def fingerprint(self):
        return "packed"


def gradients(world, configs):
    results = []
    for config in configs:
        clear_dtensor_cache()
        layout, batch = validate(config)
        step = build_step(world, config, layout)
        stream = Stream.from_lengths(0, batch.global_, [100], [1.0], 0.0)
        source = ConcatenatedSource([PackedSource()])
        loader = Loader(source, stream, batch, layout.data_coordinate(world.rank), DataConfig(workers=0))
        step.gradient(0, next(loader.steps(0, 1)), StepClock(world.device, world.heartbeat, 0))
        results.append({name: full_tensor(p.grad) for name, p in step.parallel_model.parameters().items()})
    return results


@pytest.fixture(scope="module")
def found():
    by_rank = run_ranks(gradients, 2, [load_cpu_config(overrides=[*SMALL, *options]) for options in LAYOUTS.values()])
    [[alone]] = run_ranks(gradients, 1, [load_cpu_config(overrides=SMALL)])
    merged = {layout: {k: v for rank in by_rank for k, v in rank[i].items()} for i, layout in enumerate(LAYOUTS)}
    return merged, alone


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_packed_samples_are_those_of_one_process(layout, found):
    merged, alone = found
    assert merged[layout].keys() == alone.keys()
    for name, gradient in alone.items():
        torch.testing.assert_close(merged[layout][name], gradient, rtol=1e-10, atol=1e-14, msg=name)
