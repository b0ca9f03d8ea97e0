"""Published configs: parameters are counted as the models' own code counts them, and a stranger's file is refused in
one line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from meshwright.config import PRESETS
from meshwright.errors import ConfigError
from meshwright.planner.workload.architecture import Architecture
from meshwright.planner.workload.huggingface_config import FAMILIES, MAX_CONFIG_BYTES, parse_huggingface_config
from meshwright.planner.workload.resolve_model import resolve_model, trainable_config
from meshwright.topology.parameter_shapes import decoder_parameter_shapes

COUNTED = json.loads((Path(__file__).parent / "published.json").read_text())
"""Counted by transformers 5.22 on the meta device; what is named after no model has a shape of our own."""
PRINTED = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gpt2": 124_439_808,
    "gpt-neox-20b": 20_554_567_680,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
}
"""As the models' pages print them."""
LLAMA = COUNTED["llama-3-8b"]["config"]


def read(config):
    return parse_huggingface_config(config, "config.json")


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_of_the_models_own_code(name):
    assert read(COUNTED[name]["config"]).architecture.parameters == COUNTED[name]["parameters"]


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_are_those_on_the_models_page(name):
    assert COUNTED[name]["parameters"] == PRINTED[name]


def test_every_family_is_counted():
    assert {row["config"]["model_type"] for row in COUNTED.values()} == set(FAMILIES)


def test_deepseek_v3_is_counted_without_the_biases_of_its_routers_and_without_mtp():
    found = read(COUNTED["deepseek-v3"]["config"])
    biases = found.architecture.expert_layers * found.architecture.experts  # buffers, in the models' own code
    assert found.architecture.parameters + biases == 671_026_419_200
    assert found.left_out == ("layers that predict further tokens (MTP)",)
    assert round(found.architecture.active_parameters / 1e9) == 38  # "37B activated" leaves the embedding out


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_counted_as_its_parameters_are_laid_out(preset):
    found = resolve_model(preset)
    assert found.architecture.parameters == sum(
        prod(shape.shape) for shape in decoder_parameter_shapes(found.model_config)
    )
    assert found.run_config is not None
    assert found.architecture == Architecture.from_config(found.run_config.model, preset)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama-3-8b", None),
        ("llama-3.2-1b", None),
        ("mixtral-8x7b", None),
        ("mistral-7b", None),
        ("mistral-nemo", "our decoder has no heads of 128 beside a width of 5120 and 32 heads"),
        ("qwen2-7b", "our decoder has no biases"),
        ("qwen3-8b", "our decoder has no norms on queries and keys"),
        ("deepseek-v3", "our decoder has no latent attention (MLA)"),
        ("gpt2", "our decoder has no learned positions"),
    ],
)
def test_what_our_decoder_trains_has_the_same_parameters_and_what_it_does_not_is_said(name, reason):
    found = read(COUNTED[name]["config"])
    model, said = trainable_config(found)
    if reason:
        assert (model, said) == (None, reason)
    else:
        same = Architecture.from_config(model, found.architecture.name)
        assert same == replace(found.architecture, window=0)
        assert same.parameters == COUNTED[name]["parameters"]


def test_what_is_left_out_of_a_model_that_we_train_is_said():
    scaled = LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_theta": 500000.0}
    model, said = trainable_config(read(scaled))
    assert model.rope_theta == 500000.0
    assert said == 'left out: rotary positions are scaled ("llama3")'
    model, said = trainable_config(read(COUNTED["mistral-7b"]["config"]))
    assert said == "left out: attention looks back 4,096 tokens only"


def test_newer_files_keep_rotary_settings_in_a_table():
    newer = LLAMA | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    assert (read(newer).rope_theta, read(newer).left_out) == (500000.0, ())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, 'model_type = "mamba" is not known; allowed: llama'),
        ({"model_type": 3}, "model_type = 3 has the wrong type"),
        ({"model_type": None}, "has no model_type"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "4096"}, 'hidden_size = "4096" has the wrong type; allowed: a whole number'),
        ({"hidden_size": 4096.5}, "hidden_size = 4096.5 has the wrong type"),
        ({"hidden_size": True}, "hidden_size = true has the wrong type"),
        ({"hidden_size": 10**30}, "is out of range; allowed: from 1 to"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 is out of range"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1 is out of range"),
        ({"num_hidden_layers": 10**9}, "is out of range"),
        ({"num_attention_heads": 31}, "num_attention_heads = 31 does not divide hidden_size = 4096"),
        ({"num_key_value_heads": 7}, "num_key_value_heads = 7 does not divide"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_theta": float("nan")}, "rope_theta = NaN is not finite"),
        ({"rope_scaling": 8}, "rope_scaling = 8 is a value"),
        ({"model_type": "mixtral"}, "has no num_local_experts"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "exceeds the 2 experts"),
    ],
)
def test_a_file_that_cannot_be_is_refused_in_one_line_that_names_field_and_file(change, said):
    with pytest.raises(ConfigError) as refused:
        read(LLAMA | change)
    assert said in str(refused.value)
    assert str(refused.value).startswith("config.json")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2 mixes layers"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers = [3] is not known; allowed: the first layers"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers"),
    ],
)
def test_layers_in_an_order_that_plans_do_not_know_are_refused(change, said):
    with pytest.raises(ConfigError, match=said.replace("[", "\\[")):
        read(COUNTED["qwen3-30b-a3b"]["config"] | change)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "is not JSON"),
        (b"[1]", "holds [1]"),
        (b" " * (MAX_CONFIG_BYTES + 1), "is over 1,048,576 bytes"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(tmp_path, content, said):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        resolve_model(str(tmp_path))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_word_is_a_preset_a_run_file_a_config_or_its_folder(tmp_path):
    folder = tmp_path / "Meta-Llama-3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "own.toml").write_text("[model]\nlayers = 3\n")
    by_folder, by_file = resolve_model(str(folder)), resolve_model(str(folder / "config.json"))
    assert by_folder == by_file
    assert by_folder.architecture.name == "Meta-Llama-3-8B"
    assert by_folder.model_config.layers == 32
    assert by_folder.run_config is None
    own = resolve_model(str(tmp_path / "own.toml"), ["--steps=7"])
    assert (own.architecture.layers, own.run_config.steps, own.architecture.name) == (3, 7, "own")
    assert resolve_model("tiny", ["--model.layers=2"]).architecture.layers == 2
    for word in ("", "llama-9b", str(tmp_path / "none.json")):
        with pytest.raises(ConfigError, match="neither a preset nor a file; allowed: tiny, small"):
            resolve_model(word)
    with pytest.raises(ConfigError, match="is a setting of a run"):
        resolve_model(str(folder), ["--steps=7"])


ANYTHING = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=8),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(some.sampled_from(sorted(COUNTED)), some.data())
def test_whatever_stands_in_a_field_is_read_or_refused(name, data):
    config = COUNTED[name]["config"]
    key = data.draw(some.sampled_from([*config, "rope_scaling", "rope_parameters", "mlp_only_layers", "head_dim"]))
    try:
        found = read(config | {key: data.draw(ANYTHING)})
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert found.architecture.parameters > 0


def test_reading_imports_no_torch():
    code = "import sys, meshwright.planner.workload.resolve_model; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
