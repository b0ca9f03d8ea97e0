"""Estimated peak memory agrees with published formulas and figures, a measured GPU, and the exact formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.base.config import Batch
from meshwright.base.hardware.cluster import MIB, preset_cluster
from meshwright.base.models.architecture import Architecture
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.optimizer_state import RULES
from meshwright.base.topology.unsupported import validate
from meshwright.errors import ConfigError
from meshwright.planner.cost.peak_memory import estimate_memory, rank_traces, state_memory
from meshwright.planner.cost.trace.operations import GRADIENTS
from meshwright.planner.cost.trace.pass_memory import MemoryWalk
from meshwright.planner.cost.units.stage_parameters import partition_evenly
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.planner.workload.trainer_profiles import (
    DEEPSPEED,
    DEEPSPEED_BF16,
    MEGATRON_2021,
    MEGATRON_2022,
    MESHWRIGHT,
    TORCHTITAN,
)
from tests.kit.small_run import load_cpu_config

GIB = 1024 * MIB

LLAMA_8B = Architecture("8b", 32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = Architecture("70b", 80, 8192, 64, 8, 128, 28672, 128256)
LLAMA_405B = Architecture("405b", 126, 16384, 128, 8, 128, 53248, 128256)


def gpt(layers: int, width: int, heads: int, vocab: int = 51200, positions: int = 2048) -> Architecture:
    size, shape = width // heads, {"gated": False, "tied_embeddings": True, "norm": "layer", "bias": True}
    return Architecture(
        "gpt", layers, width, heads, heads, size, 4 * width, vocab, learned_positions=positions, **shape
    )


def job(
    model: Architecture, trainer: TrainerProfile, layout: Layout, micro: int, micro_steps: int, sequence: int, **options
) -> PlannedJob:
    data = layout.data_degree
    device = options.pop("device", "a100-80")
    batch = Batch(data * micro * micro_steps, micro, data, micro_steps)
    return PlannedJob(model, preset_cluster(device, layout.ranks), layout, batch, sequence, trainer=trainer, **options)


@pytest.mark.parametrize(
    ("layers", "width", "heads", "pipeline", "stages", "micro", "full", "reduced"),
    [
        (48, 6144, 64, 1, 1, 4, 59.25, 9.5625),
        (96, 12288, 96, 8, 3, 1, 66.84375, 12.3515625),
        (128, 25600, 160, 64, 1, 1, 131.25, 26.5625),
    ],
    ids=["22B", "175B", "1T"],
)
def test_activation_memory_equals_korthikanti(layers, width, heads, pipeline, stages, micro, full, reduced):
    """GiB of the first stage (arXiv:2205.05198, figure 1): without recomputation, and with sequence parallelism and
    selective recomputation of attention. The paper does not count receive buffers.
    """
    model, layout = gpt(layers, width, heads), Layout(pipeline=pipeline, tensor=8)
    options = {"precision": "fp16", "schedule": "interleaved" if stages > 1 else "1f1b", "stages_per_rank": stages}
    baseline = estimate_memory(job(model, MEGATRON_2021, layout, micro, 64 if pipeline < 64 else 512, 2048, **options))
    selective = estimate_memory(
        job(
            model,
            MEGATRON_2022,
            layout,
            micro,
            64 if pipeline < 64 else 512,
            2048,
            activation_checkpoint="selective",
            **options,
        )
    )
    assert baseline[0].activations / GIB == pytest.approx(full, rel=0.01)
    assert selective[0].activations / GIB == pytest.approx(reduced, rel=0.03)


BLOOM = {"precision": "bf16", "activation_checkpoint": "full", "sharding": "optimizer"}
HALF = BLOOM | {"precision": "fp16"}
SWEEP = [
    (72, 14336, 64, 4, 8, 12, 4, DEEPSPEED, HALF, 49),
    (72, 14336, 64, 4, 8, 12, 8, DEEPSPEED, HALF, 69),
    (72, 14336, 64, 8, 8, 6, 2, DEEPSPEED, HALF, 44),
    (72, 14336, 64, 24, 8, 2, 1, DEEPSPEED, HALF, 65),
    (72, 14336, 64, 16, 2, 12, 2, DEEPSPEED, HALF, 63),
    (72, 14336, 64, 8, 2, 24, 2, DEEPSPEED, HALF, 53),
    (96, 12288, 64, 8, 1, 48, 1, DEEPSPEED, HALF, 58),
    (70, 14336, 112, 8, 4, 12, 2, DEEPSPEED_BF16, BLOOM, 59),
    (100, 12288, 64, 8, 8, 6, 4, DEEPSPEED_BF16, BLOOM, 72),
]
"""layers, width, heads, data, tensor, pipeline, micro-batch, trainer, options, and the GB that nvidia-smi showed"""


@pytest.mark.parametrize("row", SWEEP, ids=lambda row: f"{row[0]} layers {row[3]}x{row[4]}x{row[5]} micro {row[6]}")
def test_peak_memory_of_the_bloom_sweeps_is_within_ten_per_cent(row):
    """github.com/bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md."""
    layers, width, heads, data, tensor, pipeline, micro, trainer, options, shown = row
    layout = Layout(pipeline=pipeline, shard=data, tensor=tensor)
    model = gpt(layers, width, heads, 250880, positions=0)
    memory_by_rank = estimate_memory(job(model, trainer, layout, micro, 2048 // (data * micro), 2048, **options))
    assert max(memory.total for memory in memory_by_rank) / 1e9 == pytest.approx(shown, rel=0.1)


def test_bloom_layouts_that_ran_out_of_memory_do_not_fit():
    """From the same tables: tensor 2 and pipeline 6."""
    layout = Layout(pipeline=6, shard=32, tensor=2)
    for micro in (1, 2):
        large = job(gpt(72, 14336, 64, 250880, 0), DEEPSPEED, layout, micro, 64 // micro, 2048, **HALF)
        assert max(memory.total for memory in estimate_memory(large)) > large.cluster.device.memory


@pytest.mark.parametrize(
    ("model", "layout", "micro", "micro_steps", "sequence", "checkpointing", "reserved"),
    [
        (LLAMA_8B, Layout(shard=8), 2, 1, 8192, "selective", 82.4),
        (LLAMA_8B, Layout(shard=128), 2, 1, 8192, "selective", 67.0),
        (LLAMA_8B, Layout(shard=4, context=2), 1, 1, 65536, "full", 84.2),
        (LLAMA_8B, Layout(context=8), 1, 1, 262144, "full", 84.5),
        (LLAMA_70B, Layout(shard=32, tensor=8), 16, 1, 8192, "full", 71.9),
        (LLAMA_405B, Layout(pipeline=8, shard=8, tensor=8), 1, 8, 32768, "full", 75.3),
    ],
)
def test_torchtitan_reserved_memory_is_within_ten_per_cent(
    model, layout, micro, micro_steps, sequence, checkpointing, reserved
):
    """github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md; GiB, the largest of all ranks."""
    options = {"sharding": "parameters", "precision": "bf16", "activation_checkpoint": checkpointing, "device": "h100"}
    memory_by_rank = estimate_memory(job(model, TORCHTITAN, layout, micro, micro_steps, sequence, **options))
    assert max(memory.reserved for memory in memory_by_rank) / GIB == pytest.approx(reserved, rel=0.1)


@pytest.mark.parametrize(
    ("options", "allocated"),
    [
        ([], 24.78),
        (["--activation_checkpoint.mode=selective"], 15.29),
        (["--activation_checkpoint.mode=full"], 12.65),
        (["--model.experts=8", "--model.ffn=2048"], 26.89),
        (["--compile.enabled=true"], 20.28),
        (["--compile.enabled=true", "--activation_checkpoint.mode=full"], 12.88),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_peak_memory_on_a_gpu_is_within_five_per_cent(options, allocated):
    """Peak allocated GiB of a step on one H200 with torch 2.11, bf16, four sequences of 4096 tokens."""
    shape = {"vocab": 32000, "width": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "layers": 6}
    given = [f"--model.{name}={size}" for name, size in shape.items()]
    batch = ["--data.sequence=4096", "--precision.compute=bf16", "--batch.global=4", "--batch.micro=4"]
    config = load_cpu_config(overrides=[*given, *batch, "--layout.replicate=1", *options])
    [memory] = estimate_memory(PlannedJob.from_config(config, preset_cluster("h200", 1)))
    assert memory.tensors / GIB == pytest.approx(allocated, rel=0.05)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--layout.shard=parameters"],
        ["--layout.shard=optimizer", "--layout.tensor=2"],
        ["--layout.shard=gradients", "--model.experts=4", "--layout.expert=2"],
        ["--layout.shard=parameters", "--layout.pipeline=2", "--model.tie=true"],
        *([f"--optimizer.kind={kind}", "--layout.shard=optimizer", "--layout.tensor=2"] for kind in RULES),
    ],
    ids=" ".join,
)
def test_parameter_and_optimizer_memory_equal_the_exact_formulas(options):
    config = load_cpu_config(
        overrides=["--layout.replicate=4", "--model.layers=6", "--batch.global=32", "--batch.micro=1", *options]
    )
    layout, batch = validate(config)
    memory_by_rank = estimate_memory(PlannedJob.from_config(config, preset_cluster("h100", layout.ranks)))
    for pipeline_rank, memory in enumerate(memory_by_rank):
        rank = pipeline_rank * layout.stride("pipeline")
        exact = state_memory(config, layout, batch, rank)
        assert memory.optimizer == pytest.approx(exact.optimizer, rel=0.02)
        assert memory.parameters <= exact.parameter * 1.02
        assert memory.gradients <= exact.gradient * 1.02 or layout.shard > 1


@pytest.mark.parametrize("options", [["--lora.rank=4"], ['--optimizer.groups=[{pattern="*.ffn.*", frozen=true}]']])
def test_frozen_parameters_have_no_gradients(options):
    config = load_cpu_config(overrides=["--layout.replicate=2", "--batch.global=8", "--batch.micro=4", *options])
    layout, batch = validate(config)
    [memory] = estimate_memory(PlannedJob.from_config(config, preset_cluster("h100", 2)))
    exact = state_memory(config, layout, batch, 0)
    assert memory.gradients == pytest.approx(exact.gradient, rel=0.1)
    assert memory.gradients < 0.8 * memory.parameters


def test_partition_evenly_counts_embedding_and_head_if_layers_do_not_divide():
    assert [len(span) for span in partition_evenly(96, 8)] == [12] * 8
    assert [len(span) for span in partition_evenly(70, 12)] == [5, *[6] * 10, 5]
    assert [len(span) for span in partition_evenly(126, 8)] == [15, *[16] * 6, 15]
    for layers in range(1, 20):
        assert {sum(map(len, partition_evenly(layers, stages))) for stages in range(1, layers + 3)} == {layers}
    with pytest.raises(ConfigError, match="cannot be divided into 8 pipeline stages"):
        partition_evenly(4, 8)


def test_each_memory_optimization_reduces_its_memory_class():
    fsdp = job(LLAMA_8B, MESHWRIGHT, Layout(shard=8), 2, 1, 8192, sharding="parameters", device="h100")
    [before] = estimate_memory(fsdp)
    [full] = estimate_memory(replace(fsdp, activation_checkpoint="full"))
    [selective] = estimate_memory(replace(fsdp, activation_checkpoint="selective"))
    assert full.activations < selective.activations < before.activations
    [tensor_parallel] = estimate_memory(replace(fsdp, layout=Layout(shard=4, tensor=2)))
    assert tensor_parallel.logits < before.logits
    [sharded_optimizer] = estimate_memory(replace(fsdp, sharding="optimizer"))
    assert sharded_optimizer.unsharded > before.unsharded


def test_estimate_memory_builds_few_operations():
    """A search estimates hundreds of plans: ranks with equal stages share passes, and equal blocks one operation."""
    layout = Layout(pipeline=16, shard=128, tensor=8)
    large = job(
        LLAMA_405B, MESHWRIGHT, layout, 1, 16, 8192, sharding="parameters", activation_checkpoint="full", device="h100"
    )
    traces = rank_traces(large)
    estimate_memory(large, traces=traces)
    different = {id(trace): trace for trace in traces}.values()
    assert len(traces) == 16
    assert len(different) == 3
    operations = [trace.operations(kind) for trace in different for kind, _ in trace.counts]
    assert sum(map(len, operations)) < 1500


def test_allocator_slack_is_a_fraction_of_transient_tensors_and_gradients_that_come_later() -> None:
    """ZeRO-2: the peak is in the first blocks of backward, and the shards of the other gradients come later."""
    trainer = replace(MESHWRIGHT, allocator_slack=0.25)
    planned = job(LLAMA_8B, trainer, Layout(shard=8), 1, 1, 4096, device="h100", sharding="gradients")
    [memory] = estimate_memory(planned)
    walk = MemoryWalk()
    walk.run(rank_traces(planned)[0].walk())
    later = walk.state[GRADIENTS] - memory.gradients
    assert later > 0
    assert memory.unsharded > 0 < memory.activations
    assert memory.slack == pytest.approx(0.25 * (memory.activations + memory.logits + memory.unsharded) + later)
