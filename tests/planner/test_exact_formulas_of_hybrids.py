"""The exact formulas equal the counters of real steps to the byte, on every rank, for pipeline, context and expert
parallelism and their hybrids.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from meshwright.base.config import RunConfig
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.base.topology.unsupported import validate
from meshwright.core.launch.ranks import run_ranks
from meshwright.planner.cost.comm_volume import CollectiveVolume, comm_volume
from meshwright.planner.cost.peak_memory import state_memory
from meshwright.planner.cost.trace.activation_messages import data_dependent_axes
from meshwright.prover.comm_volume import all_differences
from tests.kit.small_run import load_cpu_config
from tests.kit.step_harness import accumulating_config, count_step_bytes

SMALL = ["--model.vocab=26", "--model.width=16", "--model.heads=2", "--model.kv_heads=2", "--model.ffn=18"]
LAYERS = "layers=4"
KINDS = tuple(SCHEDULES)

QUICK = {
    "pipeline": "pipeline=2 tie",
    "zbv": "pipeline=2 zbv tie",
    "interleaved": "pipeline=2 interleaved layers=5",
    "ring, full checkpointing": "context=2 full",
    "all-to-all, selective checkpointing": "context=2 all-to-all selective tie",
    "expert parallel": "experts=4 experts_shared=1 replicate=2 expert=2",
    "pipeline and FSDP": "pipeline=2 replicate=2 parameters interleaved tie",
    "zbv and sharded optimizer": "pipeline=2 replicate=2 optimizer zbv",
    "pipeline and tensor": "pipeline=2 tensor=2 dualpipev tie",
    "pipeline and context": "pipeline=2 context=2 zero-bubble",
    "context and FSDP": "replicate=2 context=2 parameters",
    "context and tensor": "context=2 tensor=2",
    "expert and FSDP": "experts=4 replicate=4 parameters expert=2 tie",
    "expert and tensor": "experts=4 replicate=2 tensor=2 expert=2",
    "expert, FSDP and pipeline": "experts=4 replicate=2 parameters pipeline=2 expert=2",
    "replicas of shards": "replicate=2 shard_degree=2 parameters",
    "expert weights sharded on their second dimension": "experts=2 replicate=4 parameters ffn=16",
}

LONG = {
    "schedules": [
        *(f"pipeline={ranks} {kind}{tie}" for kind in KINDS for ranks in (2, 4) for tie in ("", " tie")),
        "pipeline=2 interleaved stages=4 replicate=2 parameters layers=9",
    ],
    "pipeline and data parallel": [
        *(f"pipeline=2 replicate=2 {kind}" for kind in KINDS),
        *(f"pipeline=2 replicate=2 optimizer {kind}" for kind in KINDS),
        *(f"pipeline=2 replicate=2 parameters {kind}{tie}" for kind in KINDS[:3] for tie in ("", " tie")),
        "pipeline=2 replicate=2 parameters full",
        "pipeline=2 replicate=2 parameters keep=false zbv",
        "pipeline=2 replicate=2 shard_degree=2 parameters interleaved tie",
    ],
    "pipeline, tensor and context": [
        *(f"pipeline=2 tensor=2 {kind}{tie}" for kind in KINDS for tie in ("", " tie")),
        "pipeline=2 tensor=2 full segment=2 layers=6",
        "pipeline=2 tensor=2 interleaved full",
        *(f"pipeline=2 context=2 {kind}" for kind in KINDS),
        "pipeline=2 context=2 all-to-all selective",
        "pipeline=2 replicate=2 context=2 parameters",
        "pipeline=2 shard_degree=2 parameters tensor=2",
        "pipeline=2 replicate=2 tensor=2 tie",
    ],
    "context": [
        *(
            f"context={ranks} {method}{tie}"
            for ranks in (2, 4)
            for method in ("", "all-to-all")
            for tie in ("", " tie")
        ),
        *(f"context=2 {method} {mode}" for method in ("", "all-to-all") for mode in ("full", "selective")),
        "replicate=2 context=2",
        *(f"replicate=2 context=2 {shard} tie" for shard in ("optimizer", "gradients", "parameters")),
        "replicate=2 context=2 parameters keep=2",
        "context=2 tensor=2 full",
        "context=2 tensor=2 all-to-all selective",
        "replicate=2 context=2 tensor=2 parameters",
        "replicate=2 context=2 tensor=2 optimizer tie",
    ],
    "experts": [
        *(f"experts=4 replicate=2 {shard}" for shard in ("", "optimizer", "gradients", "parameters")),
        "experts=4 replicate=2 parameters experts_shared=1",
        *(f"experts=4 replicate=2 {shard} expert=2" for shard in ("", "parameters", "parameters full")),
        *(f"experts=4 replicate=4 {shard} expert=2 tie" for shard in ("", "optimizer", "gradients", "parameters")),
        "experts=4 replicate=4 parameters expert=2 experts_shared=1",
        "experts=4 replicate=4 parameters keep=2 expert=2",
        "experts=4 replicate=2 shard_degree=2 parameters expert=2",
        *(f"experts=4 replicate=2 context=2 parameters expert={ranks}" for ranks in (1, 2, 4)),
        *(f"experts=4 context=2 expert={ranks}" for ranks in (1, 2)),
    ],
    "experts, tensor and pipeline": [
        *(f"experts=4 tensor=2 {more}" for more in ("", "experts_shared=1", "full", "selective")),
        *(f"experts=4 tensor=2 full router_aux_loss=0 {more}" for more in ("", "experts_shared=1")),
        "experts=4 replicate=2 tensor=2 parameters expert=2",
        *(f"experts=4 replicate=2 pipeline=2 expert=2 {more}" for more in ("", "parameters", "zbv", "interleaved")),
        "experts=4 replicate=2 pipeline=2 parameters expert=2 experts_shared=1 capacity_factor=1",
    ],
    "sharded expert weights": [
        *(f"experts=4 replicate=8 {shard} ffn=32" for shard in ("optimizer", "gradients", "parameters")),
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


def proof_config(case: str) -> RunConfig:
    """A config from settings such as `pipeline=2 zbv parameters`, scaled down as `prove` does."""
    settings = case.split()
    layers = next(
        (setting for setting in settings if setting.startswith("layers=")), LAYERS if "pipeline" in case else "layers=2"
    )
    layers = "layers=8" if "pipeline=4" in case else layers
    options = [*SMALL, f"--model.{layers}", *([] if "replicate=" in case else ["--layout.replicate=1"])]
    for setting in settings:
        name = setting.partition("=")[0]
        if setting in KINDS:
            options.append(f"--pipeline.schedule={setting}")
        elif setting in ("optimizer", "gradients", "parameters"):
            options.append(f"--layout.shard={setting}")
        elif setting in ("full", "selective"):
            options.append(f"--activation_checkpoint.mode={setting}")
        elif setting == "all-to-all":
            options.append("--context.method=all-to-all")
        elif name in OPTIONS:
            options.append(f"--{OPTIONS[name]}={setting.partition('=')[2]}")
        elif name in ("tie", "ffn", "router_aux_loss", "capacity_factor") or name.startswith("experts"):
            options.append(f"--model.{setting}" if "=" in setting else "--model.tie=true")
        elif name != "layers":
            options.append(f"--layout.{setting}")
    return accumulating_config(load_cpu_config(overrides=options))


def count_steps(world, configs: list[RunConfig]):
    results = []
    for config in configs:
        _clear_sharding_prop_cache()  # otherwise a DTensor may use the process groups of an earlier, equal mesh
        results.append(count_step_bytes(world, config))
    return results


@cache
def count_cases(cases: tuple[str, ...], ranks: int):
    """Runs all cases with this number of ranks in one launch. Returns the counts of every rank by case."""
    proofs = {case: proof for case in cases if validate(proof := proof_config(case))[0].ranks == ranks}
    by_rank = run_ranks(count_steps, ranks, list(proofs.values()), timeout=220.0)
    return {case: [counts[index] for counts in by_rank] for index, case in enumerate(proofs)}


def differences(case: str, cases: tuple[str, ...]) -> list[str]:
    """The figures in which ranks and formulas differ."""
    proof = proof_config(case)
    layout, batch = validate(proof)
    counted = count_cases(cases, layout.ranks)[case]
    predicted = [comm_volume(proof, layout, batch, rank) for rank in range(layout.ranks)]
    measured, excluded = [volume for volume, _ in counted], data_dependent_axes(proof, layout)
    wrong = list(all_differences(layout, predicted, measured, excluded))
    memory = [(rank, peak, state_memory(proof, layout, batch, rank)) for rank, (_, peak) in enumerate(counted)]
    return wrong + [f"rank {rank}: {peak} measured, {want} predicted" for rank, peak, want in memory if peak != want]


@pytest.mark.parametrize("name", QUICK)
def test_counted_volume_and_state_memory_of_a_hybrid_equal_the_formulas(name):
    assert differences(QUICK[name], tuple(QUICK.values())) == []


BF16 = ("pipeline=2 replicate=2 parameters", "context=4", "experts=4 replicate=2 tensor=2 expert=2")


def test_counted_bf16_volume_of_a_hybrid_equals_the_formulas():
    proofs = [proof_config(case) for case in BF16]
    proofs = [replace(proof, precision=replace(proof.precision, compute="bf16")) for proof in proofs]
    by_rank = run_ranks(count_steps, 4, proofs, timeout=150.0)
    for index, proof in enumerate(proofs):
        layout, batch = validate(proof)
        measured = [counts[index][0] for counts in by_rank]
        predicted = [comm_volume(proof, layout, batch, rank) for rank in range(4)]
        assert list(all_differences(layout, predicted, measured)) == []


@pytest.mark.long
@pytest.mark.parametrize(("family", "case"), [(family, case) for family, cases in LONG.items() for case in cases])
def test_counted_volume_and_state_memory_of_every_hybrid_equal_the_formulas(family, case):
    assert differences(case, tuple(LONG[family])) == []


def test_expert_tokens_are_compared_over_expert_groups():
    """An uneven load within a group is not a difference; an additional byte is."""
    layout = Layout(replicate=4, expert=2)
    predicted = [[CollectiveVolume("expert", "all_to_all", 100, 50)] for _ in range(4)]
    measured = [[CollectiveVolume("expert", "all_to_all", size, size // 2)] for size in (90, 110, 100, 101)]
    assert list(all_differences(layout, predicted, measured)) == [
        "ranks 2, 3 together: expert all_to_all: 201 bytes measured, 200 bytes predicted"
    ]


def test_data_dependent_axes_are_excluded_and_all_others_compared():
    proof = proof_config("experts=4 expert=2 replicate=2")
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
        "rank 1: pipeline send: 8 bytes measured, 9 bytes predicted"
    ]
