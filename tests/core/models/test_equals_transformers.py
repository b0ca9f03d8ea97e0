"""Every family computes what transformers computes from the same folder: logits, loss and every gradient."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from meshwright.base.config import IGNORE_INDEX
from meshwright.base.models.registry import FAMILIES
from tests.kit.family_models import MODELS, same_model, stored_tensors


def gradients_by_stored_name(model, folder) -> dict[str, torch.Tensor]:
    """The gradients of transformers' model under the names that its folder gives to parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.fixture
def float64_throughout(monkeypatch):
    """Lifts the casts to float32 of transformers' norms, softmax, routers and rotary frequencies."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)


def test_every_family_is_compared():
    assert {config.family for config in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_loss_and_gradients_are_those_of_transformers(config, tmp_path, request):
    ours, theirs = same_model(config, torch.float64, tmp_path)
    tokens = torch.randint(config.vocab, (2, 11))
    labels = tokens.roll(-1, 1).index_fill(1, torch.tensor([10]), IGNORE_INDEX)
    total, count = ours(tokens, labels)
    total.backward()
    request.getfixturevalue("float64_throughout")
    if hasattr(theirs.base_model, "rotary_emb"):
        theirs.base_model.rotary_emb = type(theirs.base_model.rotary_emb)(theirs.config)
    logits = theirs(tokens).logits
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
    )
    expected.backward()
    assert count == 20
    with torch.no_grad():
        torch.testing.assert_close(ours.head.logits(ours.decoder(tokens)), logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=0)
    gradients = gradients_by_stored_name(theirs, tmp_path / "gradients")
    ours_by_name = stored_tensors(config, {name: parameter.grad for name, parameter in ours.named_parameters()})
    assert ours_by_name.keys() == gradients.keys()
    for name, gradient in ours_by_name.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_logits_in_float32_are_those_of_transformers(config, tmp_path):
    ours, theirs = same_model(config, torch.float32, tmp_path)
    tokens = torch.randint(config.vocab, (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(ours.head.logits(ours.decoder(tokens)), theirs(tokens).logits, rtol=1e-5, atol=1e-4)
