"""Layouts against one process: a subset that covers every axis and option, and all of them on up to eight ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from layout_faults import COPIES, FP32, FP64, GRADIENTS, OPTIMIZER, PARAMETERS, SMALL, TIED, found

from meshwright.config import LayoutConfig, load_config
from meshwright.launch.ranks import run_ranks
from meshwright.parallel.local_shard import local_tensor
from meshwright.prover.comm_volume import check_communication
from meshwright.prover.layouts import check_layouts, proof_configs
from meshwright.prover.reference import ConcatenatedSource, DataConfig, Loader, build_step, proof_source, proof_stream
from meshwright.topology.layout import Layout
from meshwright.topology.unsupported import validate

RANKS = 8


def every_layout() -> list[LayoutConfig]:
    """Every way to spread two to eight ranks over the axes. A proof's sequence divides over 1, 2, 4 and 8 ranks."""
    degrees = range(1, RANKS + 1)
    return [
        LayoutConfig(replicate=replicate, shard=shard, shard_degree=degree, tensor=tensor)
        for tensor in (1, 2, 4, 8)
        for replicate in degrees
        for degree in degrees
        for shard in (("optimizer", "gradients", "parameters") if degree > 1 else ("none",))
        if 1 < replicate * degree * tensor <= RANKS
    ]


def words(layout: LayoutConfig) -> list[str]:
    return [
        f"--layout.{name}={getattr(layout, name)}"
        for name in ("replicate", "shard", "shard_degree", "tensor")
        if name != "shard_degree" or layout.shard_degree != 1
    ]


def broken(promises) -> list[str]:
    return [f"{promise}: {measured}" for promise, kept, measured in promises if not kept]


def test_there_are_65_layouts_of_up_to_eight_ranks():
    layouts = [(layout.shard, Layout.from_config(layout)) for layout in every_layout()]
    assert len(set(layouts)) == len(layouts) == 65
    assert {layout.ranks for _, layout in layouts} == set(range(2, RANKS + 1))


@pytest.mark.long
@pytest.mark.parametrize("layout", every_layout(), ids=lambda layout: f"{Layout.from_config(layout)} {layout.shard}")
def test_every_layout_is_one_process(layout):
    promises = list(check_layouts(load_config(overrides=words(layout))))
    assert len(promises) == 3
    assert broken(promises) == []


@pytest.mark.long
@pytest.mark.parametrize("tie", ["false", "true"])
@pytest.mark.parametrize("layout", every_layout(), ids=lambda layout: f"{Layout.from_config(layout)} {layout.shard}")
def test_every_layout_sends_and_holds_what_the_formulas_say(layout, tie):
    promises = list(check_communication(load_config(overrides=[*words(layout), f"--model.tie={tie}"])))
    assert len(promises) == 2
    assert broken(promises) == []


ALL = (FP64, FP32, TIED)
THREE = "--layout.replicate=3"
FOUR = ("--layout.replicate=4", "--layout.shard=parameters")
TENSOR = ("--layout.replicate=1", "--layout.tensor=2")
LAYERS = "--model.layers=3"

COVERING = {
    "copies": (COPIES, ALL),
    "optimizer": (OPTIMIZER, ALL),
    "gradients": (GRADIENTS, ALL),
    "parameters": (PARAMETERS, ALL),
    "tensor": (TENSOR, ALL),
    "three copies": ((THREE,), (FP64,)),
    "three shards": ((THREE, "--layout.shard=gradients"), (FP64, TIED)),
    "copies of shards": ((*GRADIENTS, "--layout.shard_degree=2"), (FP64, FP32)),
    "copies, cut": ((*COPIES, "--layout.tensor=2"), (FP64,)),
    "shards, cut": ((*PARAMETERS, "--layout.tensor=2"), (TIED,)),
    "copies of shards, cut": ((*OPTIMIZER, "--layout.shard_degree=2", "--layout.tensor=2"), (FP64,)),
    "recomputed": ((*TENSOR, "--activation_checkpoint.mode=full"), (FP64,)),
    "recomputed by segments": (
        (*PARAMETERS, LAYERS, "--activation_checkpoint.mode=full", "--activation_checkpoint.segment=2"),
        (FP64,),
    ),
    "recomputed selectively": ((*PARAMETERS, "--activation_checkpoint.mode=selective"), (FP64,)),
    "offloaded": ((*PARAMETERS, "--optimizer.cpu_offload=true"), (FP64, FP32)),
    "fetched ahead": ((*PARAMETERS, LAYERS, "--fsdp.prefetch=2"), (FP64,)),
    "kept by pairs": ((*FOUR, "--fsdp.reshard_after_forward=2"), (FP64,)),
    "kept whole": ((*PARAMETERS, "--fsdp.reshard_after_forward=false"), (FP64, TIED)),
}


