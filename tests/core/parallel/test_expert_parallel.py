"""Expert parallelism equals one process: outputs, gradients, loads and the balance loss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from meshwright.base.config import ModelConfig
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.models.layers.experts import Experts
from meshwright.core.parallel.data_parallel.replica_check import compare_replicas
from meshwright.core.parallel.expert_parallel import (
    AllReduceCounts,
    AllToAllDispatch,
    DispatchedExperts,
    expert_sort_order,
    local_expert_matrices,
    require_divisible,
)
from meshwright.core.parallel.infer_spec import infer_parallel_spec
from meshwright.core.parallel.local_shard import local_shard
from meshwright.core.parallel.parallel_model import router_biases
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.parallel.parallelize import parallelize, require_spec
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.errors import ConfigError, MeshwrightError
from tests.kit.small_run import load_cpu_config
from tests.kit.step_harness import build_step

WIDTH, INNER, COUNT, BATCH, SEQUENCE = 16, 24, 8, 2, 8
CONFIG = ModelConfig(width=WIDTH, ffn=INNER, heads=2, kv_heads=2, experts=COUNT, experts_shared=1)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4}
"""Sums of some hundred values of order one, in different orders."""
WEIGHT = 0.3


def experts(dtype: torch.dtype) -> Experts:
    made = Experts(CONFIG).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return made


def expert_parallel(dtype: torch.dtype, rank: int, ranks: int) -> Experts:
    """The experts of one rank."""
    made, experts_per_rank = experts(dtype), COUNT // ranks
    for name, reference in list(made.bank.named_parameters()):
        setattr(
            made.bank,
            name,
            nn.Parameter(reference.detach()[rank * experts_per_rank : (rank + 1) * experts_per_rank].clone()),
        )
    made.dispatch = AllToAllDispatch(dist.group.WORLD)
    return made


def inputs(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(BATCH, SEQUENCE, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out.square() + out).sum()


def max_error(pairs) -> float:
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


def compared(rank: int, ranks: int, ours: Experts, reference: Experts, results, expected) -> float:
    """The largest error of outputs and of gradients of inputs and parameters. Gradients of the router and of shared
    experts are summed over ranks, as data parallelism would.
    """
    experts_per_rank = COUNT // ranks
    pairs = list(zip(results, expected, strict=True))
    mine, theirs = dict(ours.named_parameters()), dict(reference.named_parameters())
    for name, parameter in mine.items():
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad.clone()
        expected = theirs[name].grad
        if name.startswith("bank."):
            expected = expected[rank * experts_per_rank : (rank + 1) * experts_per_rank]
        else:
            dist.all_reduce(gradient)
        pairs.append((gradient, expected))
    return max_error(pairs)


def case(world, dtype, bias=(), checkpointed=False, as_dtensor=False, loss=loss_of) -> tuple[float, list[int]]:
    """Each rank has its own sequences; returns the largest error and the local load."""
    reference, ours = experts(dtype), expert_parallel(dtype, world.rank, world.size)
    if as_dtensor:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("expert",))
        for name, part in list(ours.bank.named_parameters()):
            block = DTensor.from_local(part.detach(), mesh, [Shard(0)], run_check=False)
            setattr(ours.bank, name, nn.Parameter(block))
        ours.bank.weights = partial(local_expert_matrices, ours.bank)
    for module in (reference, ours):
        for expert, value in bias:
            module.router.bias[expert] = value
        module.auxiliary_scale = torch.tensor(WEIGHT, dtype=dtype)
    inputs_by_rank = [inputs(rank, dtype) for rank in range(world.size)]
    outs = [reference(x) for x in inputs_by_rank]
    sum(loss(out) for out in outs).backward()
    x = inputs(world.rank, dtype)
    out = checkpoint(ours, x, use_reentrant=False) if checkpointed else ours(x)
    loss(out).backward()
    results, expected = (out, x.grad), (outs[world.rank], inputs_by_rank[world.rank].grad)
    load, dropped = ours.take_load()
    assert int(dropped) == 0
    return compared(world.rank, world.size, ours, reference, results, expected), load.tolist()


def sequence_chunks(world) -> float:
    """All ranks have chunks of the same sequences."""
    dtype = torch.float64
    reference, ours = experts(dtype), expert_parallel(dtype, world.rank, world.size)
    reference.keep_auxiliary_graph, ours.sequence_counts, ours.auxiliary_scale = (
        True,
        AllReduceCounts(dist.group.WORLD),
        torch.tensor(WEIGHT, dtype=dtype),
    )
    full = inputs(0, dtype)
    out = reference(full)
    (loss_of(out) + WEIGHT * reference.auxiliary).backward()
    as_dtensor = slice(world.rank * SEQUENCE // world.size, (world.rank + 1) * SEQUENCE // world.size)
    x = inputs(0, dtype).detach()[:, as_dtensor].clone().requires_grad_()
    part = ours(x)
    loss_of(part).backward()
    share = ours.auxiliary.clone()
    dist.all_reduce(share)
    results, expected = (part, x.grad, share), (out[:, as_dtensor], full.grad[:, as_dtensor], reference.auxiliary)
    return compared(world.rank, world.size, ours, reference, results, expected)


def uneven_dispatch(world, counts_of) -> float:
    """The dispatch alone, with the given number of rows per expert on each rank."""
    dtype, experts_per_rank = torch.float64, COUNT // world.size
    reference, ours = experts(dtype).bank, expert_parallel(dtype, world.rank, world.size).bank
    generator = torch.Generator().manual_seed(4)
    counts = [torch.tensor(counts_of(rank)) for rank in range(world.size)]
    inputs_by_rank = [
        torch.randn(int(c.sum()), WIDTH, dtype=dtype, generator=generator).requires_grad_() for c in counts
    ]
    outs = [reference(rows, count) for rows, count in zip(inputs_by_rank, counts, strict=True)]
    sum(map(loss_of, outs)).backward()
    rows = inputs_by_rank[world.rank].detach().clone().requires_grad_()
    out = AllToAllDispatch(dist.group.WORLD)(ours, rows, counts[world.rank])
    loss_of(out).backward()
    mine = slice(world.rank * experts_per_rank, (world.rank + 1) * experts_per_rank)
    pairs = [(out, outs[world.rank]), (rows.grad, inputs_by_rank[world.rank].grad)]
    pairs += [(p.grad, theirs.grad[mine]) for p, theirs in zip(ours.parameters(), reference.parameters(), strict=True)]
    return max((max_error([pair]) for pair in pairs if pair[0].numel()), default=0.0)


ALL_TO_THE_LAST = ((COUNT - 1, 100.0), (COUNT - 2, 50.0))
UNEVEN_COUNTS = {
    "nothing from the first rank": lambda rank: [rank] * COUNT,
    "nothing for the first rank": lambda rank: [0] * (COUNT // 2) + [1 + rank] * (COUNT // 2),
    "one row in all": lambda rank: [int(rank == 1)] + [0] * (COUNT - 1),
    "nothing at all": lambda _rank: [0] * COUNT,
}


def cases(world):
    fp64, fp32 = torch.float64, torch.float32
    return {
        "even": case(world, fp64),
        "all to the last rank": case(world, fp64, ALL_TO_THE_LAST),
        "checkpointed": case(world, fp64, checkpointed=True),
        "weights as DTensors": case(world, fp64, as_dtensor=True),
        "expanded gradient": case(world, fp64, loss=torch.sum),
        "grouped kernel": case(world, fp32),
        "grouped kernel, all to the last rank": case(world, fp32, ALL_TO_THE_LAST),
    }, {
        "sequence chunks": sequence_chunks(world),
        **{name: uneven_dispatch(world, counts_of) for name, counts_of in UNEVEN_COUNTS.items()},
    }


@pytest.fixture(scope="module", params=[2, 4], ids=lambda ranks: f"{ranks} ranks")
def results(request):
    """The results of every rank, all cases in one launch."""
    return run_ranks(cases, request.param)


def test_expert_parallel_equals_one_process(results):
    for layers, others in results:
        for name, (error, _) in layers.items():
            assert error < TOLERANCE[torch.float32 if name.startswith("grouped kernel") else torch.float64], name
        for name, error in others.items():
            assert error < TOLERANCE[torch.float64], name


def test_expert_load_counts_the_local_tokens(results):
    for rank, (layers, _) in enumerate(results):
        router, visits = experts(torch.float64).router, BATCH * SEQUENCE * CONFIG.experts_active
        _, chosen, _ = router(inputs(rank, torch.float64).view(-1, WIDTH))
        assert layers["even"][1] == layers["checkpointed"][1] == chosen.flatten().bincount(minlength=COUNT).tolist()
        assert layers["all to the last rank"][1] == [0] * (COUNT - 2) + [visits // 2] * 2


def test_expert_sort_order_sorts_received_rows_by_expert():
    counts = torch.tensor([[1, 2], [0, 0], [2, 1]])  # expert 0, 1, 1 of the first rank; 0, 0, 1 of the third
    assert expert_sort_order(counts, 6).tolist() == [0, 3, 4, 1, 2, 5]


def different_bias(world):
    """The message of compare_replicas if the bias of rank 1 differs."""
    config = load_cpu_config(
        overrides=["--model.experts=4", "--model.layers=1", "--model.width=16", "--model.ffn=16"], ranks=2
    )
    layout, _ = validate(config)
    model = build_step(world, config, layout).parallel_model.module
    shards = {name: local_shard(tensor) for name, tensor in router_biases(model)}
    compare_replicas(shards, layout, world, 0)
    if world.rank == 1:
        model.decoder.blocks[0].ffn.router.bias[2] += 1e-3
    try:
        compare_replicas(shards, layout, world, 1)
    except MeshwrightError as error:
        return str(error)
    return ""


def test_replica_check_finds_a_different_router_bias():
    for message in run_ranks(different_bias, 2):
        assert "replicas hold different parameters" in message
        assert "decoder.blocks.0.ffn.router.bias" in message


def test_router_receives_a_gradient_with_one_active_expert():
    config = replace(CONFIG, experts_active=1)
    layer = Experts(config).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    x = torch.randn(2, 5, config.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer(x).square().sum().backward()
    assert float(layer.router.weight.grad.abs().max()) > 0


# Models of transformers.

TOKENS, VOCAB = (2, 8), 23
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES = {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3": lambda: Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=24, norm_topk_prob=True),
}


def token_loss(outputs, labels):
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")


def transformers_model(family: str, implementation: str, one_sided: bool) -> CustomModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), experts_implementation=implementation)
    for module in model.modules():
        if isinstance(module, (MixtralExperts, Qwen3MoeExperts)):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.3)
        elif one_sided and isinstance(module, (MixtralTopKRouter, Qwen3MoeTopKRouter)):
            nn.init.zeros_(module.weight)  # all tokens choose the same two experts
    return CustomModel(model, token_loss, infer_parallel_spec(model))


def tokens_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCAB, TOKENS, generator=torch.Generator().manual_seed(rank))
    return tokens, tokens.roll(-1, 1)


def transformers_case(world, family: str, dtype: torch.dtype, mode: str = "none", one_sided: bool = False) -> float:
    """The largest error of the loss and of every gradient, relative to its size."""
    implementation = "eager" if dtype == torch.float64 else "grouped_mm"  # the grouped kernel has no float64
    custom = transformers_model(family, implementation, one_sided)
    reference = custom.build_objective(world.device, dtype)
    total = sum(reference(*tokens_of(rank))[0] for rank in range(world.size))
    total.backward()
    compute = "fp64" if dtype == torch.float64 else "fp32"
    overrides = [f"--layout.replicate={world.size}", "--layout.shard=parameters", "--layout.expert=2"]
    overrides += [f"--precision.compute={compute}", f"--activation_checkpoint.mode={mode}"]
    config = load_cpu_config(overrides=overrides, ranks=world.size)
    layout, _ = validate(config, own_model=True)
    objective = custom.build_objective(world.device, dtype)
    parallel_model = parallelize(objective, config, layout, world, custom.objective_spec())
    with parallel_model.micro_step(last=True):
        loss, _ = parallel_model(*tokens_of(world.rank))
        loss.backward()
    dist.all_reduce(loss.detach_())
    parameters = parallel_model.parameters()
    pairs = [(loss, total)] + [(parameters[n].grad.full_tensor(), p.grad) for n, p in reference.named_parameters()]
    experts_of_rank = next(p for name, p in parameters.items() if name.endswith("experts.gate_up_proj"))
    assert experts_of_rank.to_local().numel() * world.size == experts_of_rank.numel()
    return max(float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)) for ours, theirs in pairs)


class ExpertsWithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Parameter(torch.zeros(4, 8, 8)), nn.LayerNorm(8)

    def forward(self, hidden, chosen, weights):
        return hidden


def refused_experts(ranks: int, module: nn.Module) -> str:
    with pytest.raises(ConfigError) as caught:
        require_divisible(module, ParallelSpec(experts="layers.*.experts"), ranks, None)
    return str(caught.value)


class ScaledInputs(nn.Module):
    """Experts whose inputs, not their outputs, are multiplied by the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, hidden, chosen, weights):
        inputs = hidden[:, None] * weights[..., None]
        return torch.einsum("tkh,tkhi->tki", inputs, self.up[chosen]).relu().square().sum(1)


