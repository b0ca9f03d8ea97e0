"""Options and sizes that a family does not have are refused."""

from __future__ import annotations

import pytest

from meshwright.base.config import load_config
from meshwright.base.models.registry import model_spec, validate_family
from meshwright.errors import ConfigError

DEEPSEEK = ["--model.family=deepseek_v2", "--model.kv_heads=4", "--model.experts=4"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.experts=4"], "model.experts = 4, and the family gemma2 has no experts"),
        (["--model.options.windows=4"], "unknown key model.options.windows = 4; did you mean model.options.window?"),
        (["--model.options.window=0"], "model.options.window = 0 is out of range; expected"),
        (["--model.options.window=wide"], 'model.options.window = "wide" has the wrong type; expected an integer'),
        (["--model.options.head_size=7"], "model.options.head_size = 7 is odd; expected an even number"),
        (["--model.family=qwen3", "--model.options.head_size=7"], "model.options.head_size = 7 is odd"),
        (["--model.family=qwen2", "--model.options.window=4"], "window is set, and the family qwen2 has no options"),
        (["--model.family=mistral", "--model.experts=4"], "model.experts = 4, and the family mistral has no experts"),
        (["--model.family=mixtral"], "model.experts = 0, and the family mixtral has experts"),
        (["--model.family=mixtral", "--model.experts=4", "--model.experts_shared=1"], "has no shared experts"),
        (
            ["--model.family=llama", "--model.options.rope_high_frequency_factor=1.0"],
            "rope_high_frequency_factor = 1.0 is not above model.options.rope_low_frequency_factor = 1.0",
        ),
        (
            ["--model.family=llama", "--model.options.rope_scaling=yarn"],
            'model.options.rope_scaling = "yarn" is unknown; expected one of none, linear, llama3',
        ),
        (["--model.family=gpt2"], "model.kv_heads = 2, and the family gpt2 has a key and a value head per query head"),
        (["--model.family=gpt2", "--model.kv_heads=4", "--model.rope_theta=5"], "model.rope_theta = 5, and the family"),
        (["--model.family=gpt2", "--model.options.positions=0"], "model.options.positions = 0 is out of range"),
        (["--model.family=deepseek_v2"], "model.experts = 0, and the family deepseek_v2 has experts"),
        ([*DEEPSEEK, "--model.kv_heads=2"], "model.kv_heads = 2, and the family deepseek_v2 has"),
        ([*DEEPSEEK, "--model.options.dense_layers=4"], "dense_layers = 4 leaves no experts to model.layers = 4"),
        ([*DEEPSEEK, "--model.options.qk_rope_head_dim=3"], "qk_rope_head_dim = 3 is odd; expected an even number"),
        ([*DEEPSEEK, "--model.options.v_head_dim=99"], "v_head_dim = 99 exceeds the 48 dimensions of a key"),
        ([*DEEPSEEK, "--model.options.groups=3"], "groups = 3, of which groups_active = 1, do not divide"),
        ([*DEEPSEEK, "--model.options.groups=4"], "model.experts_active = 2 exceeds the 1 experts of"),
        ([*DEEPSEEK, "--model.options.rope_beta_fast=0.5"], "rope_beta_fast = 0.5 is not above"),
        ([*DEEPSEEK, "--model.options.rope_scaling=yarn", "--model.rope_theta=1"], "model.rope_theta = 1 with"),
        (["--model.family=gemma"], "model.family = gemma is unknown; expected one of llama, gemma2"),
        (["--model.family=llama", "--model.options.window=4"], "unknown key model.options.window = 4; expected"),
    ],
)
def test_wrong_options_are_refused(overrides, message):
    with pytest.raises(ConfigError) as error:
        model_spec(load_config(overrides=["--model.family=gemma2", *overrides]).model)
    assert message in str(error.value)


def test_sequence_beyond_the_learned_positions_is_refused():
    overrides = ["--model.family=gpt2", "--model.kv_heads=4", "--model.options.positions=32", "--data.sequence=33"]
    with pytest.raises(ConfigError) as error:
        validate_family(load_config(overrides=overrides))
    assert "data.sequence = 33 exceeds the 32 positions of the family gpt2" in str(error.value)
