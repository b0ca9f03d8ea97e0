"""Tests of core.data.file_sources and token_files: every kind of file source, its fingerprint and its errors."""

from __future__ import annotations

import os

import numpy as np
import pytest

from meshwright.base.config import DataConfig, SourceConfig, load_config
from meshwright.core.data import token_files
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.source import ConcatenatedSource
from meshwright.core.data.token_files import TokenSource, raise_if_changed
from meshwright.errors import DataError


def open_one(vocab: int = 256, **settings):
    [source] = open_sources(DataConfig(sequence=4, **settings), vocab, None)
    return source


def test_default_source_is_the_standard_library():
    assert SourceConfig().kind == "stdlib"
    [source] = open_sources(DataConfig(), 256, None)
    assert len(source) > 10_000
    assert "import" in bytes(source.ids[:100_000]).decode()
    assert source.fingerprint() == open_sources(DataConfig(), 256, None)[0].fingerprint()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_file_gives_samples_with_the_next_token_as_label(tmp_path, dtype):
    np.arange(13, dtype=dtype).tofile(tmp_path / "t.bin")
    source = open_one(kind="tokens", path=str(tmp_path / "t.bin"), dtype=dtype)
    assert len(source) == 3
    tokens, labels = source[2]
    assert (tokens.tolist(), labels.tolist()) == ([8, 9, 10, 11], [9, 10, 11, 12])
    assert isinstance(source.ids, np.memmap)


@pytest.mark.parametrize("kind", ["tokens", "text", "jsonl"])
def test_data_files_may_be_symbolic_links(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    content = {"tokens": bytes(26), "text": b"thirteen chars", "jsonl": b'{"text": "thirteen chars"}'}
    (tmp_path / "blob").write_bytes(content[kind])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "shard").symlink_to("../blob")
    expected = open_one(kind=kind, path=str(tmp_path / "blob"))
    for path in (tmp_path / "folder", tmp_path / "folder" / "shard"):
        assert open_one(kind=kind, path=str(path)).fingerprint() == expected.fingerprint()


def test_folder_of_token_files_is_one_source(tmp_path):
    for name, start in (("a.bin", 0), ("b.bin", 100)):
        np.arange(start, start + 9, dtype=np.uint16).tofile(tmp_path / name)
    source = open_one(kind="tokens", path=str(tmp_path))
    assert len(source) == 4
    assert [int(source[i][0][0]) for i in range(4)] == [0, 4, 100, 104]
    assert len(open_one(kind="tokens", path=str(tmp_path / "a*"))) == 2


def test_token_file_with_a_truncated_id_is_an_error(tmp_path):
    (tmp_path / "t.bin").write_bytes(b"123")
    with pytest.raises(DataError, match=r"t\.bin has 3 bytes, which is not a multiple of 2"):
        open_one(kind="tokens", path=str(tmp_path / "t.bin"))


@pytest.mark.parametrize("count", [0, 3])
def test_source_shorter_than_one_sample_is_an_error(tmp_path, count):
    np.arange(count, dtype=np.uint16).tofile(tmp_path / "t.bin")
    with pytest.raises(DataError, match=r"t\.bin is empty"):
        open_one(kind="tokens", path=str(tmp_path / "t.bin"))


def test_token_id_out_of_the_vocabulary_is_an_error(tmp_path):
    np.full(100, 300, dtype=np.uint16).tofile(tmp_path / "t.bin")
    with pytest.raises(DataError, match=r"t\.bin contains token id 300, but model\.vocab = 256"):
        open_one(kind="tokens", path=str(tmp_path / "t.bin"))


