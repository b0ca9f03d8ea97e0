"""Experts divided among ranks are the experts of one process: outputs, gradients, loads and the balance loss."""

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

from meshwright.config import ModelConfig, load_config
from meshwright.errors import MeshwrightError
from meshwright.launch.ranks import run_ranks
from meshwright.models.experts import Experts
from meshwright.parallel.data_parallel.replica_check import compare_replicas
from meshwright.parallel.expert_parallel import (
    AllReduceCounts,
    AllToAllDispatch,
    expert_sort_order,
    local_expert_matrices,
)
from meshwright.parallel.local_shard import local_shard
from meshwright.parallel.parallel_model import router_biases
from meshwright.prover.reference import build_step
from meshwright.topology.unsupported import validate

WIDTH, INNER, COUNT, BATCH, SEQUENCE = 16, 24, 8, 2, 8
CONFIG = ModelConfig(width=WIDTH, ffn=INNER, heads=2, kv_heads=2, experts=COUNT, experts_shared=1)
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-4}
"""Of sums of some hundred numbers of order one, added up in another order."""
WEIGHT = 0.3


def experts(dtype: torch.dtype) -> Experts:
    made = Experts(CONFIG).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return made


def divided(dtype: torch.dtype, rank: int, ranks: int) -> Experts:
    """With this rank's experts alone."""
    made, each = experts(dtype), COUNT // ranks
    for name, whole in list(made.bank.named_parameters()):
        setattr(made.bank, name, nn.Parameter(whole.detach()[rank * each : (rank + 1) * each].clone()))
    made.dispatch = AllToAllDispatch(dist.group.WORLD)
    return made


def inputs(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(BATCH, SEQUENCE, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out.square() + out).sum()


def off(pairs) -> float:
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


def compared(rank: int, ranks: int, ours: Experts, whole: Experts, results, wanted) -> float:
    """The most by which outputs, inputs' gradients and parameters' gradients are off; a router's and a shared expert's
    are summed here as the data axes would.
    """
    each = COUNT // ranks
    pairs = list(zip(results, wanted, strict=True))
    mine, theirs = dict(ours.named_parameters()), dict(whole.named_parameters())
    for name, parameter in mine.items():
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad.clone()
        expected = theirs[name].grad
        if name.startswith("bank."):
            expected = expected[rank * each : (rank + 1) * each]
        else:
            dist.all_reduce(gradient)
        pairs.append((gradient, expected))
    return off(pairs)


def case(world, dtype, bias=(), recomputed=False, cut=False, way=loss_of) -> tuple[float, list[int]]:
    """Each rank has sequences of its own: how far they are off, and this rank's load."""
    whole, ours = experts(dtype), divided(dtype, world.rank, world.size)
    if cut:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("expert",))
        for name, part in list(ours.bank.named_parameters()):
            block = DTensor.from_local(part.detach(), mesh, [Shard(0)], run_check=False)
            setattr(ours.bank, name, nn.Parameter(block))
        ours.bank.weights = partial(local_expert_matrices, ours.bank)
    for module in (whole, ours):
        for expert, value in bias:
            module.router.bias[expert] = value
        module.auxiliary_scale = torch.tensor(WEIGHT, dtype=dtype)
    every = [inputs(rank, dtype) for rank in range(world.size)]
    outs = [whole(x) for x in every]
    sum(way(out) for out in outs).backward()
    x = inputs(world.rank, dtype)
    out = checkpoint(ours, x, use_reentrant=False) if recomputed else ours(x)
    way(out).backward()
    results, wanted = (out, x.grad), (outs[world.rank], every[world.rank].grad)
    load, dropped = ours.take_load()
    assert int(dropped) == 0
    return compared(world.rank, world.size, ours, whole, results, wanted), load.tolist()


