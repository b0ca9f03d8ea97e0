"""Layouts equal a single process: a subset that covers every axis and option, and all layouts on up to eight ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from layout_checks import FP32, FP64, SMALL, TIED, Case, check_cases, failed_claims
from seeded_faults import REPLICATE, SHARD_GRADIENTS, SHARD_OPTIMIZER, SHARD_PARAMETERS

from meshwright.config import LayoutConfig, load_config
from meshwright.launch.ranks import run_ranks
from meshwright.parallel.local_shard import local_tensor
from meshwright.prover.comm_volume import check_communication
from meshwright.prover.layouts import check_layouts, proof_configs
from meshwright.prover.reference import ConcatenatedSource, DataConfig, Loader, build_step, proof_source, proof_stream
from meshwright.topology.layout import Layout
from meshwright.topology.unsupported import validate

MAX_RANKS = 8


def every_layout() -> list[LayoutConfig]:
    """Every layout of two to eight ranks over replicate, shard and tensor. The sequence of a proof config divides over
    1, 2, 4 and 8 ranks.
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


def layout_options(layout: LayoutConfig) -> list[str]:
    return [
        f"--layout.{name}={getattr(layout, name)}"
        for name in ("replicate", "shard", "shard_degree", "tensor")
        if name != "shard_degree" or layout.shard_degree != 1
    ]


def test_65_layouts_of_up_to_eight_ranks_are_covered():
    layouts = [(layout.shard, Layout.from_config(layout)) for layout in every_layout()]
    assert len(set(layouts)) == len(layouts) == 65
    assert {layout.ranks for _, layout in layouts} == set(range(2, MAX_RANKS + 1))


@pytest.mark.long
@pytest.mark.parametrize("layout", every_layout(), ids=lambda layout: f"{Layout.from_config(layout)} {layout.shard}")
def test_every_layout_equals_single_process(layout):
    results = list(check_layouts(load_config(overrides=layout_options(layout))))
    assert len(results) == 3
    assert failed_claims(results) == []


@pytest.mark.long
@pytest.mark.parametrize("tie", ["false", "true"])
@pytest.mark.parametrize("layout", every_layout(), ids=lambda layout: f"{Layout.from_config(layout)} {layout.shard}")
def test_communication_and_memory_of_every_layout_equal_the_formulas(layout, tie):
    results = list(check_communication(load_config(overrides=[*layout_options(layout), f"--model.tie={tie}"])))
    assert len(results) == 2
    assert failed_claims(results) == []


ALL = (FP64, FP32, TIED)
THREE = "--layout.replicate=3"
FOUR = ("--layout.replicate=4", "--layout.shard=parameters")
TENSOR = ("--layout.replicate=1", "--layout.tensor=2")
LAYERS = "--model.layers=3"

COVERING = {
    "replicate": (REPLICATE, ALL),
    "shard optimizer": (SHARD_OPTIMIZER, ALL),
    "shard gradients": (SHARD_GRADIENTS, ALL),
    "shard parameters": (SHARD_PARAMETERS, ALL),
    "tensor": (TENSOR, ALL),
    "three replicas": ((THREE,), (FP64,)),
    "three shards": ((THREE, "--layout.shard=gradients"), (FP64, TIED)),
    "hybrid sharding": ((*SHARD_GRADIENTS, "--layout.shard_degree=2"), (FP64, FP32)),
    "replicate, tensor": ((*REPLICATE, "--layout.tensor=2"), (FP64,)),
    "shard parameters, tensor": ((*SHARD_PARAMETERS, "--layout.tensor=2"), (TIED,)),
    "hybrid sharding, tensor": ((*SHARD_OPTIMIZER, "--layout.shard_degree=2", "--layout.tensor=2"), (FP64,)),
    "activation checkpointing": ((*TENSOR, "--activation_checkpoint.mode=full"), (FP64,)),
    "activation checkpointing in segments": (
        (*SHARD_PARAMETERS, LAYERS, "--activation_checkpoint.mode=full", "--activation_checkpoint.segment=2"),
        (FP64,),
    ),
    "selective activation checkpointing": ((*SHARD_PARAMETERS, "--activation_checkpoint.mode=selective"), (FP64,)),
    "optimizer on cpu": ((*SHARD_PARAMETERS, "--optimizer.cpu_offload=true"), (FP64, FP32)),
    "fsdp prefetch": ((*SHARD_PARAMETERS, LAYERS, "--fsdp.prefetch=2"), (FP64,)),
    "reshard to pairs after forward": ((*FOUR, "--fsdp.reshard_after_forward=2"), (FP64,)),
    "no reshard after forward": ((*SHARD_PARAMETERS, "--fsdp.reshard_after_forward=false"), (FP64, TIED)),
}


