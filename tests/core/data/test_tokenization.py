"""Tests of meshwright.core.data.tokenization: documents, their end-of-document token, bad lines and the cache."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from meshwright.base.config import DataConfig, SourceConfig
from meshwright.core.data import tokenization
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.prepare import cached_tokens
from meshwright.core.data.prepare.cached_tokens import file_digest
from meshwright.errors import DataError

WORDS = ["[UNK]", "the", "cat", "sat", "on", "mat"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def open_one(vocab: int = 256, separator: int | None = None, **settings):
    [source] = open_sources(DataConfig(sequence=4, **settings), vocab, separator)
    return source


def save_tokenizer(path, *special: str, template: str = "") -> str:
    """A word-level tokenizer.json with these special tokens, ids from 6; the template adds some to every text."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate([*WORDS, *special])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(list(special))
    if template:
        ids = [(name, tokenizer.token_to_id(name)) for name in special]
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=ids)
    tokenizer.save(str(path))
    return str(path)


def write_jsonl(path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
def test_tokenized_jsonl_documents_end_with_the_end_of_text_token(tmp_path, name):
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", name)
    path = write_jsonl(tmp_path / "t.jsonl", "the cat sat", "on the mat")
    (tmp_path / "link.json").symlink_to(tokenizer)
    for file in (tokenizer, str(tmp_path / "link.json")):
        source = open_one(vocab=7, kind="jsonl", path=path, tokenizer=file)
        assert source.ids.tolist() == [1, 2, 3, 6, 4, 1, 5, 6]


def test_end_of_text_token_of_the_post_processor_is_not_repeated(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", "<s>", "</s>", template="<s> $A </s>")
    path = write_jsonl(tmp_path / "t.jsonl", "the cat", "the mat")
    source = open_one(vocab=8, kind="jsonl", path=path, tokenizer=tokenizer)
    assert source.ids.tolist() == [6, 1, 2, 7, 6, 1, 5, 7]


def test_tokenized_text_files_end_with_the_end_of_text_token(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", "</s>", template="$A </s>")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("the cat\nsat\n")
    (tmp_path / "corpus" / "b.txt").write_text("the mat\n\n")
    source = open_one(vocab=7, kind="text", path=str(tmp_path / "corpus"), tokenizer=tokenizer)
    assert source.ids.tolist() == [1, 2, 3, 6, 1, 5, 6]  # a document is a file, not a line


def test_model_separator_ends_tokenized_documents(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", "</s>", "<sep>")
    settings = {
        "kind": "jsonl",
        "path": write_jsonl(tmp_path / "t.jsonl", "the cat", "the mat"),
        "tokenizer": tokenizer,
    }
    assert open_one(vocab=8, separator=7, **settings).ids.tolist() == [1, 2, 7, 1, 5, 7]
    named = open_one(vocab=8, separator=7, **settings, end_of_document="</s>")
    assert named.ids.tolist() == [1, 2, 6, 1, 5, 6]


def test_tokenizer_without_an_end_of_text_token_needs_end_of_document(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json")
    path = write_jsonl(tmp_path / "t.jsonl", "the cat sat", "on the mat")
    settings = {"vocab": 6, "kind": "jsonl", "path": path, "tokenizer": tokenizer}
    with pytest.raises(DataError, match="no known end-of-text token") as error:
        open_one(**settings)
    assert "data.end_of_document" in str(error.value)
    assert open_one(**settings, end_of_document="none").ids.tolist() == [1, 2, 3, 4, 1, 5]
    assert open_one(**settings, end_of_document="[UNK]").ids.tolist() == [1, 2, 3, 0, 4, 1, 5, 0]
    with pytest.raises(DataError, match="'<eos>' is not a token of"):
        open_one(**settings, end_of_document="<eos>")


def test_byte_level_jsonl_documents_end_with_a_zero_byte(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", "abc", "def")
    assert bytes(open_one(kind="jsonl", path=path).ids.astype(np.uint8)) == b"abc\0def\0"
    assert bytes(open_one(kind="jsonl", path=path, end_of_document="none").ids.astype(np.uint8)) == b"abcdef"


def test_data_tokenizer_is_the_default_of_every_source_of_a_mixture(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", "</s>")
    other = save_tokenizer(tmp_path / "other.json", "<pad>", "</s>")
    path = write_jsonl(tmp_path / "t.jsonl", "the cat sat", "on the mat")
    mixture = (SourceConfig(kind="jsonl", path=path), SourceConfig(kind="jsonl", path=path, tokenizer=other))
    default, explicit = open_sources(DataConfig(sequence=4, tokenizer=tokenizer, mixture=mixture), 256, None)
    assert default.ids.tolist() == [1, 2, 3, 6, 4, 1, 5, 6]
    assert explicit.ids.tolist() == [1, 2, 3, 7, 4, 1, 5, 7]
    byte_level, _ = open_sources(DataConfig(sequence=4, mixture=mixture), 256, None)
    assert byte_level.fingerprint() != default.fingerprint()  # the identity of a run covers the tokenizer


def test_cache_of_other_code_or_packages_is_not_used(tmp_path, cache, monkeypatch):
    (tmp_path / "t").write_text("the cat sat\non the mat\n")
    settings = {"kind": "text", "path": str(tmp_path / "t")}
    settings["tokenizer"] = save_tokenizer(tmp_path / "tokenizer.json", "</s>")
    current = tokenization.tokenizing_code()
    assert len({current, code_with(monkeypatch, chat=b"#"), code_with(monkeypatch, tokenizers="0")}) == 3
    open_one(vocab=7, **settings)
    monkeypatch.setattr(cached_tokens, "tokenizing_code", lambda: "another")
    open_one(vocab=7, **settings)
    assert len(list(cache.glob("*/tokens-00000.bin"))) == 2


def code_with(monkeypatch, chat=b"", tokenizers=""):
    """The digest for another source file of chat/, or another version of the tokenizers package."""
    read, version = Path.read_bytes, tokenization.version
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda file: read(file) + (chat if file.name == "sandbox.py" else b""))
        patch.setattr(tokenization, "version", lambda name: tokenizers or version(name))
        return tokenization.tokenizing_code.__wrapped__()


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_tokenized_files_are_cached(tmp_path, kind, cache):
    lines = ["the cat sat", "on the mat"]
    text = "\n".join(json.dumps({"text": line}) if kind == "jsonl" else line for line in lines) + "\n"
    (tmp_path / "t").write_text(text)
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", "</s>")
    settings = {"kind": kind, "path": str(tmp_path / "t"), "tokenizer": tokenizer}
    source = open_one(vocab=7, **settings)
    [file] = cache.glob("*/tokens-00000.bin")
    modified = file.stat().st_mtime_ns
    assert open_one(vocab=7, **settings).fingerprint() == source.fingerprint()
    assert file.stat().st_mtime_ns == modified


def test_bad_jsonl_line_is_an_error_or_quarantined_within_the_budget(tmp_path, cache):
    good = json.dumps({"text": "abcdefgh"})
    (tmp_path / "t.jsonl").write_text("\n".join([good, "{broken", good, '{"other": 1}']) + "\n")
    settings = {"kind": "jsonl", "path": str(tmp_path / "t.jsonl")}
    with pytest.raises(DataError, match=r"t\.jsonl line 2 cannot be decoded"):
        open_one(**settings)
    with pytest.raises(DataError, match=r"t\.jsonl line 4 cannot be decoded: the record has no text under 'text'"):
        open_one(**settings, on_bad_sample="quarantine", bad_sample_budget=1)
    source = open_one(**settings, on_bad_sample="quarantine", bad_sample_budget=2)
    assert bytes(source.ids.astype(np.uint8)) == b"abcdefgh\0abcdefgh\0"
    assert not list(cache.glob("*/.parts"))


def test_blank_jsonl_lines_are_skipped(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "abcdef"}\n\n  \n')
    assert bytes(open_one(kind="jsonl", path=str(tmp_path / "t.jsonl")).ids.astype(np.uint8)) == b"abcdef\0"


def test_unpaired_surrogate_is_a_bad_line(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "\\ud800"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl line 1 cannot be decoded"):
        open_one(kind="jsonl", path=str(tmp_path / "bad.jsonl"))
    settings = {"on_bad_sample": "quarantine", "bad_sample_budget": 1}
    with pytest.raises(DataError, match=r"bad\.jsonl is empty: no line could be decoded"):
        open_one(kind="jsonl", path=str(tmp_path / "bad.jsonl"), **settings)


def test_invalid_tokenizer_file_is_an_error(tmp_path):
    (tmp_path / "t.txt").write_text("hello")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer .*bad\.json cannot be read"):
        open_one(kind="text", path=str(tmp_path / "t.txt"), tokenizer=str(tmp_path / "bad.json"))


def damage_half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 8 * 4])


def damage_one_byte(file):
    content = bytearray(file.read_bytes())
    content[1] ^= 1
    file.write_bytes(content)


def damage_index(file):
    index = file.with_name("index.json")
    index.write_bytes(index.read_bytes()[:-9])


def damage_type(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "damage",
    [damage_half, damage_one_byte, damage_index, damage_type, lambda file: file.write_bytes(b"")],
)
def test_damaged_cache_is_written_again_with_a_note(tmp_path, cache, damage):
    path = write_jsonl(tmp_path / "t.jsonl", "abcdefgh", "ijklmnop")
    source = open_one(kind="jsonl", path=path)
    assert source.notes == ()
    fingerprint = source.fingerprint()
    [file] = cache.glob("*/tokens-00000.bin")
    damage(file)
    repaired = open_one(kind="jsonl", path=path)
    assert repaired.fingerprint() == fingerprint
    assert bytes(repaired.ids.astype(np.uint8)) == b"abcdefgh\0ijklmnop\0"
    [note] = repaired.notes
    assert "written again" in note
    assert open_one(kind="jsonl", path=path).notes == ()


def test_cache_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1])
    open_one(kind="jsonl", path=write_jsonl(tmp_path / "t.jsonl", "abcdefgh"))
    part, shard, index = ["replace"], ["fsync", "replace"], ["fsync", "replace", "fsync"]
    assert calls == [*part, *shard, *shard, "fsync", *index]  # the files and their names, the folder, the index


def test_two_processes_that_tokenize_at_once_both_succeed(tmp_path, cache):
    path = write_jsonl(tmp_path / "t.jsonl", *["abcdefgh"] * 2000)
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        assert len(set(pool.map(fingerprint_of, [path] * 4, chunksize=1))) == 1
    [folder] = cache.iterdir()
    assert sorted(file.name for file in folder.iterdir()) == [
        ".lock",
        "documents-00000.bin",
        "index.json",
        "tokens-00000.bin",
    ]


def fingerprint_of(path):
    return open_one(kind="jsonl", path=path).fingerprint()


def test_cache_of_a_large_file_is_not_used_after_the_file_was_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.core.data.token_files.MAX_FULL_SCAN_BYTES", 0)
    monkeypatch.setattr("meshwright.core.data.prepare.cached_tokens.MAX_FULL_SCAN_BYTES", 0)
    path = tmp_path / "t.jsonl"
    line = json.dumps({"text": "x" * 100}) + "\n"
    path.write_text(line * 300_000)  # larger than 64 blocks of 64 KiB
    before = file_digest(path)
    with path.open("r+b") as file:
        file.seek(100_000)
        file.write(b"y")
    os.utime(path, ns=(0, 0))
    assert file_digest(path) != before


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_tokenizer_that_is_not_a_regular_file_is_an_error(tmp_path, make):
    (tmp_path / "t.txt").write_text("hello")
    make(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read: .*not a regular file"):
        open_one(kind="text", path=str(tmp_path / "t.txt"), tokenizer=str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("kind", ["jsonl", "chat"])
def test_named_end_of_document_needs_a_tokenizer(tmp_path, kind):
    path = write_jsonl(tmp_path / "t.jsonl", "the cat")
    with pytest.raises(DataError, match="the end of a document is 'zzz', and the source has no tokenizer"):
        open_one(kind=kind, path=path, end_of_document="zzz")


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("text", "try another data.path"),
        ("jsonl", "try another data.path or data.field"),
        ("chat", "try another data.path or data.chat_template"),
    ],
)
def test_hint_for_empty_data_names_the_keys_of_its_kind(tmp_path, kind, hint):
    (tmp_path / "t.jsonl").write_text("\n")
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", "</s>")
    with pytest.raises(DataError, match="is empty") as error:
        open_one(kind=kind, path=str(tmp_path / "t.jsonl"), tokenizer=tokenizer)
    assert error.value.hint == hint
