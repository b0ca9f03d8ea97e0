"""The built-in decoder: sizes, precision, attention masks, loss and initialization."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshwright.base.config import IGNORE_INDEX, PRESETS, ModelConfig, config_from_dict
from meshwright.base.models.registry import model_spec
from meshwright.core.models.init import ROWS_PER_KEY, build_model, build_on_meta, initial_rows
from meshwright.core.models.layers.attention import document_ids
from meshwright.core.models.layers.feed_forward import FeedForward
from meshwright.core.models.layers.loss import HeadLoss
from meshwright.core.models.layers.rotary import RotaryTables, apply_rotary, rotary_tables

SMALL = ModelConfig(vocab=50, width=32, layers=2, heads=4, kv_heads=2, ffn=40)

# Published parameter counts (Llama 3.2 1B, 3.1 8B, 70B, 405B; Mixtral 8x7B).
PUBLISHED = {
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_preset_has_the_published_number_of_parameters(preset):
    model = build_on_meta(config_from_dict({"preset": preset}).model, torch.float32)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[preset]


def test_deepseek_moe_preset_equals_the_published_model_except_for_the_first_layer():
    config = config_from_dict({"preset": "deepseek-moe-16b"}).model
    model = build_on_meta(config, torch.float32)
    ours, first = (sum(p.numel() for p in part.parameters()) for part in (model, model.decoder.blocks[0].ffn))
    assert ours - first + 3 * config.width * 10944 == 16_375_728_128


def test_gpt2_preset_has_the_size_of_gpt2():
    model = build_on_meta(config_from_dict({"preset": "gpt2-124m"}).model, torch.float32)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(124e6, rel=0.01)
    assert set(PRESETS) >= PUBLISHED.keys() | {"tiny", "small", "gpt2-124m"}


def tokens(batch: int = 2, sequence: int = 9) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab, (batch, sequence), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("experts", [0, 4])
def test_decoder_runs_in_float64(experts):
    model = build_model(ModelConfig(**{**SMALL.__dict__, "experts": experts}), 0, torch.float64)
    outputs = []
    for module in model.modules():
        module.register_forward_hook(lambda _m, _i, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    total, _ = model(tokens(), tokens())
    total.backward()
    assert {t.dtype for t in outputs if t.is_floating_point()} == {torch.float64}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}


def test_attention_is_causal():
    model = build_model(SMALL, 0, torch.float64)
    early = tokens()
    late = early.clone()
    late[:, 6:] = (late[:, 6:] + 1) % SMALL.vocab
    before, after = model.decoder(early), model.decoder(late)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_document_ids_end_at_the_separator():
    rows = torch.tensor([[5, 0, 5, 5, 0, 0, 5], [0, 5, 5, 5, 5, 5, 0]])
    assert document_ids(rows, 0).tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert document_ids(rows, None) is None
    assert document_ids(rows, 7).tolist() == [[0] * 7] * 2


def test_attention_does_not_cross_documents():
    model = build_model(SMALL, 0, torch.float64)
    one = tokens()
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 2]])
    before = model.decoder(one, documents)
    for other in range(3):
        changed = torch.where(documents == other, (one + 1) % SMALL.vocab, one)
        same = (model.decoder(changed, documents) == before).all(-1)
        assert torch.equal(same, documents != other)


def test_packed_documents_equal_separate_documents():
    """Rotary scores depend on distances only, so a document at a later position gives the same loss, except for
    rounding.
    """
    separator = 7
    model = build_model(ModelConfig(**{**SMALL.__dict__, "separator": separator}), 0, torch.float64)
    row = torch.tensor([[1, 2, 3, separator, separator, 4, 5, 6, 8, separator, 9, 10]])
    documents_alone = [row[:, :4], row[:, 4:5], row[:, 5:10], row[:, 10:]]
    packed, _ = model(row, row.roll(1))
    packed.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    labels = row.roll(1).split([4, 1, 5, 2], dim=1)
    alone = sum(model(part, label)[0] for part, label in zip(documents_alone, labels, strict=True))
    alone.backward()
    assert torch.allclose(packed, alone, rtol=1e-13)
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-12), name


def test_grouped_query_attention_equals_repeated_heads():
    model = build_model(SMALL, 0, torch.float64)
    attention = model.decoder.blocks[0].attention
    x = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rotary = model.decoder.rotary(9, torch.float64, x.device, None)
    q, k, v = (p(x).view(2, 9, -1, 8).transpose(1, 2) for p in (attention.q, attention.k, attention.v))
    q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = (q @ k.transpose(-1, -2)) / 8**0.5
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    expected = attention.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 9, 32))
    assert torch.allclose(attention(x, rotary), expected, atol=1e-13)


def test_rotary_scores_depend_on_the_distance_only():
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def score(i: int, j: int) -> float:
        cos, sin = rotary_tables(torch.tensor([i, j]), 8, 10_000.0, torch.float64)
        at = [RotaryTables(cos[i], sin[i], None) for i in (0, 1)]
        return float(apply_rotary(q, at[0]) @ apply_rotary(k, at[1]))

    assert score(3, 1) == pytest.approx(score(103, 101), rel=1e-12)
    assert score(3, 1) != pytest.approx(score(3, 2), rel=1e-3)


def test_head_loss_returns_the_sum_and_the_number_of_valid_tokens():
    head = HeadLoss(8, 50).double()
    torch.nn.init.normal_(head.weight)
    hidden = torch.randn(3, 5, 8, dtype=torch.float64)
    labels = torch.randint(0, 50, (3, 5))
    labels[0, 2:] = IGNORE_INDEX
    labels[2] = IGNORE_INDEX
    total, count = head(hidden, labels)
    each = F.cross_entropy(F.linear(hidden, head.weight).flatten(0, 1), labels.flatten(), reduction="none")
    assert int(count) == 7
    assert torch.allclose(total, each.sum())


def test_batch_without_valid_tokens_has_zero_loss_and_gradients():
    model = build_model(SMALL, 0)
    total, count = model(tokens(), torch.full((2, 9), IGNORE_INDEX))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert all(float(p.grad.abs().max()) == 0 for p in model.parameters())


def test_equal_experts_equal_a_dense_feed_forward():
    config = ModelConfig(**{**SMALL.__dict__, "experts": 4})
    block = build_model(config, 0, torch.float64).decoder.blocks[0]
    dense = FeedForward(config.width, config.ffn).double()
    with torch.no_grad():
        for name, stacked in block.ffn.bank.named_parameters():
            stacked.copy_(stacked[0].expand_as(stacked))
            dense.get_submodule(name).weight.copy_(stacked[0])
    x = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    assert torch.allclose(block.ffn(x), dense(x), atol=1e-14)


def test_unused_expert_has_a_zero_gradient():
    config = ModelConfig(**{**SMALL.__dict__, "experts": 8})
    model = build_model(config, 0)
    model(tokens(1, 2), tokens(1, 2))[0].backward()
    assert all(p.grad is not None for p in model.parameters())


def test_init_depends_on_seed_name_and_row_block_only():
    config = ModelConfig(**{**SMALL.__dict__, "vocab": 2 * ROWS_PER_KEY + 10})
    one, same_seed, other = build_model(config, 5), build_model(config, 5), build_model(config, 6)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same_seed.get_parameter(name))
        if "norm" not in name:
            assert not torch.equal(parameter, other.get_parameter(name))
    name = "decoder.embedding.weight"
    full = one.get_parameter(name)
    std = model_spec(config).by_name[name].initialization.value
    block = initial_rows(5, name, full.shape, ROWS_PER_KEY, 2 * ROWS_PER_KEY, std)
    assert torch.equal(
        full[ROWS_PER_KEY : 2 * ROWS_PER_KEY], block
    )  # a rank generates the rows of its shard independently
    assert not torch.equal(full[:10], full[ROWS_PER_KEY : ROWS_PER_KEY + 10])


def test_init_of_a_layer_does_not_depend_on_the_number_of_layers():
    shallow, deep = build_model(SMALL, 0), build_model(ModelConfig(**{**SMALL.__dict__, "layers": 4}), 0)
    name = "decoder.blocks.1.attention.q.weight"
    assert torch.equal(shallow.get_parameter(name), deep.get_parameter(name))


def test_tied_weight_stays_one_parameter_after_to_empty():
    model = build_model(ModelConfig(**{**SMALL.__dict__, "tie": True}), 0)
    assert model.head.weight is model.decoder.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())
