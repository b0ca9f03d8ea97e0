"""Every relation holds for the decoder, and each one finds the fault that it is there for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshwright.core.data.source import SyntheticSource
from meshwright.core.data.token_files import TokenSource
from meshwright.core.models.layers import loss
from meshwright.core.models.layers.attention import CoreAttention
from meshwright.core.models.layers.feed_forward import FeedForward
from meshwright.core.models.layers.loss import HeadLoss
from meshwright.core.models.layers.norm import RMSNorm
from meshwright.core.parallel.world import World
from meshwright.prover.relations import check_labels, check_relations_of_config, relations_on
from tests.kit.small_run import small_config

CONFIG = small_config("--model.separator=5", "--model.tie=true")


def failing(config=CONFIG) -> list[str]:
    """The first words of the claims that do not hold."""
    return [" ".join(claim.split()[:3]) for claim, passed, *_ in check_relations_of_config(config) if not passed]


@pytest.mark.parametrize(
    "overrides", [(), ("--model.separator=5",), ("--model.experts=4", "--model.capacity_factor=1")]
)
def test_relations_hold_for_the_decoder(overrides):
    config = small_config(*overrides)
    claims = list(check_relations_of_config(config))
    assert len(claims) == 8 + (config.model.separator is not None)
    assert all(claim.passed for claim in claims), claims


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_relations_hold_in_low_precision(compute):
    config = small_config(f"--precision.compute={compute}", "--model.experts=4", "--model.separator=5")
    assert all(claim.passed for claim in relations_on(World(), config))


def test_attention_that_is_not_causal_is_found(monkeypatch):
    def everywhere(self, q, k, v, documents):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    monkeypatch.setattr(CoreAttention, "forward", everywhere)
    assert failing(small_config()) == ["a changed token"]


def test_mask_that_hides_the_past_is_found(monkeypatch):
    def diagonal(self, q, k, v, documents):
        mask = torch.eye(q.shape[2], dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    monkeypatch.setattr(CoreAttention, "forward", diagonal)
    assert failing(small_config()) == ["a changed token"]


@pytest.mark.parametrize("shift", [0, -1])
def test_mask_that_crosses_documents_is_found(monkeypatch, shift):
    """shift 0: no documents; -1: a separator belongs to the document that it precedes, so that the next one sees it."""

    def ids(tokens, separator):
        return None if shift == 0 else (tokens == separator).long().cumsum(dim=1)

    monkeypatch.setattr("meshwright.core.models.layers.decoder.document_ids", ids)
    assert failing() == ["a changed token"]


def test_shifted_labels_are_found(monkeypatch):
    forward = HeadLoss.forward

    def shifted(self, hidden, labels):
        return forward(self, hidden[:, :-1], labels[:, 1:])

    monkeypatch.setattr(HeadLoss, "forward", shifted)
    assert "the loss is" in failing()


def test_mean_loss_is_found(monkeypatch):
    forward = HeadLoss.forward

    def mean(self, hidden, labels):
        total, count = forward(self, hidden, labels)
        return total / count.clamp(min=1), count

    monkeypatch.setattr(HeadLoss, "forward", mean)
    assert {"the loss is", "the loss of", "a sample that", "masked labels count"} <= set(failing())


def test_masked_labels_that_count_are_found(monkeypatch):
    monkeypatch.setattr(loss, "valid_tokens", lambda labels: torch.tensor(labels.numel()))
    assert {"the loss is", "masked labels count"} <= set(failing())


def test_model_that_depends_on_the_batch_is_found(monkeypatch):
    def over_batch(self, x):
        return x / x.square().mean(dim=(0, 2), keepdim=True).add(self.eps).sqrt() * self.weight

    monkeypatch.setattr(RMSNorm, "forward", over_batch)
    assert {"the loss of", "a sample that"} <= set(failing())


def test_model_that_depends_on_the_order_of_the_batch_is_found(monkeypatch):
    forward = RMSNorm.forward
    monkeypatch.setattr(
        RMSNorm,
        "forward",
        lambda self, x: forward(self, x) * torch.linspace(1, 2, len(x), dtype=x.dtype)[:, None, None],
    )
    assert "a permuted batch" in failing()


def test_difference_between_training_and_evaluation_is_found(monkeypatch):
    forward = FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: forward(self, x) * (1.0 + 0.1 * self.training))
    assert failing() == ["training mode and"]


class ShiftedSource(TokenSource):
    """Labels are the tokens themselves."""

    def __getitem__(self, index):
        tokens, _ = super().__getitem__(index)
        return tokens, tokens


class OverlappingSource(TokenSource):
    """Every sample but the first starts one token late."""

    def __getitem__(self, index):
        start = index * self.sequence + (index > 0)
        tokens = self.ids[start : start + self.sequence + 1].astype(np.int64)
        return tokens[:-1], tokens[1:]


def test_labels_are_the_next_tokens_within_samples_and_from_one_to_the_next():
    ids = np.random.default_rng(0).integers(0, 250, 1000, dtype=np.uint8)
    (claim,) = check_labels([TokenSource(ids, 16, 256, "good"), SyntheticSource(50, 16, 256)])
    assert claim.passed
    assert claim.measured == "112 of 112 samples"
    for wrong in (ShiftedSource, OverlappingSource):
        (claim,) = check_labels([wrong(ids, 16, 256, "wrong")])
        assert not claim.passed
        assert "sample 0 of wrong" in claim.measured


def test_labels_of_the_data_of_a_config_are_checked(monkeypatch):
    decode = SyntheticSource.__getitem__
    monkeypatch.setattr(SyntheticSource, "__getitem__", lambda self, index: decode(self, index)[::-1])
    assert failing() == ["labels are the"]
