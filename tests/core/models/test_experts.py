"""Mixture of experts: routing, grouped products, load counts, capacity and load balancing."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.base.config import ModelConfig
from meshwright.base.models.registry import model_spec
from meshwright.base.models.routing import Routing
from meshwright.core.models.init import build_model, build_on_meta, init_shard, initial_rows
from meshwright.core.models.layers.expert_weights import (
    ExpertWeights,
    grouped_experts,
    looped_experts,
    supports_grouped_mm,
)
from meshwright.core.models.layers.experts import Experts, Router, update_router_bias
from meshwright.core.models.layers.rotary import RotaryEmbedding
from meshwright.core.parallel.activation_memory.activation_checkpoint import checkpoint_block
from meshwright.core.parallel.materialize import Materializer

WIDTH, INNER, COUNT, ACTIVE = 16, 24, 6, 2
CONFIG = ModelConfig(vocab=50, width=WIDTH, layers=1, heads=2, kv_heads=2, ffn=INNER, experts=COUNT)


def config(**more) -> ModelConfig:
    return ModelConfig(**{**CONFIG.__dict__, **more})


def experts(dtype: torch.dtype = torch.float64, **more) -> Experts:
    """Experts with weights large enough that choices differ and gradients are not negligible."""
    module = Experts(config(**more)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return module


def inputs(batch: int = 3, sequence: int = 7, dtype: torch.dtype = torch.float64, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, sequence, WIDTH, dtype=dtype, generator=generator).requires_grad_()


def token_by_token(module: Experts, x: torch.Tensor) -> torch.Tensor:
    """A reference implementation, one token at a time."""
    out = []
    for token in x.reshape(-1, WIDTH):
        scores = module.router.weight @ token
        best = sorted(range(COUNT), key=lambda e: (-(scores + module.router.bias)[e].item(), e))[:ACTIVE]
        weights = scores[best].softmax(0)
        gate, up, down = module.bank.weights()
        outputs = [down[e] @ (F.silu(gate[e] @ token) * (up[e] @ token)) for e in best]
        out.append(sum(weight * output for weight, output in zip(weights, outputs, strict=True)))
    return torch.stack(out).view_as(x)


@pytest.mark.parametrize("shared", [0, 2])
def test_experts_equal_a_token_by_token_reference(shared):
    module, x = experts(experts_shared=shared), inputs()
    expected = token_by_token(module, x)
    if module.shared is not None:
        assert module.shared.gate.weight.shape == (2 * INNER, WIDTH)
        expected = expected + module.shared(x)
    leaves = [x, *module.parameters()]
    for ours, theirs in zip(
        *(torch.autograd.grad(o.square().sum(), leaves) for o in (module(x), expected)), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-12, rtol=1e-12)


def run_expert_weights(way, counts, dtype):
    generator = torch.Generator().manual_seed(3)
    bank = ExpertWeights(len(counts), WIDTH, INNER).to(dtype)
    for parameter in bank.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    rows = torch.randn(sum(counts), WIDTH, generator=generator).to(dtype).requires_grad_()
    out = way(rows, torch.tensor(counts), bank.weights()) if way else bank(rows, counts)
    return out, *torch.autograd.grad(out.sum(), [rows, *bank.parameters()])  # an expanded gradient


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 4], [1, 2, 3, 0]], ids=str)
def test_grouped_experts_equal_looped_experts(counts):
    for dtype, off in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):  # 24 bits and 8
        at_once, one_by_one = (run_expert_weights(way, counts, dtype) for way in (grouped_experts, looped_experts))
        for ours, theirs in zip(at_once, one_by_one, strict=True):
            assert torch.allclose(ours, theirs, atol=off, rtol=off)


def test_expert_without_rows_has_a_zero_gradient():
    for counts, dtype in (([3, 0, 5], torch.float32), ([3, 0, 5], torch.float64), ([0, 0, 0], torch.float32)):
        _, _, *gradients = run_expert_weights(None, counts, dtype)
        for gradient in gradients:
            assert not gradient[1].any()
            assert bool(gradient[0].any()) is (counts[0] > 0)


def test_supports_grouped_mm():
    rows = torch.zeros(4, WIDTH)
    assert supports_grouped_mm(rows, torch.zeros(3, INNER, WIDTH))
    assert not supports_grouped_mm(rows.double(), torch.zeros(3, INNER, WIDTH))
    assert not supports_grouped_mm(rows[:0], torch.zeros(3, INNER, WIDTH))
    assert not supports_grouped_mm(rows, torch.zeros(3, INNER + 1, WIDTH))
    assert not supports_grouped_mm(rows.bfloat16(), torch.zeros(3, INNER - 4, WIDTH))


def test_autocast_runs_experts_in_bf16_with_float32_gradients():
    module, x = experts(torch.float32, experts_shared=1), inputs(dtype=torch.float32)
    seen = []
    module.bank.register_forward_hook(lambda _m, rows, out: seen.append((rows[0].dtype, out.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert torch.allclose(out, module(x), atol=0.1, rtol=0.1)
    out.sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}


def test_router_bias_changes_the_choice_and_not_the_weights():
    router = Router(WIDTH, COUNT, ACTIVE).double()
    torch.nn.init.normal_(router.weight)
    x = inputs().detach().view(-1, WIDTH)
    _, before, _ = router(x)
    router.bias[4] = 100.0
    scores, chosen, weights = router(x)
    assert (chosen[:, 0] == 4).all()
    assert not torch.equal(before, chosen)
    assert torch.equal(weights, scores.gather(1, chosen).softmax(-1))
    assert "bias" in router.state_dict()
    assert router.bias.dtype == torch.float64


def test_router_weights_are_probabilities_among_all_experts_without_normalization():
    router = Router(WIDTH, COUNT, ACTIVE, Routing(normalize=False, scale=2.5)).double()
    torch.nn.init.normal_(router.weight)
    scores, chosen, weights = router(inputs().detach().view(-1, WIDTH))
    assert torch.equal(chosen, scores.topk(ACTIVE).indices)
    assert torch.equal(weights, 2.5 * scores.softmax(-1).topk(ACTIVE).values)


def test_router_chooses_experts_from_the_groups_with_the_best_expert():
    router = Router(2, 6, 2, Routing(groups=3, groups_active=1))
    scores = torch.tensor([[0.0, 5.0, 4.0, 4.5, 6.0, 1.0], [3.0, 1.0, 2.0, 0.0, -1.0, -2.0]])
    assert router.choose(scores).tolist() == [[4, 5], [0, 1]]


def test_router_breaks_ties_by_expert_index():
    router = Router(WIDTH, COUNT, ACTIVE)
    torch.nn.init.zeros_(router.weight)
    assert router(torch.ones(5, WIDTH))[1].tolist() == [[0, 1]] * 5


def test_expert_load_accumulates_until_take_load():
    module = experts()
    chosen = [module.router(inputs(seed=s).view(-1, WIDTH))[1] for s in (2, 3)]
    for seed in (2, 3):
        module(inputs(seed=seed))
    load, dropped = module.take_load()
    assert load.dtype == dropped.dtype == torch.int64
    assert load.tolist() == torch.cat(chosen).flatten().bincount(minlength=COUNT).tolist()
    assert int(dropped) == 0
    assert module.take_load()[0].tolist() == [0] * COUNT
    module.eval()(inputs())
    assert module.take_load()[0].sum() == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_counts_the_expert_load_once(reentrant):
    module, plain = experts(), experts()
    for each in (module, plain):
        each.auxiliary_scale = torch.tensor(0.1)
    x = inputs()
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    again = inputs()
    checkpoint(module, again, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(again.grad, expected)
    assert torch.equal(module.take_load()[0], plain.take_load()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_compiled_block_with_experts_equals_an_eager_one(mode, dtype):
    plain, compiled = (build_model(CONFIG, 0).decoder.blocks[0].to(dtype) for _ in range(2))
    if mode != "none":
        checkpoint_block(compiled, mode)
    compiled.forward = torch.compile(compiled.forward, backend="aot_eager")  # inductor would take a minute
    found = []
    for block in (plain, compiled):
        block.ffn.auxiliary_scale = torch.tensor(0.1)
        x = inputs(dtype=dtype)
        rotary = RotaryEmbedding(CONFIG.width // CONFIG.heads, CONFIG.rope_theta)(7, x.dtype, x.device, None)
        block(x, rotary).square().sum().backward()
        found.append((x.grad, block.ffn.take_load()[0], *(p.grad for p in block.parameters())))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))


def test_capacity_factor_drops_later_tokens():
    free, x = experts(), inputs(2, 9)
    _, chosen, weights = free.router(x.view(-1, WIDTH))
    module = experts(capacity_factor=0.5)
    limit = math.ceil(0.5 * 18 * ACTIVE / COUNT)
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    for expert in range(COUNT):
        outputs = (chosen == expert).nonzero()[:limit]
        kept[outputs[:, 0], outputs[:, 1]] = True
    gate, up, down = module.bank.weights()
    expected = torch.zeros(18, WIDTH, dtype=torch.float64)
    for token, slot in kept.nonzero().tolist():
        e, row = chosen[token, slot], x.view(-1, WIDTH)[token]
        expected[token] += weights[token, slot] * (down[e] @ (F.silu(gate[e] @ row) * (up[e] @ row)))
    assert torch.allclose(module(x).view(18, WIDTH), expected, atol=1e-12)
    load, dropped = module.take_load()
    assert load.tolist() == chosen.flatten().bincount(minlength=COUNT).tolist()
    assert int(dropped) == int((~kept).sum()) > 0


def reference_balance_loss(module: Experts, x: torch.Tensor) -> torch.Tensor:
    """The balance loss as the paper writes it, one sequence and expert at a time."""
    total = torch.zeros((), dtype=x.dtype)
    for sequence in x:
        scores, chosen, _ = module.router(sequence)
        for expert in range(COUNT):
            frequency = COUNT / (ACTIVE * len(sequence)) * int((chosen == expert).sum())
            total = total + frequency * scores.softmax(-1)[:, expert].mean()
    return total


def test_attached_balance_loss_has_the_gradient_of_an_explicit_one():
    module, x, weight = experts(experts_shared=1), inputs(4, 5), 0.7
    leaves = [x, *module.parameters()]
    plain = module(x)
    assert module.auxiliary is None
    module.keep_auxiliary_graph = True
    explicit = module(x).square().sum() + weight * module.auxiliary
    assert torch.allclose(module.auxiliary, reference_balance_loss(module, x), rtol=1e-13)
    expected = torch.autograd.grad(explicit, leaves)
    module.keep_auxiliary_graph, module.auxiliary_scale = False, torch.tensor(weight, dtype=torch.float64)
    out = module(x)
    assert torch.equal(out, plain)
    assert not module.auxiliary.requires_grad
    assert torch.allclose(module.auxiliary, reference_balance_loss(module, x), rtol=1e-13)
    for ours, theirs in zip(torch.autograd.grad(out.square().sum(), leaves), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12, rtol=1e-12)
    without_balance_loss = torch.autograd.grad(plain.square().sum(), module.router.weight)[0]
    assert not torch.allclose(without_balance_loss, expected[1], atol=1e-3)


def test_update_router_bias_moves_against_the_load():
    bias = torch.tensor([0.0, 0.5, -0.5, 0.0], dtype=torch.float64)
    after = update_router_bias(bias, torch.tensor([10, 2, 4, 0]), 0.25)
    assert after.tolist() == [-0.25, 0.75, -0.5, 0.25]  # the mean is 4
    assert bias.tolist() == [0.0, 0.5, -0.5, 0.0]


def test_update_router_bias_balances_the_load():
    module, x = experts(torch.float32), inputs(8, 32, torch.float32)

    def imbalance() -> float:
        module(x)
        load = module.take_load()[0].double()
        module.router.bias.copy_(update_router_bias(module.router.bias, load, 0.05))
        return float(load.max() / load.mean())

    module.router.bias[0] = 2.0
    first, *_, last = [imbalance() for _ in range(60)]
    assert last < 1.15 < 2 < first


def test_init_of_an_expert_does_not_depend_on_its_shard():
    model, name = build_model(CONFIG, 5), "decoder.blocks.0.ffn.bank.down"
    whole = model.get_parameter(name)
    part = torch.empty(2, WIDTH, 5)
    spec = model_spec(CONFIG)
    std = spec.by_name[name].initialization.value
    init_shard(part, name, whole.shape, (3, 0, 7), spec, 5)
    assert torch.equal(part, whole[3:5, :, 7:12])
    assert torch.equal(whole[4], initial_rows(5, f"{name}.4", whole.shape[1:], 0, WIDTH, std))
    assert std == spec.by_name["decoder.blocks.0.attention.out.weight"].initialization.value < 0.02
    assert not model.get_buffer("decoder.blocks.0.ffn.router.bias").any()


def test_materializer_initializes_buffers_of_a_meta_model():
    model = build_on_meta(CONFIG, torch.float64)

    def fill(block, name):
        block.local.fill_(7.0)  # uninitialized memory
        init_shard(block.local, name, block.shape, block.offset, model_spec(CONFIG), 5)

    weights = Materializer(model, fill, torch.device("cpu"))
    weights.allocate(model)
    weights.initialize(model)
    bias = model.get_buffer("decoder.blocks.0.ffn.router.bias")
    assert (bias.tolist(), bias.dtype) == ([0.0] * COUNT, torch.float64)
    expected = build_model(CONFIG, 5, torch.float64).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
