"""The exact formulas equal the counters of real steps to the byte; sharding saves and costs what its table says."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import pytest

from meshwright.base.config import RunConfig
from meshwright.base.models.registry import model_spec, run_spec
from meshwright.base.topology.optimizer_state import RULES
from meshwright.base.topology.parameter_shapes import fsdp_shard_dim, padded_numel, shard_shape
from meshwright.base.topology.unsupported import validate
from meshwright.core.models.init import build_model
from meshwright.planner.cost.comm_volume import comm_volume
from meshwright.planner.cost.peak_memory import StateMemory, state_memory
from meshwright.testing import run_ranks
from tests.kit.small_run import load_cpu_config
from tests.kit.step_harness import count_step_bytes

KINDS = ("none", "optimizer", "gradients", "parameters")
RANKS = 2
EVEN = ["--model.vocab=64", "--model.width=32", "--model.ffn=48", "--model.layers=2", "--data.sequence=16"]


def sharded_config(kind: str, accumulation: int, *more: str) -> RunConfig:
    options = [*EVEN, f"--layout.shard={kind}", f"--batch.global={RANKS * accumulation}", "--batch.micro=1", *more]
    return load_cpu_config(overrides=options, ranks=RANKS)


def count_steps(world, configs: list[RunConfig]):
    return [count_step_bytes(world, config) for config in configs]


CASES = {
    (kind, accumulation, tie): sharded_config(kind, accumulation, f"--model.tie={tie}")
    for kind in KINDS
    for accumulation in (1, 3)
    for tie in ("false", "true")
}
CASES |= {
    (kind, shard): sharded_config(shard, 1, f"--optimizer.kind={kind}", f"--optimizer.cpu_offload={kind == 'lion'}")
    for kind, rule in RULES.items()
    for shard in ("none", "parameters")
    if rule.elementwise or shard == "none"
}
FROZEN = (
    """--optimizer.groups=[{pattern = "*.attention.*", frozen = true}, {pattern = "*.norm*.weight", lr_factor = 2}]"""
)
CASES |= {("frozen", shard): sharded_config(shard, 1, FROZEN) for shard in ("none", "gradients")}
LORA = ("--lora.rank=4", "--lora.targets=*.attention.*,down_proj")
CASES |= {("lora", shard, steps): sharded_config(shard, steps, *LORA) for shard in KINDS for steps in (1, 3)}


@pytest.fixture(scope="module")
def counted_by_case():
    """The volume and memory that rank 1 counted in each case, all in one launch."""
    return dict(zip(CASES, run_ranks(count_steps, RANKS, list(CASES.values()))[1], strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_counted_volume_and_state_memory_equal_the_formulas(case, counted_by_case):
    volume, memory = counted_by_case[case]
    layout, batch = validate(CASES[case])
    assert volume == comm_volume(CASES[case], layout, batch)
    assert memory == state_memory(CASES[case], layout, batch, rank=1)


def test_counted_bf16_volume_and_state_memory_equal_the_formulas():
    """Units are all-gathered in bf16 except for the one with the embedding, whose gradients are float32 as well; so are
    activations, except for the output of the embedding.
    """
    options = ["--precision.compute=bf16", *EVEN]
    cases = [
        load_cpu_config(overrides=[*options, *more], ranks=RANKS)
        for more in (
            ["--layout.shard=parameters"],
            ["--layout.shard=parameters", "--model.tie=true"],
            ["--layout.shard=parameters", "--model.tie=true", "--model.vocab=16"],
            ["--layout.tensor=2"],
        )
    ]
    for case, (volume, memory) in zip(cases, run_ranks(count_steps, RANKS, cases)[0], strict=True):
        assert volume == comm_volume(case, *validate(case))
        assert memory == state_memory(case, *validate(case))


def parameter_bytes() -> int:
    return sum(shape.local_numel() for shape in model_spec(CASES["none", 1, "false"].model).parameters) * 4


def test_wire_bytes_of_zero_stages_are_2_2_2_and_3_times_the_parameters(counted_by_case):
    """The ring algorithm sends (n - 1) / n of each; with M micro-steps 2, 2, 1 + M and 3 M times."""
    for accumulation, expected in ((1, [2, 2, 2, 3]), (3, [2, 2, 1 + 3, 3 * 3])):
        multiples = []
        for kind in KINDS:
            wire = sum(
                row.wire_bytes for row in counted_by_case[kind, accumulation, "false"][0] if row.axis != "control"
            )
            multiples.append(Fraction(wire * RANKS, (RANKS - 1) * parameter_bytes()))
        assert multiples == expected


def test_only_low_rank_factors_are_reduced_and_everything_is_gathered(counted_by_case):
    """DDP reduces the factors; FSDP gathers all parameters before forward and before backward."""
    spec = run_spec(CASES["lora", "none", 1])
    sizes = {trained: sum(p.local_numel() * 4 for p in spec.parameters if p.trainable == trained) for trained in (0, 1)}
    moved = {
        shard: {row.collective: row.message_bytes for row in counted_by_case["lora", shard, 1][0] if row.axis == axis}
        for shard, axis in (("none", "replicate"), ("parameters", "shard"))
    }
    assert moved["none"] == {"all_reduce": sizes[True]}
    assert moved["parameters"]["reduce_scatter"] == sizes[True] < sizes[False]
    assert moved["parameters"]["all_gather"] >= 2 * sizes[False]
    volume, memory = counted_by_case["lora", "none", 3]
    assert memory.parameter == sum(sizes.values())
    assert memory.gradient == sizes[True]


def test_state_memory_falls_from_ddp_to_sharded_parameters(counted_by_case):
    memory: dict[str, StateMemory] = {kind: counted_by_case[kind, 3, "false"][1] for kind in KINDS}
    total, block = parameter_bytes(), 0
    for shape in [s for s in model_spec(CASES["none", 1, "false"].model).parameters if s.unit == "decoder.blocks.0"]:
        block += shape.local_numel() * 4
    step_counts = 4 * len(model_spec(CASES["none", 1, "false"].model).parameters)
    assert memory["none"] == StateMemory(total, total, 2 * total + step_counts)
    for kind in KINDS[1:]:
        assert memory[kind].optimizer == 2 * total // RANKS + step_counts
    assert memory["gradients"].gradient == memory["parameters"].gradient == total // RANKS + block
    assert memory["optimizer"].parameter == memory["gradients"].parameter == total // RANKS + total
    assert memory["parameters"].parameter == total // RANKS + block


SHARED = ["--model.experts=4", "--model.experts_shared=2"]


def test_parameter_shapes_equal_the_models():
    for options in ([], ["--model.tie=true"], ["--model.experts=3", "--model.ffn=5"], SHARED):
        config = load_cpu_config(overrides=[*EVEN, *options])
        real = {name: tuple(p.shape) for name, p in build_model(config.model, 0).named_parameters()}
        assert {shape.name: shape.shape for shape in model_spec(config.model).parameters} == real


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_shards_add_up_to_the_parameter(ranks):
    for shape in model_spec(load_cpu_config(overrides=["--model.vocab=251", "--model.ffn=46"]).model).parameters:
        assert sum(prod(shard_shape(shape.local_shape(2), ranks, c)) for c in range(ranks)) == shape.local_numel(2)
        assert padded_numel(shape.local_shape(2), ranks) >= shape.local_numel(2)
        assert padded_numel(shape.local_shape(2), ranks) % ranks == 0


def test_expert_weights_of_fewer_experts_than_shards_are_sharded_on_their_second_dimension():
    for local, shards, dimension in (
        ((4, 32, 16), 8, 1),  # four experts, eight shards
        ((8, 32, 16), 8, 0),
        ((4, 30, 16), 8, 0),  # FSDP2 supports uneven shards of dimension 0 only
        ((4, 32), 8, 0),
    ):
        assert fsdp_shard_dim(local, shards) == dimension
    assert padded_numel((4, 32, 16), 8) == 4 * 32 * 16
    assert [shard_shape((4, 32, 16), 8, c) for c in range(8)] == [(4, 4, 16)] * 8
    assert padded_numel((4, 30, 16), 8) == 8 * 30 * 16
