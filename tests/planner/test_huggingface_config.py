"""Hugging Face configs: parameter counts equal those of the models' own code, and a bad file is a one-line error."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.base.config import PRESETS
from meshwright.base.hardware.cluster import preset_cluster
from meshwright.base.models import registry
from meshwright.base.models.config_fields import MAX_CONFIG_BYTES
from meshwright.base.models.registry import model_architecture, model_spec, write_huggingface_config
from meshwright.errors import ConfigError
from meshwright.planner.workload.huggingface_config import FAMILIES, parse_huggingface_config
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.resolve_model import resolve_model
from meshwright.planner.workload.workload_args import build_workload
from tests.kit.family_models import MODELS

COUNTED = json.loads((Path(__file__).parent / "huggingface_configs.json").read_text())
"""Configs with the parameter count of transformers 5.22 on the meta device; some have made-up sizes."""
MODEL_CARDS = {
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
"""Parameter counts on the models' cards."""
UNSUPPORTED = dict.fromkeys(("llama-biased", "llama-all-biased"), "attention_bias = true is not supported")
"""configs of a family that it does not compute, with the reason"""
LLAMA = COUNTED["llama-3-8b"]["config"]


def parse(config):
    return parse_huggingface_config(config, "config.json")


@pytest.mark.parametrize("name", COUNTED)
def test_parameter_count_equals_transformers(name):
    assert parse(COUNTED[name]["config"]).architecture.parameters == COUNTED[name]["parameters"]


@pytest.mark.parametrize("name", MODEL_CARDS)
def test_parameter_count_equals_the_model_card(name):
    assert COUNTED[name]["parameters"] == MODEL_CARDS[name]


@pytest.mark.parametrize("name", MODELS)
def test_the_exported_config_of_every_family_that_trains_is_planned(name):
    model = MODELS[name]
    published = parse(write_huggingface_config(model))
    parameters = sum(parameter.local_numel() for parameter in model_spec(model).parameters)
    assert published.architecture.parameters == parameters
    assert model_spec(published.model_config).parameters == model_spec(model).parameters


def test_exported_configs_cover_the_registry(tmp_path):
    assert {model.family for model in MODELS.values()} == set(registry.FAMILIES)
    (tmp_path / "g2").mkdir()
    tree = write_huggingface_config(next(model for model in MODELS.values() if model.family == "gemma2"))
    (tmp_path / "g2" / "config.json").write_text(json.dumps(tree))
    work = build_workload(str(tmp_path / "g2"))
    assert (work.model.name, work.base_config.model.family, work.notes[0][:13]) == ("g2", "gemma2", "assumed batch")


def test_every_model_family_has_a_counted_config():
    assert {row["config"]["model_type"] for row in COUNTED.values()} == set(FAMILIES)


def test_deepseek_v3_count_excludes_router_biases_and_mtp():
    published = parse(COUNTED["deepseek-v3"]["config"])
    architecture = published.architecture
    router_biases = architecture.moe_layers * architecture.experts  # buffers in the model's own code
    assert architecture.parameters + router_biases == 671_026_419_200
    assert published.notes[1:] == ("ignored: multi-token prediction layers (MTP)",)
    assert round(architecture.active_parameters / 1e9) == 38  # "37B activated" excludes the embedding


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_parameter_count_equals_its_parameter_shapes(preset):
    resolved = resolve_model(preset)
    assert resolved.architecture.parameters == sum(
        prod(parameter.shape) for parameter in model_spec(resolved.model_config).parameters
    )
    assert resolved.run_config is not None
    assert resolved.architecture == model_architecture(resolved.run_config.model, preset)


@pytest.mark.parametrize("name", COUNTED)
def test_config_of_a_family_has_the_same_architecture_or_gives_a_reason(name):
    published, family = parse(COUNTED[name]["config"]), COUNTED[name]["config"]["model_type"]
    if published.model_config is None:
        reason = published.notes[0].removeprefix("Meshwright cannot train it: config.json: ")
        assert reason == UNSUPPORTED.get(name, f'model_type = "{family}" is unknown')
        return
    assert name not in UNSUPPORTED
    assert published.model_config.family == family
    assert model_spec(published.model_config).parameter_count == COUNTED[name]["parameters"]
    assert model_architecture(published.model_config, published.architecture.name) == published.architecture