@pytest.mark.parametrize("name", COVERING)
def test_a_covering_layout_is_one_process(name, monkeypatch):
    layout, proofs = COVERING[name]
    promises = found(layout, proofs, monkeypatch)
    assert len(promises) == len(proofs)
    assert broken(promises) == []


def test_a_compiled_layout_is_one_process(monkeypatch):
    """Through the same graphs, run without kernels of their own: those take a minute to make."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert broken(found((*PARAMETERS, "--compile.enabled=true"), (FP32,), monkeypatch)) == []


@pytest.mark.long
@pytest.mark.parametrize("layout", [COPIES, PARAMETERS, TENSOR], ids=["copies", "parameters", "tensor"])
def test_a_layout_with_compiled_kernels_is_one_process(layout, monkeypatch):
    assert broken(found((*layout, "--compile.enabled=true"), (FP32,), monkeypatch)) == []


PRESETS = {
    "experts, sharded": ("mixtral-8x7b", PARAMETERS),
    "llama, cut": ("llama-405b", TENSOR),
    "tied, gradients divided": ("gpt2-124m", GRADIENTS),
    "tied, cut": ("gpt2-124m", TENSOR),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_model_is_one_process(name, monkeypatch):
    preset, layout = PRESETS[name]
    promises = found((f"--preset={preset}", "--model.layers=1", *layout), (FP64,), monkeypatch, small=())
    assert broken(promises) == []


RATE = 0.05
CLOSE = 1e-3
"""bf16 keeps 8 bits: a product is off by 2e-3 at most, a mean over tokens by less; a step moves the loss by 1e-2."""


def in_bf16(world, config):
    """(losses, dtypes of parameters and gradients, dtypes in which gradients met)"""
    layout, batch = validate(config)
    met = set()
    for name in {"reduce_scatter_single", "reduce_scatter_tensor", "all_reduce"} & set(
        dir(dist)
    ):  # torch's versions differ
        spy(name, met)
    step = build_step(world, config, layout)
    source, coordinate = ConcatenatedSource([proof_source(config)]), layout.data_coordinate(world.rank)
    batches = Loader(source, proof_stream(config), batch, coordinate, DataConfig(workers=0)).steps(0, 3)
    kept = {p.dtype for p in step.parallel_model.module.parameters()} | {
        local_tensor(p).dtype for p in step.optimizer.local_parameters
    }
    losses = [float(step.run(number, RATE, batches).numbers[0]) for number in range(3)]
    return losses, kept, met


def spy(name, met):
    right = getattr(dist, name)

    def watched(*args, **options):
        output = args[0] if args else options["output"]
        if output.is_floating_point():
            met.add(output.dtype)
        return right(*args, **options)

    setattr(dist, name, watched)


@pytest.fixture(scope="module")
def bf16_alone():
    proof = bf16(COPIES)
    [(losses, _, _)] = run_ranks(in_bf16, 1, replace(proof, layout=LayoutConfig(replicate=1)), launch=proof.launch)
    return losses


def bf16(layout):
    """The same global batch on every layout."""
    proof = proof_configs(load_config(overrides=[*SMALL, *layout, "--precision.compute=bf16"]))[0][0]
    precision = replace(proof.precision, compute="bf16")
    return replace(proof, precision=precision, batch=replace(proof.batch, global_=4, micro=2))


@pytest.mark.parametrize("layout", [COPIES, PARAMETERS, TENSOR], ids=["copies", "parameters", "tensor"])
def test_bf16_stays_close_to_one_process_and_gradients_meet_in_float32(layout, bf16_alone):
    proof = bf16(layout)
    for losses, kept, met in run_ranks(in_bf16, 2, proof, launch=proof.launch):
        assert losses == pytest.approx(bf16_alone, rel=CLOSE)
        assert kept == {torch.float32}
        assert torch.float32 in met
        assert met <= {torch.float32, torch.float64}  # the norm's square is summed in float64


def test_gradients_meet_in_bf16_where_that_is_asked_for():
    """So the test above sees the gradients pass."""
    proof = bf16(COPIES)
    compressed = replace(proof, replicate=replace(proof.replicate, compress="bf16"))
    assert all(torch.bfloat16 in met for _, _, met in run_ranks(in_bf16, 2, compressed, launch=proof.launch))