class ReorderedArguments(ScaledInputs):
    def forward(self, hidden, weights, chosen):
        outputs = torch.einsum("th,tkhi->tki", hidden, self.up[chosen])
        return (outputs * weights[..., None]).sum(1)


def refused_sums(_world) -> list[str]:
    hidden, weights, chosen = torch.ones(3, 8), torch.ones(3, 2), torch.tensor([[0, 1]] * 3)
    cases = {ScaledInputs: (hidden, chosen, weights), ReorderedArguments: (hidden, weights, chosen)}
    messages = []
    for module_class, arguments in cases.items():
        with pytest.raises(ConfigError) as caught:
            DispatchedExperts(module_class(), dist.group.WORLD)(*arguments)
        messages.append(str(caught.value))
    return messages


def transformers_cases(world):
    return {
        "mixtral": transformers_case(world, "mixtral", torch.float64),
        "qwen3, checkpointed": transformers_case(world, "qwen3", torch.float64, "full"),
        "qwen3, no rows for a rank": transformers_case(world, "qwen3", torch.float64, one_sided=True),
        "mixtral, grouped kernel": transformers_case(world, "mixtral", torch.float32),
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_of_transformers_models_equal_one_process(ranks):
    for errors in run_ranks(transformers_cases, ranks):
        for name, error in errors.items():
            assert error < (TOLERANCE[torch.float32] if "kernel" in name else 1e-10), name


def test_experts_whose_forward_is_not_a_weighted_sum_are_refused():
    for messages in run_ranks(refused_sums, 2):
        assert "the forward of ScaledInputs, which ParallelSpec.experts names, is not the sum of" in messages[0]
        assert "the forward of ReorderedArguments" in messages[1]


def test_experts_that_cannot_be_divided_are_refused():
    model = transformers_model("mixtral", "eager", one_sided=False).module
    experts = model.model.layers[0].mlp.experts
    assert "layout.expert = 3 does not divide the 4 experts of MixtralExperts" in refused_experts(3, experts)
    assert "whose first dimension is that of the experts" in refused_experts(2, ExpertsWithNorm())
    assert "a forward of (hidden states, chosen experts, weights)" in refused_experts(2, model.model.layers[0].mlp.gate)
    layout = Layout(replicate=2, expert=2)
    with pytest.raises(ConfigError, match="2 divides the experts of a model, and ParallelSpec"):
        require_spec(model, ParallelSpec(), layout)
