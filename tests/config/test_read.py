"""Settings come in, mistakes come out as one line with the key, the value and what is allowed."""

from __future__ import annotations

import tomllib

import pytest

from meshwright.cli import main
from meshwright.config import PRESETS, RunConfig, config_from_dict, config_to_toml, load_config
from meshwright.errors import ConfigError

WRONG = {
    "--model.layer=3": "unknown key model.layer = 3; did you mean layers?",
    "--modle.layers=3": "unknown key modle",
    "--model.layers=many": "model.layers = many has the wrong type; allowed: a whole number",
    "--model.layers=2.5": "model.layers = 2.5 has the wrong type",
    "--model.layers=0": "model.layers = 0 is out of range; allowed: from 1 to",
    "--model.vocab=1": "model.vocab = 1 is out of range",
    "--model.heads=3": "model.heads = 3 does not divide model.width = 128",
    "--model.kv_heads=3": "model.kv_heads = 3 does not divide model.heads = 4; allowed: 1, 2, 4",
    "--model.tie=maybe": "model.tie = maybe has the wrong type; allowed: true or false",
    "--preset=huge": "preset = huge is not known; allowed: tiny, small",
    "--seed=-1": "seed = -1 is out of range",
    "--data.kind=web": "data.kind = web is not known; allowed: stdlib",
    "--data.kind=tokens": "data.path is empty",
    "--data.sequence=1": "data.sequence = 1 is out of range",
    "--data.mixture=3": "data.mixture = 3 is not a list",
    '--data.mixture=[{kind="text"}]': "data.mixture[0].path is empty",
    "--batch.micro=3": "batch.micro = 3 does not divide a rank's 8 samples",
    "--batch.global=15": "does not divide over data-parallel degree 2; allowed: batch.global = 14 or 16, or degree",
    "--optimizer.lr=nan": "optimizer.lr = nan is not finite",
    "--optimizer.beta1=1": "optimizer.beta1 = 1 is out of range; allowed: from 0 to 0.999999",
    "--precision.compute=fp8": "precision.compute = fp8 is not known; allowed: fp32, bf16, fp16, fp64",
    "--eval.holdout=0.9": "eval.holdout = 0.9 is out of range",
    "--layout.replicate=0": "layout.replicate = 0 is out of range",
    "--launch.threads": "'--launch.threads' has no value; allowed: --launch.threads=VALUE",
    "--launch.collective_timeout=1e300": "launch.collective_timeout = 1e300 is out of range",
    "--data.samples=100000000000000000000000": "is out of range",
    "--stepz=3": "Unrecognized options",
}


@pytest.mark.parametrize("word", WRONG)
def test_a_wrong_config_is_refused_in_one_line_with_exit_2(word, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", word])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.count("\n") == 1
    assert WRONG[word] in said


def test_a_table_given_as_a_value_is_refused():
    with pytest.raises(ConfigError, match="model = 3 is a value"):
        config_from_dict({"model": 3})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = 3", "model = 3 is a value"),
        ("[model\nlayers=3", "is not TOML"),
        ("[model]\nlayers = '3'", 'model.layers = "3" has the wrong type'),
        ("steps = true", "steps = true has the wrong type"),
        ("surprise = 1", "unknown key surprise"),
        ("steps = 1_000_000_000_000_000_000_000", "steps = 1000000000000000000000 is out of range"),
        ("optimizer.lr = 1" + "0" * 400, "has the wrong type"),
        ("x = " + "[" * 5000 + "]" * 5000, "is not TOML"),
        ("steps = " + "9" * 5000, "is not TOML"),
        ("[model]\nwidth = 2147483647\nheads = 3", "does not divide"),
        ("[batch]\nglobal = 1_000_000_000_000_000", "batch.global = 1000000000000000 is out of range"),
    ],
)
def test_a_wrong_run_file_is_refused(tmp_path, text, said):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        load_config(file)
    assert said in str(refusal.value)


def test_a_missing_a_huge_and_a_binary_run_file_are_named(tmp_path, capsys):
    (tmp_path / "huge.toml").write_bytes(b"#" * (2 << 20))
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    for name in ("missing.toml", "huge.toml", "binary.toml"):
        with pytest.raises(SystemExit) as stop:
            main(["train", str(tmp_path / name)])
        assert stop.value.code == 2
        assert name in capsys.readouterr().err


def test_later_words_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('preset = "small"\n[model]\nlayers = 3\nffn = 100\n')
    config = load_config(file, ["--model.layers=5"], ranks="4", steps="7")
    assert (config.model.layers, config.model.ffn, config.model.width) == (5, 100, 256)
    assert (config.layout.replicate, config.steps) == (4, 7)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_survives_the_trip_through_toml(preset):
    config = config_from_dict({"preset": preset})
    assert config_from_dict(tomllib.loads(config_to_toml(config))) == config


def test_a_mixture_survives_the_trip_through_toml():
    config = load_config(overrides=['--data.mixture=[{kind="synthetic", weight=2}, {kind="stdlib"}]'])
    assert len(config.data.mixture) == 2
    assert config_from_dict(tomllib.loads(config_to_toml(config))) == config


def test_the_default_is_the_tiny_preset():
    assert load_config() == RunConfig()


def test_an_unknown_verb_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_hyphens_and_underscores_name_the_same_key():
    from meshwright.cli import underscored

    assert load_config(overrides=[underscored("--model.kv-heads=4")]).model.kv_heads == 4


def test_a_value_may_stand_in_the_next_word():
    from meshwright.cli import parted

    assert parted(["run.toml", "--seed", "5", "--model.tie", "True", "--steps", "3", "--batch.micro=2"]) == (
        ["run.toml", "--steps", "3"],
        ("--seed=5", "--model.tie=True", "--batch.micro=2"),
    )


def test_help_lists_every_key(capsys):
    main(["train", "--help"])
    said = capsys.readouterr().out
    for key in ("--batch.global", "--optimizer.lr", "--ddp.bucket_cap_mb", "--run DIR"):
        assert key in said
