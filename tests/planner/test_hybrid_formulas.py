"""The formulas against the ledgers of real steps for pipelines, divided sequences, divided experts and their hybrids:
every rank, to the byte.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from meshwright.config import RunConfig, load_config
from meshwright.launch.ranks import run_ranks
from meshwright.planner.exact.activation_messages import data_dependent_axes
from meshwright.planner.exact.comm_volume import CollectiveVolume, comm_volume
from meshwright.planner.exact.state_memory import state_memory
from meshwright.prover.comm_volume import all_differences, check_communication, count_step_bytes
from meshwright.prover.layouts import check_layouts, proof_configs
from meshwright.topology.layout import Layout
from meshwright.topology.schedules import SCHEDULES
from meshwright.topology.unsupported import validate

SMALL = ["--model.vocab=26", "--model.width=16", "--model.heads=2", "--model.kv_heads=2", "--model.ffn=18"]
LAYERS = "layers=4"
KINDS = tuple(SCHEDULES)

COVERING = {
    "stages": "pipeline=2 tie",
    "stages in a V": "pipeline=2 zbv tie",
    "stages in turn": "pipeline=2 interleaved layers=5",
    "ring, recomputed": "context=2 full",
    "all-to-all, recomputed selectively": "context=2 all-to-all selective tie",
    "experts apart": "experts=4 experts_shared=1 replicate=2 expert=2",
    "stages of parameters": "pipeline=2 replicate=2 parameters interleaved tie",
    "stages of shards in a V": "pipeline=2 replicate=2 optimizer zbv",
    "stages, cut": "pipeline=2 tensor=2 dualpipev tie",
    "stages of pieces": "pipeline=2 context=2 zero-bubble",
    "pieces and shards": "replicate=2 context=2 parameters",
    "pieces, cut": "context=2 tensor=2",
    "experts apart, shards": "experts=4 replicate=4 parameters expert=2 tie",
    "experts apart, cut": "experts=4 replicate=2 tensor=2 expert=2",
    "experts apart in stages": "experts=4 replicate=2 parameters pipeline=2 expert=2",
    "banks cut by their second dimension": "experts=2 replicate=4 parameters ffn=16",
}

WHOLE = {
    "schedules": [
        *(f"pipeline={ranks} {kind}{tie}" for kind in KINDS for ranks in (2, 4) for tie in ("", " tie")),
        "pipeline=2 interleaved stages=4 replicate=2 parameters layers=9",
    ],
    "stages spread": [
        *(f"pipeline=2 replicate=2 {kind}" for kind in KINDS),
        *(f"pipeline=2 replicate=2 optimizer {kind}" for kind in KINDS),
        *(f"pipeline=2 replicate=2 parameters {kind}{tie}" for kind in KINDS[:3] for tie in ("", " tie")),
        "pipeline=2 replicate=2 parameters full",
        "pipeline=2 replicate=2 parameters keep=false zbv",
        "pipeline=2 replicate=2 shard_degree=2 parameters interleaved tie",
    ],
    "stages cut": [
        *(f"pipeline=2 tensor=2 {kind}{tie}" for kind in KINDS for tie in ("", " tie")),
        "pipeline=2 tensor=2 full segment=2 layers=6",
        "pipeline=2 tensor=2 zbv full",
        *(f"pipeline=2 context=2 {kind}" for kind in KINDS),
        "pipeline=2 context=2 all-to-all selective",
        "pipeline=2 replicate=2 context=2 parameters",
        "pipeline=2 shard_degree=2 parameters tensor=2",
        "pipeline=2 replicate=2 tensor=2 tie",
    ],
    "pieces": [
        *(f"context={ranks} {how}{tie}" for ranks in (2, 4) for how in ("", "all-to-all") for tie in ("", " tie")),
        *(f"context=2 {how} {again}" for how in ("", "all-to-all") for again in ("full", "selective")),
        "replicate=2 context=2",
        *(f"replicate=2 context=2 {what} tie" for what in ("optimizer", "gradients", "parameters")),
        "replicate=2 context=2 parameters keep=2",
        "context=2 tensor=2 full",
        "context=2 tensor=2 all-to-all selective",
        "replicate=2 context=2 tensor=2 parameters",
        "replicate=2 context=2 tensor=2 optimizer tie",
    ],
    "experts": [
        *(f"experts=4 replicate=2 {what}" for what in ("", "optimizer", "gradients", "parameters")),
        "experts=4 replicate=2 parameters experts_shared=1",
        *(f"experts=4 replicate=2 {what} expert=2" for what in ("", "parameters", "parameters full")),
        *(f"experts=4 replicate=4 {what} expert=2 tie" for what in ("", "optimizer", "gradients", "parameters")),
        "experts=4 replicate=4 parameters expert=2 experts_shared=1",
        "experts=4 replicate=4 parameters keep=2 expert=2",
        "experts=4 replicate=2 shard_degree=2 parameters expert=2",
        *(f"experts=4 replicate=2 context=2 parameters expert={ranks}" for ranks in (1, 2, 4)),
        *(f"experts=4 context=2 expert={ranks}" for ranks in (1, 2)),
    ],
    "experts cut and in stages": [
        *(f"experts=4 tensor=2 {more}" for more in ("", "experts_shared=1", "full", "selective")),
        *(f"experts=4 tensor=2 full router_aux_loss=0 {more}" for more in ("", "experts_shared=1")),
        "experts=4 replicate=2 tensor=2 parameters expert=2",
        *(f"experts=4 replicate=2 pipeline=2 expert=2 {more}" for more in ("", "parameters", "zbv", "interleaved")),
        "experts=4 replicate=2 pipeline=2 parameters expert=2 experts_shared=1 capacity_factor=1",
    ],
    "banks": [
        *(f"experts=4 replicate=8 {what} ffn=32" for what in ("optimizer", "gradients", "parameters")),
        "experts=4 replicate=8 parameters",
        "experts=4 replicate=8 parameters expert=2 ffn=32",
        "experts=4 replicate=4 parameters tensor=2 expert=2 ffn=32",
        "experts=2 replicate=4 parameters pipeline=2 expert=2 ffn=32",
    ],
}
OPTIONS = {
    "segment": "activation_checkpoint.segment",
    "keep": "fsdp.reshard_after_forward",
    "stages": "pipeline.stages",
}


def proof_of(case: str) -> RunConfig:
    """A config of words such as `pipeline=2 zbv parameters`, scaled down as a proof would be."""
    said = case.split()
    layers = next((word for word in said if word.startswith("layers=")), LAYERS if "pipeline" in case else "layers=2")
    layers = "layers=8" if "pipeline=4" in case else layers
    words = [*SMALL, f"--model.{layers}", *([] if "replicate=" in case else ["--layout.replicate=1"])]
    for word in said:
        name = word.partition("=")[0]
        if word in KINDS:
            words.append(f"--pipeline.schedule={word}")
        elif word in ("optimizer", "gradients", "parameters"):
            words.append(f"--layout.shard={word}")
        elif word in ("full", "selective"):
            words.append(f"--activation_checkpoint.mode={word}")
        elif word == "all-to-all":
            words.append("--context.method=all-to-all")
        elif name in OPTIONS:
            words.append(f"--{OPTIONS[name]}={word.partition('=')[2]}")
        elif name in ("tie", "ffn") or name.startswith("experts"):
            words.append(f"--model.{word}" if "=" in word else "--model.tie=true")
        elif name != "layers":
            words.append(f"--layout.{word}")
    return next(proof for proof in proof_configs(load_config(overrides=words))[0] if proof.precision.compute == "fp32")


def each(world, configs: list[RunConfig]):
    found = []
    for config in configs:
        _clear_sharding_prop_cache()  # else a DTensor of this mesh may send by the groups of an equal one before it
        found.append(count_step_bytes(world, config))
    return found


@cache
def launched(cases: tuple[str, ...], ranks: int):
    """All that have so many ranks, in one launch: by case, what each rank counted."""
    proofs = {case: proof for case in cases if validate(proof := proof_of(case))[0].ranks == ranks}
    found = run_ranks(each, ranks, list(proofs.values()), timeout=220.0)
    return {case: [of_rank[index] for of_rank in found] for index, case in enumerate(proofs)}


def off(case: str, cases: tuple[str, ...]) -> list[str]:
    """Where ranks and formulas disagree."""
    proof = proof_of(case)
    layout, batch = validate(proof)
    found = launched(cases, layout.ranks)[case]
    expected = [comm_volume(proof, layout, batch, rank) for rank in range(layout.ranks)]
    wrong = list(all_differences(layout, expected, [sent for sent, _ in found], data_dependent_axes(proof, layout)))
    kept = [(rank, got, state_memory(proof, layout, batch, rank)) for rank, (_, got) in enumerate(found)]
    return wrong + [f"rank {rank}: {got}, by the formula {want}" for rank, got, want in kept if got != want]


@pytest.mark.parametrize("name", COVERING)
def test_counted_bytes_of_a_hybrid_are_those_of_the_formulas(name):
    assert off(COVERING[name], tuple(COVERING.values())) == []


BF16 = ("pipeline=2 replicate=2 parameters", "context=4", "experts=4 replicate=2 tensor=2 expert=2")


def test_in_bf16_the_bytes_sent_are_those_of_the_formulas_too():
    proofs = [proof_of(case) for case in BF16]
    proofs = [replace(proof, precision=replace(proof.precision, compute="bf16")) for proof in proofs]
    found = run_ranks(each, 4, proofs, timeout=150.0)
    for index, proof in enumerate(proofs):
        layout, batch = validate(proof)
        sent = [of_rank[index][0] for of_rank in found]
        assert list(all_differences(layout, [comm_volume(proof, layout, batch, rank) for rank in range(4)], sent)) == []


@pytest.mark.long
@pytest.mark.parametrize(("family", "case"), [(family, case) for family, cases in WHOLE.items() for case in cases])
def test_counted_bytes_of_every_hybrid_are_those_of_the_formulas(family, case):
    assert off(case, tuple(WHOLE[family])) == []


def test_a_wrong_formula_of_one_stage_is_a_broken_promise(monkeypatch):
    from meshwright.prover import comm_volume as prove_traffic

    right = prove_traffic.comm_volume
    more = lambda row, rank: row.message_bytes + 4 * (rank == 1 and row.axis == "pipeline")  # noqa: E731
    wrong = lambda *args: [replace(row, message_bytes=more(row, args[3])) for row in right(*args)]  # noqa: E731
    monkeypatch.setattr(prove_traffic, "comm_volume", wrong)
    words = [*SMALL, "--layout.replicate=1", "--layout.pipeline=2"]
    (_, sent, said), (_, kept, _) = check_communication(load_config(overrides=words))
    assert not sent
    assert kept
    assert said.startswith("rank 1: pipeline send sends")


def test_rows_to_experts_are_compared_over_the_ranks_that_share_them():
    """Uneven loads are no difference, and a byte too many is one."""
    layout = Layout(replicate=4, expert=2)
    expected = [[CollectiveVolume("expert", "all_to_all", 100, 50)] for _ in range(4)]
    found = [[CollectiveVolume("expert", "all_to_all", size, size // 2)] for size in (90, 110, 100, 101)]
    assert list(all_differences(layout, expected, found)) == [
        "ranks 2, 3 together: expert all_to_all sends 201 bytes, by the formula 200"
    ]


def test_what_no_formula_can_tell_is_said_and_all_else_compared():
    proof = proof_of("experts=4 expert=2 replicate=2")
    layout = validate(proof)[0]
    assert not data_dependent_axes(proof, layout)
    assert list(data_dependent_axes(replace(proof, model=replace(proof.model, capacity_factor=1.0)), layout)) == [
        "expert"
    ]
    rows = [
        [CollectiveVolume("tensor", "all_gather", 4, 2), CollectiveVolume("pipeline", "send", size, size)]
        for size in (8, 9)
    ]
    assert list(all_differences(Layout(pipeline=2), rows, [rows[0], rows[0]], ["tensor"])) == [
        "rank 1: pipeline send sends 8 bytes, by the formula 9"
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["--model.experts=2", "--model.experts_active=1", "--layout.replicate=4", "--model.ffn=16"],
        pytest.param(["--model.experts=4", "--layout.replicate=8", "--model.ffn=32"], marks=pytest.mark.long),
        pytest.param(
            ["--model.experts=4", "--layout.replicate=8", "--layout.expert=2", "--model.ffn=32"],
            marks=pytest.mark.long,
        ),
    ],
    ids=["2 on 4", "4 on 8", "4 apart on 8"],
)
def test_a_bank_of_fewer_experts_than_shards_is_one_process(words):
    config = load_config(overrides=[*SMALL, "--model.layers=1", *words, "--layout.shard=parameters"])
    assert [measured for _, kept, measured in check_layouts(config) if not kept] == []
