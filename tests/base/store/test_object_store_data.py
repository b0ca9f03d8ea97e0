"""Prepared token shards in an object store are read through the verified local cache."""

from __future__ import annotations

import json

import pytest

from meshwright.base.config import DataConfig
from meshwright.base.store.object_store import ObjectStore
from meshwright.core.data.file_sources import open_sources
from meshwright.core.data.prepare.command import prepare_folder
from meshwright.errors import DataError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": f"{number:03d}"}) + "\n" for number in range(50)))
    prepare_folder([str(tmp_path / "t.jsonl")], tmp_path / "folder", "", "auto", "text", "", "auto", 1, 32, 0)
    return tmp_path / "folder"


def open_source(path):
    [source] = open_sources(DataConfig(kind="shards", path=str(path), sequence=7), 256, None)
    return source


def upload(folder, url) -> ObjectStore:
    store = ObjectStore(url)
    for path in folder.iterdir():
        store.replace(path.name, path.read_bytes())
    return store


def test_samples_and_fingerprint_of_a_url_are_those_of_the_folder(s3, url, folder):
    upload(folder, url)
    local, remote = open_source(folder), open_source(url)
    assert remote.fingerprint() == local.fingerprint()
    assert [remote[n][0].tolist() for n in range(len(remote))] == [local[n][0].tolist() for n in range(len(local))]


def test_shard_that_was_damaged_in_the_store_is_an_error(s3, url, folder):
    store = upload(folder, url)
    content = bytearray((folder / "tokens-00002.bin").read_bytes())
    content[3] ^= 1
    store.replace("tokens-00002.bin", bytes(content))
    source = open_source(url)
    with pytest.raises(DataError, match=r"tokens-00002\.bin does not match its digest"):
        [source[n] for n in range(len(source))]


def test_url_without_shards_is_an_error(s3, url):
    with pytest.raises(DataError, match=r"has no index\.json"):
        open_source(url)
