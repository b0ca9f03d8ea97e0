"""The simulated ledgers against those of real steps on forked ranks: every collective, and memory by class.

Gloo reduces and scatters on a copy of its input, which other backends do not take: in these layouts the peak is not
where it does.
"""

from __future__ import annotations

from functools import cache

import pytest

from meshwright.config import load_config
from meshwright.launch.ranks import run_ranks
from meshwright.prover.comm_volume import count_third_step
from meshwright.simulator.simulate import simulate_rank
from meshwright.topology.unsupported import validate

SMALL = "--model.vocab=512 --model.width=64 --model.heads=4 --model.ffn=160 --data.sequence=32 --model.layers=6"
LAYOUTS = {
    "shards": "--layout.replicate=2 --layout.shard=parameters",
    "shards in bf16": "--layout.replicate=2 --layout.shard=parameters --precision.compute=bf16",
    "copies": "--layout.replicate=2 --ddp.bucket_cap_mb=0.2",
    "copies, accumulated": "--layout.replicate=2 --batch.micro=1",
    "cut": "--layout.replicate=1 --layout.tensor=2 --activation_checkpoint.mode=full",
    "pieces": "--layout.replicate=1 --layout.context=2 --batch.micro=4",
    "stages": "--layout.replicate=1 --layout.pipeline=2 --batch.micro=2",
    "stages in a V": "--layout.replicate=1 --layout.pipeline=2 --pipeline.schedule=zbv --batch.micro=2"
    " --model.tie=true",
}
RANK = 1


def each(world, configs):
    found = []
    for config in configs:
        ledgers = count_third_step(world, config)
        memory = ledgers.memory
        found.append((ledgers.rows(), memory.peak, memory.at_peak, memory.peak_total))
    return found


def config_of(name: str):
    return load_config(overrides=[*SMALL.split(), *LAYOUTS[name].split()])


@cache
def measured(names):
    """All in one launch."""
    found = run_ranks(each, 2, [config_of(name) for name in names], timeout=220.0)
    return dict(zip(names, found[RANK], strict=True))


QUICK = ("shards", "cut", "stages")


@pytest.mark.parametrize("name", QUICK)
def test_a_simulated_step_is_the_real_one(name):
    check(name, measured(QUICK)[name])


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_simulated_step_is_the_real_one(name):
    check(name, measured(tuple(LAYOUTS))[name])


def check(name, real):
    rows, peak, at_peak, total = real
    config = config_of(name)
    found = simulate_rank(config, *validate(config), RANK)
    print(name, found.peak, peak, found.at_peak, at_peak, sep="\n")
    assert found.traffic == rows
    for kind in ("parameter", "gradient", "optimizer", "activation"):
        assert found.peak[kind] == peak[kind], kind
    assert found.peak_total == total
    assert found.at_peak == at_peak