def test_token_id_out_of_the_vocabulary_in_a_large_file_is_an_error_of_its_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "MAX_FULL_SCAN_BYTES", 0)
    ids = np.zeros(10_000_000, dtype=np.uint16)
    ids[1_234_567] = 999
    source = TokenSource(ids, 4, 256, "large")
    with pytest.raises(ValueError, match=r"token id 999 is out of range for model\.vocab"):
        source[1_234_567 // 4]


def test_missing_data_path_is_an_error(tmp_path):
    with pytest.raises(DataError, match="matches no file"):
        open_one(kind="tokens", path=str(tmp_path / "no*"))


def test_text_without_a_tokenizer_is_bytes(tmp_path):
    (tmp_path / "t.txt").write_text("hello world")
    source = open_one(kind="text", path=str(tmp_path / "t.txt"))
    assert bytes(source[0][0].astype(np.uint8)) == b"hell"
    assert len(source) == 2


def test_fingerprint_depends_on_the_content_not_on_the_path(tmp_path):
    for name, last in (("a", 1), ("b", 1), ("c", 2)):
        np.array([*range(20), last], dtype=np.uint16).tofile(tmp_path / name)
    a, b, c = (open_one(kind="tokens", path=str(tmp_path / name)).fingerprint() for name in "abc")
    assert a == b != c


def test_mixture_opens_every_source(tmp_path):
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "t.bin")
    config = load_config(
        overrides=[
            f'--data.mixture=[{{kind="tokens", path="{tmp_path}/t.bin"}}, {{kind="synthetic", samples=5}}]',
            "--data.sequence=4",
        ]
    )
    sources = open_sources(config.data, 256, None)
    concatenated = ConcatenatedSource(sources)
    assert [len(source) for source in sources] == [4, 5]
    assert concatenated.locate(4) == (sources[1], 0)
    assert np.array_equal(concatenated[6][0], sources[1][2][0])


def test_changed_data_file_is_reported_by_name(tmp_path):
    for name in "ab":
        np.arange(90, dtype=np.uint16).tofile(tmp_path / name)
    sources = open_sources(DataConfig(sequence=4, kind="tokens", path=str(tmp_path)), 256, None)
    fingerprint = sources[0].fingerprint()
    raise_if_changed(sources)
    os.utime(tmp_path / "a")  # the content is the same
    raise_if_changed(sources)
    with (tmp_path / "b").open("r+b") as file:
        file.write(b"\1")
    with pytest.raises(DataError, match=r"data file .*/b changed during the run"):
        raise_if_changed(sources)
    assert sources[0].fingerprint() == fingerprint  # the identity of the run stays that of its start


def test_data_file_that_has_grown_was_replaced_or_was_deleted(tmp_path):
    def opened(name):
        np.arange(90, dtype=np.uint16).tofile(tmp_path / name)
        source = open_one(kind="tokens", path=str(tmp_path / name))
        source.fingerprint()
        return source

    grown, replaced, deleted = opened("grown"), opened("replaced"), opened("deleted")
    with (tmp_path / "grown").open("ab") as file:
        file.write(b"12")
    np.arange(1, 91, dtype=np.uint16).tofile(tmp_path / "new")
    os.replace(tmp_path / "new", tmp_path / "replaced")
    (tmp_path / "deleted").unlink()
    for source in (grown, replaced):
        with pytest.raises(DataError, match="changed during the run"):
            raise_if_changed([source])
    raise_if_changed([deleted])  # the memory map keeps the content


def test_unchanged_data_file_is_not_read_again(tmp_path, monkeypatch):
    np.arange(90, dtype=np.uint16).tofile(tmp_path / "t")
    source = open_one(kind="tokens", path=str(tmp_path / "t"))
    source.fingerprint()
    monkeypatch.setattr(TokenSource, "digest", lambda *_: pytest.fail("the content was read"))
    raise_if_changed([source])


@pytest.mark.parametrize("kind", ["text", "tokens", "jsonl"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_data_path_that_is_not_a_regular_file_is_an_error(tmp_path, kind, make):
    make(tmp_path / "t")
    with pytest.raises(DataError, match="is not a regular file"):
        open_one(kind=kind, path=str(tmp_path / "t"))
