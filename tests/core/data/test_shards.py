"""Tests of meshwright.core.data.shards, shard_files and shard_source: verification, the cache and samples."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil

import numpy as np
import pytest

from meshwright.base.config import DataConfig
from meshwright.base.store.posix import PosixStore
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.prepare.command import prepare_folder
from meshwright.core.data.shard_files import ShardCache
from meshwright.core.data.shards import TokenShards
from meshwright.core.data.token_files import raise_if_changed
from meshwright.errors import DataError

TEXTS = [f"{number:03d}" for number in range(50)]
SHARD_BYTES = 64


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shards"


@pytest.fixture
def folder(tmp_path):
    """50 documents of 4 byte tokens each in shards of 32 tokens."""
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare([str(tmp_path / "t.jsonl")], tmp_path / "folder")
    return tmp_path / "folder"


def prepare(inputs, out, shard_tokens=32):
    prepare_folder(inputs, out, "", "auto", "text", "", "auto", 1, shard_tokens, 0)


def open_source(folder, vocab=256, sequence=7, **settings):
    [source] = open_sources(DataConfig(kind="shards", path=str(folder), sequence=sequence, **settings), vocab, None)
    return source


def samples(source):
    return [source[index][0].tolist() for index in range(len(source))]


@pytest.mark.parametrize("shard_cache", [0, 10 * SHARD_BYTES, 1])
def test_samples_of_shards_are_consecutive_sequences(folder, shard_cache):
    source = open_source(folder, shard_cache=shard_cache)
    stream = "".join(text + "\0" for text in TEXTS).encode()
    for index in np.random.default_rng(0).permutation(len(source)):
        tokens, labels = source[int(index)]
        start = int(index) * 7
        assert bytes(tokens.astype(np.uint8)) == stream[start : start + 7]
        assert bytes(labels.astype(np.uint8)) == stream[start + 1 : start + 8]
    with pytest.raises(IndexError):
        source[len(source)]


def test_fingerprint_of_shards_depends_on_content_and_sequence_alone(folder, tmp_path):
    prepare([str(tmp_path / "t.jsonl")], tmp_path / "large", shard_tokens=1000)
    same = {
        open_source(path, shard_cache=size).fingerprint() for path in (folder, tmp_path / "large") for size in (0, 999)
    }
    assert len(same) == 1
    assert open_source(folder, sequence=6).fingerprint() not in same


def test_token_id_out_of_the_vocabulary_is_an_error(folder):
    with pytest.raises(DataError, match=r"contains token id 57, but model\.vocab = 57"):
        open_source(folder, vocab=57)


def damage_byte(file):
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)


def damage_size(file):
    file.write_bytes(file.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [damage_byte, damage_size, os.unlink])
@pytest.mark.parametrize("shard_cache", [0, 999])
def test_damaged_shard_is_named(folder, damage, shard_cache):
    damage(folder / "tokens-00002.bin")
    source = open_source(folder, shard_cache=shard_cache)
    source[0]
    with pytest.raises(DataError, match=r"token shard .*tokens-00002\.bin"):
        source[2 * 32 // 7 + 1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "object"),
        ("tokens", 10**9),
        ("shard_tokens", 0),
        ("shards", []),
        ("shards", [{"tokens": 1}]),
        ("digest", 3),
        ("format", "other"),
    ],
)
def test_invalid_index_is_an_error(folder, key, value):
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {key: value}))
    with pytest.raises(DataError, match=r"index\.json is not a valid index"):
        TokenShards(folder)


def test_digest_of_one_shard_is_that_of_its_files(folder, tmp_path):
    prepare([str(tmp_path / "t.jsonl")], tmp_path / "one", shard_tokens=1000)
    index = json.loads((tmp_path / "one" / "index.json").read_text())
    (tmp_path / "one" / "index.json").write_text(json.dumps(index | {"digest": "0" * 32}))
    with pytest.raises(DataError, match="digest is not that of its shard"):
        TokenShards(tmp_path / "one")


def test_token_id_above_the_largest_of_the_index_is_an_error(folder):
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"largest_id": 50}))
    source = open_source(folder, vocab=51)
    with pytest.raises(DataError, match=r"tokens-0000\d\.bin contains token id \d+, and the largest id"):
        samples(source)


def test_cache_that_cannot_be_written_is_an_error(folder, cache, monkeypatch):
    cache.parent.mkdir()
    cache.write_text("")
    with pytest.raises(DataError, match=r"the cache .*shards of .* cannot be written: File exists"):
        open_source(folder, shard_cache=999)
    cache.unlink()
    source = open_source(folder, shard_cache=999)

    def full(*arguments, **settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    with pytest.raises(DataError, match="cannot be written: No space left"):
        source[0]


@pytest.mark.parametrize("damage", [damage_byte, damage_size, os.unlink])
def test_damaged_file_of_the_cache_is_fetched_again(folder, cache, damage):
    expected = samples(open_source(folder, shard_cache=9999))
    files = sorted(cache.glob("*.shard"))
    assert len(files) == 7  # tokens alone are needed
    for file in files:
        damage(file)
    assert samples(open_source(folder, shard_cache=9999)) == expected
    assert sorted(cache.glob("*.shard")) == files


def test_cache_serves_shards_without_their_folder(folder):
    source = open_source(folder, shard_cache=9999)
    expected = samples(source)
    for file in folder.glob("tokens-*"):
        file.unlink()
    assert samples(open_source(folder, shard_cache=9999)) == expected


def test_cache_keeps_its_size_and_the_shards_in_use(folder, cache):
    shards = TokenShards(folder)
    limit = 3 * SHARD_BYTES
    files = ShardCache(PosixStore(folder), folder, limit)
    digests = [shard.digests["tokens"] for shard in shards.index.shards]

    def read(number):
        return files.map(f"tokens-{number:05d}.bin", np.dtype("<u2"), 32, digests[number])

    def cached():
        names = {file.stem for file in cache.glob("*.shard")}
        return {number for number, digest in enumerate(digests) if digest in names}

    used = read(0)
    for number in (1, 2, 3, 4):
        read(number)  # mapped and released
    assert cached() == {0, 3, 4}  # the least recently used ones went, but not the one in use
    before = used.copy()
    read(3)
    read(5)
    assert cached() == {0, 3, 5}
    assert np.array_equal(used, before)
    del used
    read(4)
    read(1)
    assert cached() == {5, 4, 1}


def test_size_of_the_index_that_is_not_that_of_the_file_evicts_nothing(folder, cache):
    shard, files = TokenShards(folder).index.shards[0], ShardCache(PosixStore(folder), folder, 3 * SHARD_BYTES)
    files.map("tokens-00000.bin", np.dtype("<u2"), 32, shard.digests["tokens"])
    before = set(cache.glob("*.shard"))
    with pytest.raises(DataError, match=r"tokens-00001\.bin has 64 bytes instead of 2,305,843,009,213,693,952"):
        files.map("tokens-00001.bin", np.dtype("<u2"), 1 << 60, "f" * 32)
    assert set(cache.glob("*.shard")) == before


def read_all(folder, results):
    results.put(samples(open_source(folder, shard_cache=2 * SHARD_BYTES)))


def test_processes_that_share_a_small_cache_read_the_same_samples(folder, cache):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=read_all, args=(folder, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert all(result == samples(open_source(folder)) for result in found)
    assert not list(cache.glob("*.part"))


def test_rest_of_a_killed_fetch_is_removed(folder, cache):
    cache.mkdir(parents=True)
    (cache / "x.part").write_bytes(b"rest")
    open_source(folder, shard_cache=999)[0]
    assert not (cache / "x.part").exists()


def test_shard_that_changes_during_a_run_is_an_error(folder, tmp_path):
    source = open_source(folder)
    source[0]
    raise_if_changed([source])
    os.utime(folder / "tokens-00000.bin")
    raise_if_changed([source])
    shutil.copy(folder / "tokens-00001.bin", folder / "tokens-00000.bin")
    with pytest.raises(DataError, match=r"tokens-00000\.bin changed during the run"):
        raise_if_changed([source])
