"""Tests of core.data.sample_text and `data show --text`: documents, decoders, and text that is safe to print."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from meshwright.base.cli.main import dispatch
from meshwright.core.data.prepare.command import prepare_folder
from meshwright.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write_run(folder, **data):
    """A run file whose first step reads all samples of this data: sequences of four tokens."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in ({"sequence": 4} | data).items()]
    text = "\n".join(["steps = 1", "[batch]", "global = 2", "[eval]", "holdout = 0.0", "[data]", *lines])
    (folder / "run.toml").write_text(text)
    return str(folder / "run.toml")


def show(capsys, run, *options):
    dispatch(["data", "show", run, "--step", "0", "--text", *options])
    return capsys.readouterr().out


def texts(capsys, run, *options):
    answer = json.loads(show(capsys, run, "--json", *options))
    assert sorted(answer["samples"]) == [
        sample["sample"] for sample in sorted(answer["texts"], key=lambda s: s["sample"])
    ]
    return {sample["source_index"]: sample["documents"] for sample in answer["texts"]}


def save_tokenizer(path):
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2, "three": 3, "</s>": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path))
    return str(path)


def test_documents_of_byte_data_are_marked_and_printable(folder, capsys):
    (folder / "t.jsonl").write_text('{"text": "ab"}\n{"text": "\\u001b[2J"}\n{"text": "\\tz"}\n')
    run = write_run(folder, kind="jsonl", path=str(folder / "t.jsonl"))
    assert texts(capsys, run) == {0: ["ab", "\x1b"], 1: ["[2J"]}
    shown = show(capsys, run)
    assert "ab\n--- end of document ---\n?" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("kind", ["jsonl", "shards"])
def test_tokenized_samples_are_decoded(folder, capsys, kind):
    tokenizer = save_tokenizer(folder / "tokenizer.json")
    (folder / "t.jsonl").write_text('{"text": "one two three"}\n{"text": "two one"}\n{"text": "three"}\n')
    path = str(folder / "t.jsonl")
    if kind == "shards":
        prepare_folder([path], folder / "out", tokenizer, "auto", "text", "", "auto", 1, 5, 0)
        run = write_run(folder, kind=kind, path=str(folder / "out"))
    else:
        run = write_run(folder, kind=kind, path=path, tokenizer=tokenizer)
    assert texts(capsys, run) == {0: ["one two three"], 1: ["two one", "three"]}


def test_packed_chats_are_shown_without_their_padding(folder, capsys):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (folder / "c.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 3)
    run = write_run(folder, kind="chat", path=str(folder / "c.jsonl"), sequence=150)
    assert [[text.count("assistant") for text in found] for found in texts(capsys, run).values()] == [[1, 1], [1]]


def test_token_files_need_a_tokenizer(folder, capsys):
    np.array([1, 2, 4, 3, 1, 1, 1, 1, 2], np.uint16).tofile(folder / "t.bin")
    run = write_run(folder, kind="tokens", path=str(folder / "t.bin"))
    with pytest.raises(ConfigError, match="token files do not name their tokenizer; try --tokenizer FILE"):
        show(capsys, run)
    tokenizer = save_tokenizer(folder / "tokenizer.json")
    assert texts(capsys, run, "--tokenizer", tokenizer) == {0: ["one two", "three"], 1: ["one one one one"]}


def test_synthetic_data_has_no_text(folder, capsys):
    with pytest.raises(ConfigError, match="random token ids"):
        show(capsys, write_run(folder, kind="synthetic", samples=9))


def test_data_commands_do_not_import_torch(folder):
    (folder / "t.txt").write_text("some text\n")
    run = write_run(folder, kind="shards", path=str(folder / "out"))
    code = (
        "import sys; from meshwright.base.cli.main import dispatch;"
        f"dispatch(['data', 'prepare', {str(folder / 't.txt')!r}, '--out', {str(folder / 'out')!r}]);"
        f"dispatch(['data', 'show', {run!r}, '--step', '0', '--text']);"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "some" in done.stdout