def test_rotary_settings_are_read_from_both_forms():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    older = parse(LLAMA | {"rope_scaling": scaling, "rope_theta": 500000.0})
    newer = parse({**LLAMA, "rope_theta": None, "rope_parameters": scaling | {"rope_theta": 500000.0}})
    assert older.notes == newer.notes == ()
    assert older.model_config == newer.model_config
    assert older.model_config.rope_theta == 500000.0
    assert older.model_config.options["rope_scaling"] == "llama3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, 'model_type = "mamba" is unknown; expected one of llama'),
        ({"model_type": 3}, "model_type = 3 has the wrong type"),
        ({"model_type": None}, "has no model_type"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "4096"}, 'hidden_size = "4096" has the wrong type'),
        ({"hidden_size": 4096.5}, "hidden_size = 4096.5 has the wrong type"),
        ({"hidden_size": True}, "hidden_size = true has the wrong type"),
        ({"hidden_size": 10**30}, "is out of range"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 is out of range"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1 is out of range"),
        ({"num_hidden_layers": 10**9}, "is out of range"),
        ({"num_attention_heads": 31}, "num_attention_heads = 31 does not divide hidden_size = 4096"),
        ({"num_key_value_heads": 7}, "num_key_value_heads = 7 does not divide"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"model_type": "mixtral"}, "has no num_local_experts"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "exceeds the 2 experts"),
    ],
)
def test_invalid_config_error_names_file_and_key_in_one_line(change, message):
    with pytest.raises(ConfigError) as raised:
        parse(LLAMA | change)
    assert message in str(raised.value)
    assert str(raised.value).startswith("config.json")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "qwen3-30b-a3b",
            {"mlp_only_layers": [48]},
            "mlp_only_layers = [48] is not supported; expected a list of layers",
        ),
        ("qwen3-30b-a3b", {"mlp_only_layers": [True]}, "mlp_only_layers = [true] is not supported"),
        ("qwen3-next", {"mlp_only_layers": {"0": 1}}, "mlp_only_layers"),
        ("qwen3-next", {"mlp_only_layers": [[10**400]]}, "mlp_only_layers"),
        ("qwen3-next", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0 is out of range"),
        ("qwen3-next", {"layer_types": ["sliding_attention"] * 48}, "expected 48 of full_attention, linear_attention"),
        ("gemma3-1b", {"layer_types": ["linear_attention"] * 26}, "expected 26 of full_attention, sliding_attention"),
        ("gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, "expected 24 of full_attention, sliding_attention"),
        ("gpt-oss-20b", {"layer_types": [{}] * 24}, "layer_types"),
        (
            "nemotron-3-nano",
            {"moe_shared_expert_intermediate_size": None},
            "has no moe_shared_expert_intermediate_size",
        ),
        ("nemotron-3-nano", {"moe_shared_expert_intermediate_size": -1}, "is out of range"),
        ("nemotron-3-nano", {"moe_latent_size": 1024}, "moe_latent_size = 1024 is not supported; expected null"),
        ("nemotron-3-nano", {"layers_block_type": ["mamba", [], "x"]}, "layers_block_type"),
        ("nemotron-3-nano", {"layers_block_type": ["mamba"] * 5000}, "is not supported"),
        ("nemotron-h-8b", {"use_bias": True}, "use_bias = true is not supported; expected false"),
        ("nemotron-h-8b", {"hybrid_override_pattern": None}, "has no hybrid_override_pattern"),
        ("jamba-v0.1", {"mamba_proj_bias": True}, "mamba_proj_bias = true is not supported"),
        ("jamba-v0.1", {"mamba_dt_rank": "many"}, "mamba_dt_rank"),
        ("deepseek-v3", {"n_shared_experts": 1 << 60}, "n_shared_experts"),
    ],
)
def test_layers_that_are_not_modelled_are_a_one_line_error(name, change, message):
    with pytest.raises(ConfigError) as raised:
        parse(COUNTED[name]["config"] | change)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_layers_without_experts_follow_from_a_qwen_config():
    def feed_forwards(name, **change):
        model = parse(COUNTED[name]["config"] | change).architecture
        return [model.block_kind(layer).ffn for layer in range(model.layers)]

    assert feed_forwards("qwen3-moe-dense-middle") == ["moe", "moe", "dense", "moe", "dense", "moe"]
    assert feed_forwards("qwen3-moe-every-third") == ["dense", "dense", "moe"] * 2
    assert feed_forwards("qwen3-next-dense-layers") == ["dense", "moe", "moe", "dense", "moe", "moe"]
    assert feed_forwards("qwen3-moe-every-third", mlp_only_layers=[5]) == ["dense", "dense", "moe"] + ["dense"] * 3
    assert parse(COUNTED["qwen3-moe-every-third"]["config"] | {"decoder_sparse_step": 7}).architecture.experts == 0