def pieces(world) -> float:
    """All ranks have the same sequences, each a piece of them."""
    dtype = torch.float64
    whole, ours = experts(dtype), divided(dtype, world.rank, world.size)
    whole.keep_auxiliary_graph, ours.sequence_counts, ours.auxiliary_scale = (
        True,
        AllReduceCounts(dist.group.WORLD),
        torch.tensor(WEIGHT, dtype=dtype),
    )
    full = inputs(0, dtype)
    out = whole(full)
    (loss_of(out) + WEIGHT * whole.auxiliary).backward()
    cut = slice(world.rank * SEQUENCE // world.size, (world.rank + 1) * SEQUENCE // world.size)
    x = inputs(0, dtype).detach()[:, cut].clone().requires_grad_()
    part = ours(x)
    loss_of(part).backward()
    share = ours.auxiliary.clone()
    dist.all_reduce(share)
    results, wanted = (part, x.grad, share), (out[:, cut], full.grad[:, cut], whole.auxiliary)
    return compared(world.rank, world.size, ours, whole, results, wanted)


def unlike(world, counts_of) -> float:
    """The dispatch by itself, where each rank gives so many rows for each expert."""
    dtype, each = torch.float64, COUNT // world.size
    whole, ours = experts(dtype).bank, divided(dtype, world.rank, world.size).bank
    generator = torch.Generator().manual_seed(4)
    counts = [torch.tensor(counts_of(rank)) for rank in range(world.size)]
    every = [torch.randn(int(c.sum()), WIDTH, dtype=dtype, generator=generator).requires_grad_() for c in counts]
    outs = [whole(rows, count) for rows, count in zip(every, counts, strict=True)]
    sum(map(loss_of, outs)).backward()
    rows = every[world.rank].detach().clone().requires_grad_()
    out = AllToAllDispatch(dist.group.WORLD)(ours, rows, counts[world.rank])
    loss_of(out).backward()
    mine = slice(world.rank * each, (world.rank + 1) * each)
    pairs = [(out, outs[world.rank]), (rows.grad, every[world.rank].grad)]
    pairs += [(p.grad, theirs.grad[mine]) for p, theirs in zip(ours.parameters(), whole.parameters(), strict=True)]
    return max((off([pair]) for pair in pairs if pair[0].numel()), default=0.0)


ALL_TO_THE_LAST = ((COUNT - 1, 100.0), (COUNT - 2, 50.0))
UNLIKE = {
    "nothing from the first rank": lambda rank: [rank] * COUNT,
    "nothing for the first rank": lambda rank: [0] * (COUNT // 2) + [1 + rank] * (COUNT // 2),
    "one row in all": lambda rank: [int(rank == 1)] + [0] * (COUNT - 1),
    "nothing at all": lambda _rank: [0] * COUNT,
}


def cases(world):
    fp64, fp32 = torch.float64, torch.float32
    return {
        "spread": case(world, fp64),
        "all to the last rank": case(world, fp64, ALL_TO_THE_LAST),
        "recomputed": case(world, fp64, recomputed=True),
        "cut by DTensor": case(world, fp64, cut=True),
        "a gradient of one number": case(world, fp64, way=torch.sum),
        "at once": case(world, fp32),
        "at once, all to the last rank": case(world, fp32, ALL_TO_THE_LAST),
    }, {"pieces": pieces(world), **{name: unlike(world, counts_of) for name, counts_of in UNLIKE.items()}}


@pytest.fixture(scope="module", params=[2, 4], ids=lambda ranks: f"{ranks} ranks")
def found(request):
    """By rank; all cases in one launch."""
    return run_ranks(cases, request.param)


def test_divided_experts_are_those_of_one_process(found):
    for layers, others in found:
        for name, (most, _) in layers.items():
            assert most < CLOSE[torch.float32 if name.startswith("at once") else torch.float64], name
        for name, most in others.items():
            assert most < CLOSE[torch.float64], name


def test_a_load_is_what_the_rank_itself_sent(found):
    for rank, (layers, _) in enumerate(found):
        router, visits = experts(torch.float64).router, BATCH * SEQUENCE * CONFIG.experts_active
        _, chosen, _ = router(inputs(rank, torch.float64).view(-1, WIDTH))
        assert layers["spread"][1] == layers["recomputed"][1] == chosen.flatten().bincount(minlength=COUNT).tolist()
        assert layers["all to the last rank"][1] == [0] * (COUNT - 2) + [visits // 2] * 2


def test_rows_that_come_by_rank_are_sorted_by_expert():
    counts = torch.tensor([[1, 2], [0, 0], [2, 1]])  # expert 0, 1, 1 of the first rank; 0, 0, 1 of the third
    assert expert_sort_order(counts, 6).tolist() == [0, 3, 4, 1, 2, 5]


def strayed(world):
    """Rank 1's bias is another: what the comparison says."""
    config = load_config(
        overrides=["--model.experts=4", "--model.layers=1", "--model.width=16", "--model.ffn=16"], ranks=2
    )
    layout, _ = validate(config)
    model = build_step(world, config, layout).parallel_model.module
    blocks = {name: local_shard(tensor) for name, tensor in router_biases(model)}
    compare_replicas(blocks, layout, world, 0)
    if world.rank == 1:
        model.decoder.blocks[0].ffn.router.bias[2] += 1e-3
    try:
        compare_replicas(blocks, layout, world, 1)
    except MeshwrightError as error:
        return str(error)
    return ""


def test_a_bias_that_strayed_is_found():
    for said in run_ranks(strayed, 2):
        assert "replicas hold different parameters" in said
        assert "decoder.blocks.0.ffn.router.bias" in said


def test_a_single_expert_is_weighted_by_its_share_so_that_the_router_learns():
    config = replace(CONFIG, experts_active=1)
    layer = Experts(config).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    x = torch.randn(2, 5, config.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer(x).square().sum().backward()
    assert float(layer.router.weight.grad.abs().max()) > 0
