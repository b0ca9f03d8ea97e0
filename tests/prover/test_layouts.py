"""Layouts equal the reference: a subset that covers every axis and option, and all layouts on up to eight ranks."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from meshwright.base.config import LayoutConfig
from meshwright.base.topology.layout import Layout
from tests.prover.seeded_faults import (
    MODEL,
    ONE_REPLICA,
    REPLICATE,
    SHARD_GRADIENTS,
    SHARD_OPTIMIZER,
    SHARD_PARAMETERS,
    TIED,
)
from tests.prover.traced_cases import AS_CONFIGURED, FLOAT64, VARIATION, Case, check_cases, failed_runs

MAX_RANKS = 8


def every_layout() -> list[LayoutConfig]:
    """Every layout of two to eight ranks over replicate, shard and tensor. The sequence divides over 1, 2, 4 and 8
    ranks.
    """
    degrees = range(1, MAX_RANKS + 1)
    return [
        LayoutConfig(replicate=replicate, shard=shard, shard_degree=degree, tensor=tensor)
        for tensor in (1, 2, 4, 8)
        for replicate in degrees
        for degree in degrees
        for shard in (("optimizer", "gradients", "parameters") if degree > 1 else ("none",))
        if 1 < replicate * degree * tensor <= MAX_RANKS
    ]


def layout_options(layout: LayoutConfig) -> tuple[str, ...]:
    degree = Layout.from_config(layout).data_degree
    heads = max(2, layout.tensor)
    return (
        *(
            f"--layout.{name}={getattr(layout, name)}"
            for name in ("replicate", "shard", "shard_degree", "tensor")
            if name != "shard_degree" or layout.shard_degree != 1
        ),
        f"--model.heads={heads}",
        f"--model.kv_heads={heads}",
        "--model.ffn=24",
        "--model.vocab=48",
        f"--batch.global={4 * degree}",
    )


def test_65_layouts_of_up_to_eight_ranks_are_covered():
    layouts = [(layout.shard, Layout.from_config(layout)) for layout in every_layout()]
    assert len(set(layouts)) == len(layouts) == 65
    assert {layout.ranks for _, layout in layouts} == set(range(2, MAX_RANKS + 1))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", every_layout(), ids=lambda layout: f"{Layout.from_config(layout)} {layout.shard}")
def test_every_layout_equals_the_reference(layout):
    assert failed_runs((*MODEL, *layout_options(layout))) == []


THREE = ("--layout.replicate=3", "--batch.global=12")
FOUR = ("--layout.replicate=4", "--layout.shard=parameters", "--batch.global=16")
TENSOR = (*ONE_REPLICA, "--layout.tensor=2")
LAYERS = "--model.layers=3"
HYBRID = ("--layout.shard_degree=2", "--batch.global=8")
FLOAT8 = ("--precision.compute=bf16", "--precision.float8=true", "--model.width=32", "--model.ffn=64")

COVERING = {  # in addition to the runs without a fault of test_seeded_faults.py
    "shard optimizer, tied weights": ((*SHARD_OPTIMIZER, *TIED), FLOAT64),
    "shard gradients": (SHARD_GRADIENTS, AS_CONFIGURED),
    "shard gradients, tied weights": ((*SHARD_GRADIENTS, *TIED), FLOAT64),
    "shard parameters, masked labels": (SHARD_PARAMETERS, VARIATION),
    "tensor": (TENSOR, AS_CONFIGURED),
    "tensor, tied weights": ((*TENSOR, *TIED), FLOAT64),
    "three replicas": (THREE, FLOAT64),
    "three shards": ((*THREE, "--layout.shard=gradients", *TIED), FLOAT64),
    "hybrid sharding": ((*SHARD_GRADIENTS, *HYBRID), AS_CONFIGURED),
    "replicate, tensor": ((*REPLICATE, "--layout.tensor=2"), FLOAT64),
    "shard parameters, tensor": ((*SHARD_PARAMETERS, "--layout.tensor=2", *TIED), FLOAT64),
    "hybrid sharding, tensor": ((*SHARD_OPTIMIZER, *HYBRID, "--layout.tensor=2"), FLOAT64),
    "activation checkpointing": ((*TENSOR, "--activation_checkpoint.mode=full"), FLOAT64),
    "activation checkpointing in segments": (
        (*SHARD_PARAMETERS, LAYERS, "--activation_checkpoint.mode=full", "--activation_checkpoint.segment=2"),
        FLOAT64,
    ),
    "selective activation checkpointing": ((*SHARD_PARAMETERS, "--activation_checkpoint.mode=selective"), FLOAT64),
    "optimizer on cpu": ((*SHARD_PARAMETERS, "--optimizer.cpu_offload=true"), AS_CONFIGURED),
    "fsdp prefetch": ((*SHARD_PARAMETERS, LAYERS, "--fsdp.prefetch=2"), FLOAT64),
    "reshard to pairs after forward": ((*FOUR, "--fsdp.reshard_after_forward=2"), FLOAT64),
    "no reshard after forward": ((*SHARD_PARAMETERS, "--fsdp.reshard_after_forward=false", *TIED), FLOAT64),
    "fewer experts than shards": (
        (*FOUR, "--model.experts=2", "--model.experts_active=1", "--model.ffn=16"),
        FLOAT64,
    ),
    "static graph": ((*REPLICATE, "--batch.micro=6", "--ddp.static_graph=true"), FLOAT64),
    "bf16": ((*SHARD_PARAMETERS, "--precision.compute=bf16"), AS_CONFIGURED),
    "float8, shard": ((*SHARD_PARAMETERS, *FLOAT8), AS_CONFIGURED),
    "float8, tensor": ((*TENSOR, *FLOAT8), AS_CONFIGURED),
    "fp16": ((*REPLICATE, "--precision.compute=fp16"), AS_CONFIGURED),
    "compressed gradients": ((*REPLICATE, "--ddp.comm_hook=bf16_compress"), AS_CONFIGURED),
}
CASES = {name: Case((*MODEL, *options), run) for name, (options, run) in COVERING.items()}

PRESETS = {
    "mixtral, shard parameters": ("mixtral-8x7b", SHARD_PARAMETERS),
    "llama, tensor": ("llama-405b", TENSOR),
    "gpt2, shard gradients": ("gpt2-124m", SHARD_GRADIENTS),
}
CASES |= {
    name: Case((f"--preset={preset}", "--model.layers=1", "--steps=3", "--batch.micro=2", *layout), FLOAT64)
    for name, (preset, layout) in PRESETS.items()
}


LONG = {
    "shard gradients, tied weights",
    "shard parameters, masked labels",
    "tensor",
    "three replicas",
    "hybrid sharding, tensor",
    "replicate, tensor",
    "activation checkpointing",
    "fsdp prefetch",
    "no reshard after forward",
    "static graph",
    "llama, tensor",
    "gpt2, shard gradients",
}
"""Cases of `make test-all` alone; the others use every axis and every level of sharding."""


@cache
def check_all(ranks: int, long: bool) -> dict[str, tuple[bool, str]]:
    """The results of all quick or all long cases with this number of ranks, from one launch."""
    cases = {name: case for name, case in CASES.items() if case.ranks == ranks and (name in LONG) == long}
    return dict(zip(cases, check_cases(list(cases.values())), strict=True))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in CASES])
def test_layout_equals_the_reference(name):
    passed, measured = check_all(CASES[name].ranks, name in LONG)[name]
    assert passed, measured


@pytest.mark.long
def test_compiled_layout_equals_the_reference(monkeypatch):
    """Compiles with aot_eager, which uses the same graphs without generating kernels: those take a minute. `make test`
    compares compiled blocks of sharded layouts with eager ones in tests/core/trainer/test_step_counters.py.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    [(passed, measured)] = check_cases([Case((*MODEL, *SHARD_PARAMETERS, "--compile.enabled=true"), AS_CONFIGURED)])
    assert passed, measured


@pytest.mark.long
@pytest.mark.parametrize("layout", [REPLICATE, SHARD_PARAMETERS, TENSOR], ids=["replicate", "shard", "tensor"])
def test_layout_with_compiled_kernels_equals_the_reference(layout):
    [(passed, measured)] = check_cases([Case((*MODEL, *layout, "--compile.enabled=true"), AS_CONFIGURED)])
    assert passed, measured
