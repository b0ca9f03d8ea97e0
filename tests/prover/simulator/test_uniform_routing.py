"""The simulator routes the tokens of a user's experts evenly, and counts the all-to-alls of a balanced step."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from meshwright import simulate
from meshwright.base.config import BatchConfig, LayoutConfig, RunConfig

LAYERS, WIDTH, ACTIVE, EXPERTS, SEQUENCE, MICRO = 2, 16, 2, 4, 16, 2


class Samples:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index):
        tokens = np.random.default_rng(index).integers(0, 24, SEQUENCE + 1)
        return tokens[:-1], tokens[1:]


def token_loss(outputs, labels):
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")


def test_simulated_experts_of_a_transformers_model_exchange_every_token_four_times():
    config = MixtralConfig(
        vocab_size=24, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=ACTIVE,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    layout = LayoutConfig(replicate=2, shard="parameters", expert=2)
    run = RunConfig(batch=BatchConfig(global_=2 * MICRO, micro=MICRO), layout=layout)
    simulation = simulate(run, model=model, loss=token_loss, source=Samples())
    (total,) = [row for row in simulation.results[0].communication if row.axis == "expert"]
    rows = MICRO * SEQUENCE * ACTIVE * WIDTH * 4
    assert (total.collective, total.calls) == ("all_to_all", 5 * LAYERS)  # the counts, and rows and outputs both ways
    assert total.message_bytes == LAYERS * (4 * rows + EXPERTS * 8)
