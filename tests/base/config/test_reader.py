"""Tests of reading a config: precedence, conversion, errors in one line, and TOML in and out."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest

from meshwright.base.config import PRESETS, DataConfig, RunConfig, config_from_dict, config_to_toml, load_config
from meshwright.base.config.constraints import Range
from meshwright.base.config.reader import read_toml
from meshwright.errors import ConfigError

INVALID_OVERRIDES = {
    "--model.layer=3": "unknown key model.layer = 3; did you mean model.layers? expected one of vocab, width",
    "--fsdp.reshard_after_forward=maybe": "has the wrong type; expected true, false, or an integer",
    "--fsdp.reshard_after_forward=1": "is out of range; expected true, false, or from 2 to 1,048,576",
    "--modle.layers=3": "unknown key modle",
    "--model.layers=many": "model.layers = many has the wrong type; expected an integer",
    "--model.layers=2.5": "model.layers = 2.5 has the wrong type",
    "--model.layers=0": "model.layers = 0 is out of range; expected from 1 to",
    "--model.vocab=1": "model.vocab = 1 is out of range",
    "--model.heads=3": "model.heads = 3 does not divide model.width = 128",
    "--model.kv_heads=3": "model.kv_heads = 3 does not divide model.heads = 4; expected 1, 2, 4",
    "--model.tie=maybe": "model.tie = maybe has the wrong type; expected true or false",
    "--preset=huge": "preset = huge is unknown; expected one of tiny, small",
    "--seed=-1": "seed = -1 is out of range",
    "--data.kind=web": "data.kind = web is unknown; expected one of stdlib",
    "--data.kind=tokens": "data.path is empty",
    "--data.sequence=1": "data.sequence = 1 is out of range",
    "--data.mixture=3": "data.mixture = 3 is not a list",
    '--data.mixture=[{kind="text"}]': "data.mixture[0].path is empty",
    "--optimizer.lr=nan": "optimizer.lr = nan is not finite",
    "--optimizer.beta1=1": "optimizer.beta1 = 1 is out of range; expected from 0 to 0.999999",
    "--precision.compute=fp8": "precision.compute = fp8 is unknown; expected one of auto, fp32, bf16, fp16, fp64",
    "--eval.holdout=0.9": "eval.holdout = 0.9 is out of range",
    "--layout.replicate=0": "layout.replicate = 0 is out of range",
    "--launch.collective_timeout=1e300": "launch.collective_timeout = 1e300 is out of range",
    "--data.samples=100000000000000000000000": "is out of range",
    "launch.threads": "launch.threads has no value; expected launch.threads=VALUE",
}


@pytest.mark.parametrize("override", INVALID_OVERRIDES)
def test_invalid_override_raises_config_error_with_key_value_and_expectation(override):
    with pytest.raises(ConfigError) as raised:
        load_config(overrides=[override])
    assert INVALID_OVERRIDES[override] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_value_in_place_of_a_table_raises_config_error():
    with pytest.raises(ConfigError, match="model = 3 is a value; expected a table with vocab"):
        config_from_dict({"model": 3})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 3", "model = 3 is a value"),
        ("[model\nlayers=3", "is not TOML"),
        ("[model]\nlayers = '3'", 'model.layers = "3" has the wrong type'),
        ("steps = true", "steps = true has the wrong type"),
        ("surprise = 1", "unknown key surprise"),
        ("steps = 1_000_000_000_000_000_000_000", "steps = 1000000000000000000000 is out of range"),
        ("optimizer.lr = 1" + "0" * 400, "has the wrong type"),
        ("x = " + "[" * 5000 + "]" * 5000, "has too many levels of nesting"),
        ("steps = " + "9" * 5000, "is not TOML"),
        ("[model]\nwidth = 1048573\nheads = 3", "does not divide"),
        ("[batch]\nglobal = 1_000_000_000_000_000", "batch.global = 1000000000000000 is out of range"),
    ],
)
def test_invalid_run_file_raises_config_error(tmp_path, text, message):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert message in str(raised.value)


def test_missing_oversized_and_binary_run_files_are_named_in_the_error(tmp_path):
    (tmp_path / "huge.toml").write_bytes(b"#" * (2 << 20))
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    for name in ("missing.toml", "huge.toml", "binary.toml"):
        with pytest.raises(ConfigError, match=name):
            load_config(tmp_path / name)


def test_overrides_take_precedence_over_the_run_file_and_the_run_file_over_the_preset(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('preset = "small"\n[model]\nlayers = 3\nffn = 100\n')
    config = load_config(file, ["--model.layers=5"], ranks="4", steps="7")
    assert (config.model.layers, config.model.ffn, config.model.width) == (5, 100, 256)
    assert (config.layout.replicate, config.steps) == (4, 7)


@pytest.mark.parametrize("order", [1, -1])
def test_another_kind_of_data_replaces_the_source_of_the_file_and_no_other_setting(tmp_path, order):
    file = tmp_path / "run.toml"
    file.write_text('[data]\nkind = "text"\npath = "old.txt"\ntokenizer = "old.json"\nsequence = 16\n')
    config = load_config(file, ["--data.tokenizer=bytes", "--data.kind=stdlib"][::order])
    assert config.data == DataConfig(tokenizer="bytes", sequence=16)
    config = load_config(file, ["--data.mixture=[{kind='stdlib'}]", "--data.kind=jsonl", "--data.path=new"][::order])
    assert (config.data.kind, config.data.path, len(config.data.mixture)) == ("jsonl", "new", 1)


def test_zero_stages_are_aliases_of_layout_shard():
    assert load_config(overrides=["layout.shard=zero-3"]).layout.shard == "parameters"


def test_ranks_that_do_not_divide_by_the_other_degrees_raise_config_error():
    with pytest.raises(ConfigError, match="6 ranks are not divisible by tensor 4; expected 4 or 8 ranks"):
        load_config(overrides=["layout.tensor=4"], ranks=6)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_survives_a_round_trip_through_toml(preset):
    config = config_from_dict({"preset": preset})
    assert config_from_dict(tomllib.loads(config_to_toml(config))) == config


def test_data_mixture_survives_a_round_trip_through_toml():
    config = load_config(overrides=['--data.mixture=[{kind="synthetic", weight=2}, {kind="stdlib"}]'])
    assert len(config.data.mixture) == 2
    assert config_from_dict(tomllib.loads(config_to_toml(config))) == config


def test_text_with_quotes_and_newlines_survives_a_round_trip_through_toml():
    config = load_config(overrides=['--data.field=a "b"\nc\\d'])
    assert config_from_dict(tomllib.loads(config_to_toml(config))) == config


def test_default_config_is_the_tiny_preset():
    assert load_config() == RunConfig()


CHAIN = "a" + ".a" * 4000
HOSTILE_TOML = {
    "many long dotted keys": "".join(f"k{i}.{CHAIN} = 1\n" for i in range(30)),
    "long dotted headers": "".join(f"[k{i}.{CHAIN}]\n" for i in range(30)),
    "quoted parts": "".join(f"k{i}" + '."="' * 1500 + " = 1\n" for i in range(30)),
    "parts of digits": "".join(f"k{i}{'.1' * 3000} = 1\n" for i in range(30)),
    "inline tables": f"x = [{', '.join('{' + 'a.' * 1000 + 'a = 1}' for _ in range(100))}]",
}


@pytest.mark.parametrize("content", HOSTILE_TOML.values(), ids=HOSTILE_TOML)
def test_toml_whose_parsing_needs_quadratic_memory_is_refused_before_it_is_parsed(tmp_path, monkeypatch, content):
    (tmp_path / "run.toml").write_text(content)
    monkeypatch.setattr("tomllib.loads", lambda _: pytest.fail("the file was parsed"))
    with pytest.raises(ConfigError, match=r"run\.toml (has too many long dotted keys|is larger than 262,144 bytes)"):
        load_config(tmp_path / "run.toml")


def test_large_toml_of_numbers_and_paths_is_read(tmp_path):
    rows = ", ".join("[1.5, -2.5e3]" for _ in range(2000))
    (tmp_path / "run.toml").write_text(f'curve = [{rows}]\npath = "../../a.b/c.d"\n' + "# a. b. c.\n" * 1000)
    assert len(read_toml(tmp_path / "run.toml")["curve"]) == 2000


@pytest.mark.parametrize("content", ["x = " + "[" * 50_000, "x = " + "{a=" * 50_000])
def test_deeply_nested_toml_is_one_error(tmp_path, content):
    (tmp_path / "run.toml").write_text(content)
    with pytest.raises(ConfigError, match=r"run\.toml has too many levels of nesting"):
        load_config(tmp_path / "run.toml")


@pytest.mark.parametrize("value", ["[" * 50_000, "[{" + "a." * 50_000 + "a = 1}]"])
def test_hostile_value_on_the_command_line_is_one_error(value):
    with pytest.raises(ConfigError, match=r"data\.mixture = .{57}\.\.\. is not a list"):
        load_config(overrides=[f"--data.mixture={value}"])


def test_long_unknown_key_is_shortened(tmp_path):
    (tmp_path / "run.toml").write_text("x" * 100_000 + " = 1")
    with pytest.raises(ConfigError, match=r"^unknown key x{57}\.\.\. = 1"):
        load_config(tmp_path / "run.toml")


def numbers_without_a_maximum(kind, key=""):
    """The keys of integer and float settings below `kind` that have no maximum."""
    if dataclasses.is_dataclass(kind):
        for name, hint in get_type_hints(kind, include_extras=True).items():
            yield from numbers_without_a_maximum(hint, f"{key}.{name}".lstrip("."))
    elif get_origin(kind) is Annotated:
        inner, *marks = get_args(kind)
        if not any(isinstance(mark, Range) and mark.maximum is not None for mark in marks):
            yield from numbers_without_a_maximum(inner, key)
    elif get_args(kind):
        for part in get_args(kind):
            yield from numbers_without_a_maximum(part, key)
    elif kind in (int, float):
        yield key


def test_every_number_has_a_maximum():
    assert list(numbers_without_a_maximum(RunConfig)) == []


@pytest.mark.parametrize(
    "override",
    [
        "--model.layers=100_000_000",
        "--model.experts=1_000_000",
        "--model.heads=1_000_000",
        "--model.vocab=1_000_000_000",
        "--model.width=1_000_000_000",
        "--model.ffn=1_000_000_000",
        "--data.sequence=1_000_000_000",
        "--layout.tensor=10_000_000",
        "--batch.micro=1_000_000_000",
    ],
)
def test_impossible_size_is_out_of_range(override):
    key = override.removeprefix("--").partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)} = \S+ is out of range; expected from"):
        load_config(overrides=[override])


def test_layout_of_too_many_ranks_is_refused():
    with pytest.raises(ConfigError, match=r"the layout has 1,099,511,627,776 ranks; expected at most 1,048,576"):
        load_config(overrides=["--layout.replicate=1048576", "--layout.tensor=1048576"])
    with pytest.raises(ConfigError, match=r"--ranks = 2000000 is out of range"):
        load_config(ranks=2_000_000)


def test_run_file_of_parameter_groups_leaves_out_settings_without_a_value(tmp_path):
    config = load_config(overrides=['--optimizer.groups=[{pattern = "*.norm.*", lr_factor = 0.5}]'])
    path = tmp_path / "run.toml"
    path.write_text(config_to_toml(config))
    assert load_config(path) == config
