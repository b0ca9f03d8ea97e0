"""The formulas against the ledgers of real steps, to the byte; and the table of what sharding saves and costs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from meshwright.config import RunConfig, load_config
from meshwright.models.init import build_model
from meshwright.planner.exact.comm_volume import comm_volume
from meshwright.planner.exact.state_memory import StateMemory, state_memory
from meshwright.prover.comm_volume import count_step_bytes
from meshwright.prover.layouts import proof_configs
from meshwright.testing import run_ranks
from meshwright.topology.layout import Layout
from meshwright.topology.parameter_shapes import decoder_parameter_shapes, fsdp_shard_dim, padded_numel, shard_numel
from meshwright.topology.unsupported import validate

KINDS = ("none", "optimizer", "gradients", "parameters")
RANKS = 2
EVEN = ["--model.vocab=64", "--model.width=32", "--model.ffn=48", "--model.layers=2", "--data.sequence=16"]


def config_of(kind: str, accumulation: int, *more: str) -> RunConfig:
    words = [*EVEN, f"--layout.shard={kind}", f"--batch.global={RANKS * accumulation}", "--batch.micro=1", *more]
    return load_config(overrides=words, ranks=RANKS)


def each(world, configs: list[RunConfig]):
    return [count_step_bytes(world, config) for config in configs]


CASES = {
    (kind, accumulation, tie): config_of(kind, accumulation, f"--model.tie={tie}")
    for kind in KINDS
    for accumulation in (1, 3)
    for tie in ("false", "true")
}


@pytest.fixture(scope="module")
def found():
    """All cases in one launch: by case, what rank 1 counted."""
    return dict(zip(CASES, run_ranks(each, RANKS, list(CASES.values()))[1], strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_counted_bytes_are_those_of_the_formulas(case, found):
    sent, kept = found[case]
    layout, batch = validate(CASES[case])
    assert sent == comm_volume(CASES[case], layout, batch)
    assert kept == state_memory(CASES[case], layout, batch, rank=1)


def test_in_bf16_the_bytes_sent_are_those_of_the_formulas_too():
    """Units are gathered in bf16 but for the one with the embedding; so are activations but for the embedding's sum."""
    words = ["--precision.compute=bf16", *EVEN]
    cases = [
        load_config(overrides=[*words, *more], ranks=RANKS)
        for more in (
            ["--layout.shard=parameters"],
            ["--layout.shard=parameters", "--model.tie=true"],
            ["--layout.tensor=2"],
        )
    ]
    for case, (sent, _) in zip(cases, run_ranks(each, RANKS, cases)[0], strict=True):
        assert sent == comm_volume(case, *validate(case))


def parameters() -> int:
    return sum(shape.local_numel() for shape in decoder_parameter_shapes(CASES["none", 1, "false"].model)) * 4


def test_the_wire_carries_2_2_2_and_3_times_the_parameters(found):
    """By the ring count, (n - 1) / n of each; with M micro-steps 2, 2, 1 + M and 3 M times."""
    for accumulation, expected in ((1, [2, 2, 2, 3]), (3, [2, 2, 1 + 3, 3 * 3])):
        times = []
        for kind in KINDS:
            wire = sum(row.wire_bytes for row in found[kind, accumulation, "false"][0] if row.axis != "control")
            times.append(Fraction(wire * RANKS, (RANKS - 1) * parameters()))
        assert times == expected


def test_what_a_rank_holds_falls_from_none_to_parameters(found):
    kept: dict[str, StateMemory] = {kind: found[kind, 3, "false"][1] for kind in KINDS}
    whole, block = parameters(), 0
    for shapes in [
        s for s in decoder_parameter_shapes(CASES["none", 1, "false"].model) if s.unit == "decoder.blocks.0"
    ]:
        block += shapes.local_numel() * 4
    counts = 4 * len(decoder_parameter_shapes(CASES["none", 1, "false"].model))
    assert kept["none"] == StateMemory(whole, whole, 2 * whole + counts)
    for kind in KINDS[1:]:
        assert kept[kind].optimizer == 2 * whole // RANKS + counts
    assert kept["gradients"].gradient == kept["parameters"].gradient == whole // RANKS + block
    assert kept["optimizer"].parameter == kept["gradients"].parameter == whole // RANKS + whole
    assert kept["parameters"].parameter == whole // RANKS + block


SHARED = ["--model.experts=4", "--model.experts_shared=2"]


def test_shapes_are_those_of_the_model():
    for words in ([], ["--model.tie=true"], ["--model.experts=3", "--model.ffn=5"], SHARED):
        config = load_config(overrides=[*EVEN, *words])
        real = {name: tuple(p.shape) for name, p in build_model(config.model, 0).named_parameters()}
        assert {shape.name: shape.shape for shape in decoder_parameter_shapes(config.model)} == real


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_shards_make_up_the_whole(ranks):
    for shape in decoder_parameter_shapes(load_config(overrides=["--model.vocab=251", "--model.ffn=46"]).model):
        assert sum(shard_numel(shape.local_shape(2), ranks, c) for c in range(ranks)) == shape.local_numel(2)
        assert padded_numel(shape.local_shape(2), ranks) >= shape.local_numel(2)
        assert padded_numel(shape.local_shape(2), ranks) % ranks == 0


def test_a_bank_of_fewer_experts_than_shards_is_cut_by_its_second_dimension():
    for local, shards, dimension in (
        ((4, 32, 16), 8, 1),  # four experts, eight shards
        ((8, 32, 16), 8, 0),
        ((4, 30, 16), 8, 0),  # FSDP2 divides rows alone unevenly
        ((4, 32), 8, 0),
    ):
        assert fsdp_shard_dim(local, shards) == dimension
    assert padded_numel((4, 32, 16), 8) == 4 * 32 * 16
    assert [shard_numel((4, 32, 16), 8, c) for c in range(8)] == [4 * 4 * 16] * 8
    assert padded_numel((4, 30, 16), 8) == 8 * 30 * 16


def test_a_wrong_formula_is_a_broken_promise(monkeypatch):
    from meshwright.prover import comm_volume as prove_traffic

    config = load_config(overrides=[*EVEN, "--layout.shard=parameters"])
    right = prove_traffic.comm_volume
    less = lambda *args: [replace(row, message_bytes=row.message_bytes - 4) for row in right(*args)]  # noqa: E731
    monkeypatch.setattr(prove_traffic, "comm_volume", less)
    (_, sent, said), (_, kept, _) = prove_traffic.check_communication(config)
    assert not sent
    assert kept
    assert "rank 0: control all_reduce sends" in said


def test_what_is_proven_has_the_layout_of_the_config():
    proofs, note = proof_configs(load_config(overrides=["--layout.shard=zero-3", "--layout.shard_degree=16"], ranks=64))
    assert Layout.from_config(proofs[0].layout) == Layout(replicate=2, shard=2)
    assert "layout replicate 4 to 2, shard_degree 16 to 2" in note