PRESETS = {
    "mixtral, shard parameters": ("mixtral-8x7b", SHARD_PARAMETERS),
    "llama, tensor": ("llama-405b", TENSOR),
    "gpt2, shard gradients": ("gpt2-124m", SHARD_GRADIENTS),
    "gpt2, tensor": ("gpt2-124m", TENSOR),
}
CASES = {name: Case(layout, proofs) for name, (layout, proofs) in COVERING.items()}
CASES |= {
    name: Case((f"--preset={preset}", "--model.layers=1", *layout), (FP64,), model=())
    for name, (preset, layout) in PRESETS.items()
}


@cache
def check_all(ranks: int) -> dict[str, list[tuple[str, bool, str]]]:
    """The results of all cases with this number of ranks, from one launch."""
    cases = {name: case for name, case in CASES.items() if case.ranks == ranks}
    return dict(zip(cases, check_cases(list(cases.values())), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_layout_equals_single_process(name):
    case = CASES[name]
    results = check_all(case.ranks)[name]
    assert len(results) == len(case.proofs)
    assert failed_claims(results) == []


def test_compiled_layout_equals_single_process(monkeypatch):
    """Compiles with aot_eager, which uses the same graphs without generating kernels: those take a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    [results] = check_cases([Case((*SHARD_PARAMETERS, "--compile.enabled=true"), (FP32,))])
    assert failed_claims(results) == []


@pytest.mark.long
@pytest.mark.parametrize("layout", [REPLICATE, SHARD_PARAMETERS, TENSOR], ids=["replicate", "shard", "tensor"])
def test_layout_with_compiled_kernels_equals_single_process(layout):
    [results] = check_cases([Case((*layout, "--compile.enabled=true"), (FP32,))])
    assert failed_claims(results) == []


LEARNING_RATE = 0.05
BF16_TOLERANCE = 1e-3
"""bf16 has 8 significant bits: a product has an error of at most 2e-3, a mean over tokens less. A step changes the loss
by 1e-2."""


def train_in_bf16(world, config):
    """Returns the losses, the dtypes of parameters and optimizer, and the dtypes in which gradients are reduced."""
    layout, batch = validate(config)
    reduced: set[torch.dtype] = set()
    # The names differ between the versions of torch.
    for name in {"reduce_scatter_single", "reduce_scatter_tensor", "all_reduce"} & set(dir(dist)):
        record_dtypes(name, reduced)
    step = build_step(world, config, layout)
    source, coordinate = ConcatenatedSource([proof_source(config)]), layout.data_coordinate(world.rank)
    batches = Loader(source, proof_stream(config), batch, coordinate, DataConfig(workers=0)).steps(0, 3)
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
def bf16_single_process_losses():
    proof = bf16_config(REPLICATE)
    [(losses, _, _)] = run_ranks(
        train_in_bf16, 1, replace(proof, layout=LayoutConfig(replicate=1)), launch=proof.launch
    )
    return losses


def bf16_config(layout):
    """The same global batch on every layout."""
    proof = proof_configs(load_config(overrides=[*SMALL, *layout, "--precision.compute=bf16"]))[0][0]
    precision = replace(proof.precision, compute="bf16")
    return replace(proof, precision=precision, batch=replace(proof.batch, global_=4, micro=2))


@pytest.mark.parametrize("layout", [REPLICATE, SHARD_PARAMETERS, TENSOR], ids=["replicate", "shard", "tensor"])
def test_bf16_stays_close_to_single_process_and_reduces_gradients_in_float32(layout, bf16_single_process_losses):
    proof = bf16_config(layout)
    for losses, stored, reduced in run_ranks(train_in_bf16, 2, proof, launch=proof.launch):
        assert losses == pytest.approx(bf16_single_process_losses, rel=BF16_TOLERANCE)
        assert stored == {torch.float32}
        assert torch.float32 in reduced
        assert reduced <= {torch.float32, torch.float64}  # the square of the norm is summed in float64


def test_bf16_compress_hook_reduces_gradients_in_bf16():
    """Shows that the test above records the dtype of the gradients."""
    proof = bf16_config(REPLICATE)
    compressed = replace(proof, ddp=replace(proof.ddp, comm_hook="bf16_compress"))
    results = run_ranks(train_in_bf16, 2, compressed, launch=proof.launch)
    assert all(torch.bfloat16 in reduced for _, _, reduced in results)
