"""A family that is declared by its spec alone trains on every axis: its gradients are those of one process."""

from __future__ import annotations

import pytest
import torch

from meshwright.base.topology.unsupported import validate
from meshwright.core.parallel.local_shard import full_tensor
from meshwright.core.telemetry.step_clock import StepClock
from meshwright.core.torch_private import clear_dtensor_cache
from meshwright.planner.cost.comm_volume import comm_volume
from meshwright.planner.cost.compare_volumes import compare_volumes
from meshwright.planner.cost.peak_memory import state_memory
from meshwright.testing import run_ranks
from tests.kit.small_run import load_cpu_config
from tests.kit.step_harness import build_loader, build_step, count_step_bytes

SIZES = [
    "--model.width=16",
    "--model.heads=4",
    "--model.kv_heads=2",
    "--model.ffn=24",
    "--model.vocab=26",
    "--model.layers=4",
    "--model.separator=0",
    "--data.sequence=16",
    "--precision.compute=fp64",
    "--batch.global=8",
    "--batch.micro=1",
]
WINDOW = ["--context.method=all-to-all", "--model.options.head_size=6", "--model.options.window=5"]
FAMILIES = {
    "gemma2": [  # the caps are so low that scores and logits of initial weights reach them
        "--context.method=all-to-all",
        "--model.options.head_size=6",
        "--model.options.query_scale=0.01",
        "--model.options.attention_softcap=0.1",
        "--model.options.logit_softcap=0.05",
        "--model.options.window=3",
    ],
    "gpt2": ["--model.kv_heads=4", "--model.options.positions=19"],
    "deepseek_v2": [
        "--model.kv_heads=4",
        "--model.ffn=6",
        "--model.experts=4",
        "--model.experts_shared=1",
        "--model.options.q_lora_rank=5",
        "--model.options.v_head_dim=3",
        "--model.options.dense_ffn=10",
        "--model.options.rope_scaling=yarn",
        "--model.options.rope_original_context=20",
        "--model.options.rope_mscale_all_dim=0.7",
    ],
    "llama": ["--model.options.rope_scaling=llama3", "--model.options.rope_original_context=16"],
    "qwen2": [],
    "qwen3": ["--model.options.head_size=6"],
    "mistral": WINDOW,
    "mixtral": [*WINDOW, "--model.experts=4", "--model.experts_active=2", "--model.router_aux_loss=0.01"],
}
LAYOUTS = {
    "DDP": ["--layout.replicate=4"],
    "ZeRO-3": ["--layout.replicate=4", "--layout.shard=parameters", "--activation_checkpoint.mode=selective"],
    "HSDP": ["--layout.replicate=2", "--layout.shard=parameters", "--layout.shard_degree=2", "--kernels.loss=fused"],
    "ZeRO-2 x tensor": ["--layout.replicate=2", "--layout.tensor=2", "--layout.shard=gradients"],
    "context x tensor": ["--layout.context=2", "--layout.tensor=2", "--kernels.loss=fused"],
    "ZeRO-1 x context": ["--layout.replicate=2", "--layout.shard=optimizer", "--layout.context=2"],
    "pipeline x tensor": [
        *["--layout.pipeline=2", "--layout.tensor=2", "--activation_checkpoint.mode=full", "--kernels.loss=fused"]
    ],
    "pipeline x context": ["--layout.pipeline=2", "--layout.context=2", "--pipeline.schedule=interleaved"],
}


EXPERT_LAYOUTS = {
    "expert x ZeRO-3": ["--layout.replicate=4", "--layout.shard=parameters", "--layout.expert=2"],
    "expert x tensor": ["--layout.replicate=2", "--layout.tensor=2", "--layout.expert=2"],
    "expert x context": ["--layout.replicate=2", "--layout.context=2", "--layout.expert=4"],
    "expert x pipeline": ["--layout.pipeline=2", "--layout.replicate=2", "--layout.expert=2"],
}
ALL_LAYOUTS = LAYOUTS | EXPERT_LAYOUTS


def layouts_of(family):
    return ALL_LAYOUTS if any(option.startswith("--model.experts=") for option in FAMILIES[family]) else LAYOUTS


TIES = {"llama": ("false",), "qwen2": ("false",), "qwen3": ("true",), "mistral": ("false",), "mixtral": ("false",)}
"""The families that are not compared with and without tied weights: they share the decoder of llama."""
CASES = [
    (family, tie, layout)
    for family in FAMILIES
    for tie in TIES.get(family, ("true", "false"))
    for layout in layouts_of(family)
]
HYBRID = "pipeline x tensor"
FAST_CASES = [
    ("gemma2", "true", "pipeline x tensor"),
    ("gemma2", "false", "context x tensor"),
    ("gpt2", "true", "ZeRO-3"),
    ("gpt2", "false", "HSDP"),
    ("deepseek_v2", "true", "expert x pipeline"),
    ("deepseek_v2", "false", "context x tensor"),
    ("llama", "false", "pipeline x context"),
    ("qwen2", "false", "ZeRO-2 x tensor"),
    ("qwen3", "true", "pipeline x tensor"),
    ("mistral", "false", "context x tensor"),
    ("mixtral", "false", "expert x tensor"),
]
"""Every family, and together every axis; `make test-all` has the other cases."""