def test_shared_experts_may_be_of_any_width():
    model = parse(COUNTED["nemotron-shared-experts"]["config"]).architecture
    assert (model.expert_ffn, model.shared_ffn) == (10, 25)
    assert model.shared_expert_parameters == 2 * 32 * 25


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "has more than 64 levels of nesting"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "has a number with too many digits"),
        (b"[1]", "contains [1]"),
        (b" " * (MAX_CONFIG_BYTES + 1), "is larger than 1,048,576 bytes"),
    ],
)
def test_file_that_is_not_a_config_is_a_one_line_error(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        resolve_model(str(tmp_path))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_resolve_model_accepts_preset_run_file_config_and_folder(tmp_path):
    folder = tmp_path / "Meta-Llama-3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "own.toml").write_text("[model]\nlayers = 3\n")
    by_folder, by_file = resolve_model(str(folder)), resolve_model(str(folder / "config.json"))
    assert by_folder == by_file
    assert by_folder.architecture.name == "Meta-Llama-3-8B"
    assert by_folder.model_config.layers == 32
    assert by_folder.run_config is None
    run = resolve_model(str(tmp_path / "own.toml"), ["--steps=7"])
    assert (run.architecture.layers, run.run_config.steps, run.architecture.name) == (3, 7, "own")
    assert resolve_model("tiny", ["--model.layers=2"]).architecture.layers == 2
    for name in ("", "llama-9b", str(tmp_path / "none.json")):
        with pytest.raises(ConfigError, match="is neither a preset nor a file; expected tiny, small"):
            resolve_model(name)
    with pytest.raises(ConfigError, match="is a setting of a run"):
        resolve_model(str(folder), ["--steps=7"])


ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(COUNTED)), st.data())
def test_any_value_of_a_config_key_is_read_or_rejected(name, data):
    config = COUNTED[name]["config"]
    key = data.draw(st.sampled_from([*config, "rope_scaling", "rope_parameters", "mlp_only_layers", "head_dim"]))
    try:
        published = parse(config | {key: data.draw(ANY_VALUE)})
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert published.architecture.parameters > 0


def test_resolve_model_does_not_import_torch():
    code = "import sys, meshwright.planner.workload.resolve_model; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_pipeline_schedule_is_rejected():
    """The cost model must not assume the bubble of a schedule that it does not know."""
    job = PlannedJob.from_config(resolve_model("tiny").run_config, preset_cluster("h100"))
    with pytest.raises(ConfigError, match="unknown pipeline schedule 'chimera'; expected one of gpipe, 1f1b"):
        replace(job, schedule="chimera")


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-biased"])
def test_assumed_batch_and_sequence_of_a_config_are_noted(tmp_path, name):
    """Whether Meshwright trains the model or not; a preset and a run file have sizes of their own."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(COUNTED[name]["config"]))
    assert build_workload(str(path)).notes[-1] == "assumed batch: 1,024 samples of 4,096 tokens per step"
    assert build_workload(str(path), sequence=8192).notes[-1] == "assumed batch: 512 samples of 8,192 tokens per step"
    assert build_workload(str(path), batch=8).notes[-1] == "assumed sequence: 4,096 tokens per sample"
    assert not any(note.startswith("assumed") for note in build_workload(str(path), batch=8, sequence=512).notes)
    assert build_workload("llama-8b").notes == ()
