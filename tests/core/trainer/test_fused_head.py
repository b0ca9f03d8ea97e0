"""The fused loss of transformers' causal language models: equal to the model's own, and given up where it is not."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from meshwright.core.data.batch_structure import BatchStructure
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.trainer.first_batch.fused_head_check import verify_fused_head
from meshwright.core.trainer.objective import Objective
from meshwright.errors import ConfigError
from tests.kit.huggingface_models import CONFIGS

WORLD = SimpleNamespace(all_gather_ints=lambda *numbers, name: [list(numbers)], to_device=lambda tensor: tensor)


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 67, (3, 12), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[1, :7] = -100
    return {"input_ids": tokens, "labels": labels}


def build(kind: str, **settings) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind], **settings)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def verified(model: nn.Module, **settings) -> Objective:
    """The objective of a model after the check of its fused loss."""
    data = batch()
    structure = BatchStructure.of(data)
    objective = Objective(model, None, structure, **settings)
    objective.fuse_head()
    first = SimpleNamespace(tensors=structure.flatten(data))
    verify_fused_head(ParallelModel(objective), WORLD, lambda: first, nullcontext)
    return objective


def gradients(objective: Objective) -> tuple[torch.Tensor, list[torch.Tensor]]:
    total, _ = objective(*objective.batch.flatten(batch()))
    return total, list(torch.autograd.grad(total / 7, list(objective.parameters())))


@pytest.mark.parametrize(("kind", "settings"), [("llama", {}), ("qwen3", {"tie_word_embeddings": True}), ("gpt2", {})])
def test_fused_loss_and_gradients_equal_those_of_the_model(kind, settings):
    model = build(kind, **settings)
    data = batch()  # the model's own loss is computed in float32
    logits = model(data["input_ids"]).logits[:, :-1]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), data["labels"][:, 1:].flatten(), reduction="sum")
    of_logits = torch.autograd.grad(expected / 7, list(model.parameters()))
    objective = verified(model)
    assert objective.fused_head.enabled
    total, fused = gradients(objective)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    for one, other in zip(fused, of_logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_fused_model_computes_no_logits(monkeypatch):
    objective = verified(build("llama"))
    monkeypatch.setattr(objective.fused_head, "project_to_logits", None)
    objective(*objective.batch.flatten(batch()))
    with torch.no_grad():  # evaluation
        objective(*objective.batch.flatten(batch()))


def test_a_model_that_caps_its_logits_keeps_its_own_loss():
    model = build("gemma2")
    plain = Objective(copy.deepcopy(model), None, BatchStructure.of(batch()))
    objective = verified(model)
    assert not objective.fused_head.enabled
    assert objective.fused_head.problem == "the model changes its logits before the loss"
    torch.testing.assert_close(gradients(objective), gradients(plain), rtol=0, atol=0)


def test_a_head_that_computes_something_else_keeps_its_own_loss():
    model = build("llama")
    model.lm_head.forward = lambda hidden: nn.functional.linear(2 * hidden, model.lm_head.weight)
    objective = verified(model)
    assert not objective.fused_head.enabled
    assert "the fused loss is" in objective.fused_head.problem


def test_logits_that_change_after_the_first_batch_are_an_error():
    objective = verified(build("llama"))
    objective.fused_head.head.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    with pytest.raises(ConfigError, match=r"did not on the first sample.*kernels.loss = torch"):
        objective(*objective.batch.flatten(batch()))


def test_the_loss_of_a_model_with_adapters_is_fused():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build("llama"), lora).double()
    plain = Objective(copy.deepcopy(model), None, BatchStructure.of(batch()))
    objective = verified(model)
    assert objective.fused_head.enabled
    expected, total = (o(*o.batch.flatten(batch()))[0] for o in (plain, objective))
    torch.testing.assert_close(total.float(), expected, rtol=1e-6, atol=0)  # its own loss is in float32


def test_a_model_that_changes_its_labels_keeps_its_own_loss():
    model = build("llama")
    model.register_forward_pre_hook(
        lambda _model, args, kwargs: (args, kwargs | {"labels": kwargs["labels"].roll(1, 1)}), with_kwargs=True
    )
    objective = verified(model)
    assert not objective.fused_head.enabled
    assert objective.fused_head.problem == "the model changes its labels before the loss"


def test_metrics_and_heads_with_a_bias_are_not_fused():
    assert verified(build("llama"), metrics={"first": lambda outputs, _batch: outputs.logits}).fused_head is None
    model = build("llama")
    model.lm_head = nn.Linear(32, 67).double()
    assert verified(model).fused_head is None