def family_config(family, tie, layout=""):
    """The config of one process without a layout."""
    options = [f"--model.family={family}", *FAMILIES[family], f"--model.tie={tie}"]
    return load_cpu_config(overrides=[*SIZES, *options, "--layout.replicate=1", *ALL_LAYOUTS.get(layout, [])])


def gradients(world, configs):
    """For every config: the gradients of the parameters that this rank has, by name."""
    results = []
    for config in configs:
        clear_dtensor_cache()  # a redistribution of an earlier mesh with the same ranks would be found
        step, loader = build_step(world, config, validate(config)[0]), build_loader(world, config)
        step.gradient(0, next(loader.steps(0, 1)), StepClock(world.device, world.heartbeat, 0))
        named = step.parallel_model.parameters()
        results.append({name: full_tensor(p.grad) for name, p in named.items() if p.grad is not None})
    return results


def require_gradients_of_one_process(cases):
    by_rank = run_ranks(gradients, 4, [family_config(*case) for case in cases], timeout=400.0)
    alone = list(dict.fromkeys((family, tie) for family, tie, _ in cases))
    [of_one_process] = run_ranks(gradients, 1, [family_config(*case) for case in alone])
    for index, (family, tie, layout) in enumerate(cases):
        expected = of_one_process[alone.index((family, tie))]
        distributed = {name: gradient for rank in by_rank for name, gradient in rank[index].items()}
        assert distributed.keys() == expected.keys()
        for name, gradient in expected.items():
            message = f"{name} of {family} on {layout}, tie = {tie}"
            torch.testing.assert_close(distributed[name], gradient, rtol=1e-10, atol=1e-14, msg=message)
            if not name.endswith("attention.k.bias"):  # it adds the same number to all scores of a query
                assert gradient.abs().max() > 1e-8, message


def test_gradients_are_those_of_one_process():
    assert {family for family, _, _ in FAST_CASES} == set(FAMILIES)
    require_gradients_of_one_process(FAST_CASES)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_on_every_layout_are_those_of_one_process(family):
    require_gradients_of_one_process([case for case in CASES if case[0] == family and case not in FAST_CASES])


def trained_parameters(world, configs):
    """For every config: the parameters that this rank has after three steps, by name."""
    results = []
    for config in configs:
        clear_dtensor_cache()
        step, loader = build_step(world, config, validate(config)[0]), build_loader(world, config)
        batches = loader.steps(0, 3)
        for number in range(3):
            step.run(number, 0.01, batches)
        results.append({name: full_tensor(p.detach()) for name, p in step.parallel_model.parameters().items()})
    return results


@pytest.mark.long
def test_three_steps_of_every_family_on_a_hybrid_are_those_of_one_process():
    configs, alone = (
        [family_config(f, TIES.get(f, ("true",))[0], layout) for f in FAMILIES] for layout in (HYBRID, "")
    )
    by_rank = run_ranks(trained_parameters, 4, configs, timeout=400.0)
    [of_one_process] = run_ranks(trained_parameters, 1, alone, timeout=400.0)
    for index, family in enumerate(FAMILIES):
        distributed = {name: value for rank in by_rank for name, value in rank[index].items()}
        assert distributed.keys() == of_one_process[index].keys()
        for name, value in of_one_process[index].items():
            if family == "gpt2" and name.endswith("attention.k.bias"):  # its gradient is zero but for rounding
                continue
            torch.testing.assert_close(distributed[name], value, rtol=0, atol=1e-10, msg=f"{name} of {family}")


def counted_bytes(world, configs):
    counted = []
    for config in configs:
        clear_dtensor_cache()
        counted.append(count_step_bytes(world, config))
    return counted


@pytest.mark.long
@pytest.mark.parametrize(("family", "tie"), dict.fromkeys(case[:2] for case in CASES))
def test_communication_and_memory_are_predicted_exactly(family, tie):
    cases = [case for case in CASES if case[:2] == (family, tie) and "pipeline" not in case[2]]
    configs = [family_config(*case) for case in cases]
    by_rank = run_ranks(counted_bytes, 4, configs)
    for index, config in enumerate(configs):
        layout, batch = validate(config)
        predicted = {rank: comm_volume(config, layout, batch, rank) for rank in range(4)}
        measured = {rank: by_rank[rank][index][0] for rank in range(4)}
        assert [str(row) for row in compare_volumes(layout, predicted, measured) if not row.equal] == [], str(layout)
        for rank in range(4):
            assert by_rank[rank][index][1] == state_memory(config, layout, batch, rank), (str(layout), rank)
