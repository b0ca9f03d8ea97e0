"""A family without a reference is proven against its own module, which has no load balancing of experts."""

from __future__ import annotations

from meshwright.prover.custom.family_model import family_custom_model, without_balancing
from tests.kit.small_run import load_cpu_config


def test_proof_runs_of_experts_have_neither_the_balancing_loss_nor_a_routing_bias():
    config = load_cpu_config(overrides=["--model.family=mixtral", "--model.experts=4"])
    model = without_balancing(config).model
    assert (model.router_aux_loss, model.router_bias_rate) == (0.0, 0.0)
    assert model.experts == config.model.experts
    dense = load_cpu_config(overrides=["--model.family=gpt2", "--model.kv_heads=4"])
    assert without_balancing(dense) == dense


def test_spec_of_a_family_with_dense_and_expert_blocks_names_modules_of_the_wrapped_model():
    overrides = ["--model.family=deepseek_v2", "--model.kv_heads=4", "--model.experts=4"]
    custom = family_custom_model(load_cpu_config(overrides=overrides))
    names = dict(custom.module.named_modules())
    assert "model.decoder.blocks.0.dense_ffn" in names
    assert "model.decoder.blocks.1.ffn.bank" in names
    assert custom.spec.experts == "model.decoder.blocks.*.ffn.bank"
