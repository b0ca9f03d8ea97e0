"""`sample` on checkpoints of any layout and on exports; text is streamed as complete characters."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import meshwright
from meshwright.base.cli import main
from meshwright.core.api.evaluation import evaluate
from meshwright.core.checkpoint.inspect import find_published
from meshwright.core.cli.sample import TerminalStream
from meshwright.core.generate.generation import generate
from meshwright.core.generate.load import load_model
from meshwright.core.generate.settings import SamplingConfig
from meshwright.core.generate.text import ByteStream, TokenizerStream, find_end_tokens, open_codec
from meshwright.errors import CheckpointError, ConfigError, IdentityError
from tests.kit.small_run import small_config

PROMPTS = ["def ", "é", "class A"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("sample") / "run"
    layout = ["--layout.tensor=2", "--layout.replicate=1", "--model.vocab=260"]
    meshwright.train(small_config(*layout, "--data.kind=stdlib", steps=3, ranks=None), run=folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def samples(run):
    return meshwright.sample(run, PROMPTS, tokens=12, seed=5)


def test_tokens_are_those_of_the_weights_of_the_checkpoint(run, samples):
    loaded = load_model(run)
    assert loaded.step == 3
    codec = open_codec(loaded.config)
    steps = list(
        generate(loaded.model, loaded.spec, [list(p.encode()) for p in PROMPTS], SamplingConfig(12, seed=5), {0})
    )
    for row, sample in enumerate(samples):
        tokens = [step[row] for step in steps if step[row] not in (None, codec.end_token)]
        assert (sample.prompt, sample.tokens, sample.checkpoint) == (PROMPTS[row], tokens, "step-00000003.a0001")
        assert sample.text == bytes(t for t in tokens if t < 256).decode(errors="replace") or max(tokens) > 255
        assert sample.ended == (len(tokens) < 12)


def test_an_exported_folder_gives_the_same_text(run, samples, tmp_path):
    main(["checkpoint", "export", str(run), "--to", str(tmp_path / "export"), "--json"])
    exported = meshwright.sample(tmp_path / "export", PROMPTS, tokens=12, seed=5)
    assert [sample.tokens for sample in exported] == [sample.tokens for sample in samples]
    with pytest.raises(ConfigError, match="is an exported folder, which has one set of weights; try without step"):
        meshwright.sample(tmp_path / "export", "a", step=3)


def test_command_line_prints_prompts_with_their_texts_and_json(run, samples, capsys):
    arguments = ["sample", str(run), "--tokens=12", "--seed=5", *(f"--prompt={prompt}" for prompt in PROMPTS)]
    main([*arguments, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in answer["samples"]] == [sample.tokens for sample in samples]
    main(arguments)
    out = capsys.readouterr().out
    assert all(prompt in out for prompt in PROMPTS)
    assert not [letter for letter in out if not letter.isprintable() and letter not in "\n\t"]


def test_text_of_later_prompts_waits_for_earlier_ones(capsys):
    stream = TerminalStream(("A:", "B:"))
    for row, text in ((0, "one"), (1, "\x1b[2J"), (0, " two"), (1, "x")):
        stream.add(row, text)
    stream.finish()
    assert capsys.readouterr().out == "A:one two\n\nB:\\x1b[2Jx\n"


def test_bytes_are_shown_when_their_character_is_complete():
    stream = ByteStream()
    assert [stream.add(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert stream.add(0xC3) + stream.add(ord("b")) == "\ufffdb"
    assert stream.add(300) == "\ufffd"
    assert stream.add(0xE2) + stream.finish() == "\ufffd"


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)} | {"</s>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_tokens_of_a_tokenizer_are_shown_when_their_character_is_complete():
    tokenizer = byte_tokenizer()
    stream = TokenizerStream(lambda ids: tokenizer.decode(ids))
    pieces = [stream.add(token) for token in tokenizer.encode("aé €x").ids]
    assert pieces == ["a", "", "é", " ", "", "", "€", "x"]
    assert stream.finish() == ""


def test_codec_uses_the_tokenizer_of_the_data_or_of_the_command(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = small_config(ranks=1)
    codec = open_codec(config, tokenizer=str(tmp_path))
    assert (codec.end_token, codec.encode("ab")) == (256, byte_tokenizer().encode("ab").ids)
    assert open_codec(config, folder=tmp_path).end_token == 256
    assert open_codec(config).encode("é") == [0xC3, 0xA9]


def test_end_tokens_are_those_of_the_folder_of_the_weights(tmp_path):
    config = small_config(f"--init_from={tmp_path}", ranks=1)
    assert find_end_tokens(config) == find_end_tokens(small_config(ranks=1)) == set()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert find_end_tokens(config) == find_end_tokens(small_config(ranks=1), tmp_path) == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert find_end_tokens(config) == {7, 9}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["a"]}')
    with pytest.raises(ConfigError, match=r"has eos_token_id = .*; expected a token id or a list of token ids"):
        find_end_tokens(config)


def test_a_text_ends_at_the_end_tokens_of_an_exported_folder(run, samples, tmp_path):
    main(["checkpoint", "export", str(run), "--to", str(tmp_path / "export"), "--json"])
    end = samples[0].tokens[1]
    (tmp_path / "export" / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    [ended] = meshwright.sample(tmp_path / "export", PROMPTS[0], tokens=12, seed=5)
    assert (ended.tokens, ended.ended) == (samples[0].tokens[: samples[0].tokens.index(end)], True)


def test_a_damaged_checkpoint_and_a_missing_step_are_named(run, tmp_path, capsys):
    with pytest.raises(CheckpointError, match="has no checkpoint of step 7; expected one of the steps: 3"):
        meshwright.sample(run, "a", step=7)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shard = next((copy / find_published(copy, None)[0].folder).glob("*.shard"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(SystemExit) as exit:
        main(["sample", str(copy), "--prompt=a"])
    assert exit.value.code == 4
    assert "step-00000003.a0001 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN"], "the following arguments are required: --prompt"),
        (["RUN", "--prompt="], "prompt 0 has no token; expected some text"),
        (["RUN", "--prompt=a\udcff"], "prompt 1 is not valid UTF-8"),
        (["RUN", "--prompt=a", "--tokens=99999999999"], "--tokens 99999999999 is out of range"),
        (["RUN", "--prompt=a", "--temperature=-1"], "--temperature -1.0 is out of range; expected 0 or more"),
    ],
)
def test_wrong_arguments_exit_with_2(run, arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["sample", *(str(run) if argument == "RUN" else argument for argument in arguments)])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_low_rank_adaptation_reads_its_frozen_parameters(tmp_path):
    lora = ["--lora.rank=2", '--lora.targets=["*.attention.q"]', "--data.kind=stdlib", "--model.vocab=260"]
    meshwright.train(small_config(*lora, steps=2, ranks=1), run=tmp_path / "run", quiet=True)
    loaded = load_model(tmp_path / "run")
    names = [name for name, _ in loaded.model.named_parameters()]
    assert "decoder.blocks.0.attention.q.lora_b" in names
    assert loaded.model.get_parameter("decoder.blocks.0.attention.q.lora_b").abs().max() > 0
    file = tmp_path / "run" / "run.toml"
    file.write_text("seed = 1\n" + "".join(line for line in file.open() if not line.startswith("seed = ")))
    with pytest.raises(CheckpointError, match="refers to frozen parameters with digest"):
        load_model(tmp_path / "run")


def test_the_scale_of_factors_is_that_of_the_checkpoint(tmp_path):
    lora = ["--lora.rank=2", "--lora.alpha=8", '--lora.targets=["*.attention.q"]', "--eval.holdout=0.1"]
    meshwright.train(small_config(*lora, steps=2, ranks=1), run=tmp_path / "run", quiet=True)
    before = evaluate(tmp_path / "run", samples=4)
    file = tmp_path / "run" / "run.toml"
    file.write_text(file.read_text().replace("alpha = 8.0", "alpha = 99.0"))
    assert load_model(tmp_path / "run").config.lora.alpha == 8.0
    assert evaluate(tmp_path / "run", samples=4, overrides=["lora.alpha=8"]).loss == before.loss
    for override, message in (
        ("lora.alpha=99", "step-00000002.a0001 is of another model: lora.alpha = 8.0, and lora.alpha=99.0 is given"),
        ("--model.norm_eps=0.1", "is of another model: model.norm_eps = 1e-0., and model.norm_eps=0.1 is given"),
    ):
        with pytest.raises(IdentityError, match=message):
            evaluate(tmp_path / "run", samples=4, overrides=[override])
