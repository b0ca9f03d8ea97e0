"""The promises of the `Store` interface, kept by every store: a folder, an object store, and one in another process."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshwright.base.store import object_calls, object_store
from meshwright.base.store.interface import Store
from meshwright.base.store.object_process import STATE, ProcessCalls
from meshwright.base.store.object_store import ObjectStore
from meshwright.base.store.posix import PosixSink, PosixStore

SMALL_PART = 5 << 20
"""The smallest part that S3 accepts."""


@pytest.fixture(params=["posix", "object", "process"])
def store(request, tmp_path, monkeypatch) -> Store:
    if request.param == "posix":
        monkeypatch.setattr(PosixSink, "BLOCK_BYTES", 2 << 20)
        return PosixStore(tmp_path)
    request.getfixturevalue("s3")
    opened = ObjectStore(request.getfixturevalue("url"))
    monkeypatch.setattr(object_store, "PART_BYTES", SMALL_PART)
    monkeypatch.setattr(object_calls, "PART_BYTES", SMALL_PART)
    if request.param == "process":
        monkeypatch.setattr(STATE, "forking", os.getpid())
        assert isinstance(opened.calls, ProcessCalls)
    return opened


def test_publish_if_absent_publishes_once_and_leaves_no_temporary_file(store):
    assert store.publish_if_absent("folder/manifest.json", b"first")
    assert not store.publish_if_absent("folder/manifest.json", b"second")
    assert not store.publish_if_absent("folder/manifest.json", b"first")
    assert store.read("folder/manifest.json", 0, 100) == b"first"
    assert store.list_names("folder") == ["manifest.json"]


def test_publish_if_absent_runs_before_publish_while_the_name_is_absent(store):
    sizes = []
    assert store.publish_if_absent("manifest.json", b"content", lambda: sizes.append(store.size("manifest.json")))
    assert sizes == [None]
    assert store.size("manifest.json") == 7


def test_one_of_many_concurrent_publishers_succeeds(store):
    contents = [str(number).encode() * 1000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        published = list(pool.map(lambda content: store.publish_if_absent("a/manifest.json", content), contents))
    assert published.count(True) == 1
    assert store.read("a/manifest.json", 0, 10_000) == contents[published.index(True)]


def test_create_never_overwrites_a_file(store):
    sink = store.create("shard")
    sink.write(b"content")
    sink.close()
    with pytest.raises(FileExistsError):
        store.create("shard")
    assert store.read("shard", 2, 3) == b"nte"


def test_reads_end_at_the_end_of_the_file(store):
    store.publish_if_absent("file", b"0123456789")
    assert store.read("file", 4, 100) == b"456789"
    assert store.read("file", 10, 5) == b""
    assert store.read("file", 50, 5) == b""
    with pytest.raises(FileNotFoundError):
        store.read("absent", 0, 5)


@pytest.mark.parametrize("size", [0, 1, SMALL_PART, 2 * SMALL_PART, 2 * SMALL_PART + 12345])
def test_file_of_many_blocks_has_every_byte_at_its_place(store, size):
    content = random.Random(size).randbytes(size)
    sink = store.create("folder/shard")
    for start in range(0, size, 1_500_001):
        sink.write(content[start : start + 1_500_001])
    sink.close()
    sink.abort()
    assert store.size("folder/shard") == size
    assert store.read("folder/shard", 0, size + 1) == content
    blocks = [store.read("folder/shard", start, 1 << 20) for start in range(0, size, 1 << 20)]
    assert b"".join(blocks) == content


def test_replace_overwrites_a_file_and_leaves_no_temporary_file(store):
    for number in range(3):
        store.replace("attempts/0001/beat", str(number).encode())
        assert store.read("attempts/0001/beat", 0, 256) == str(number).encode()
    assert store.list_names("attempts/0001") == ["beat"]


def test_names_in_a_folder_are_files_and_folders_in_order(store):
    for name in ("b/2/x", "b/1", "a/y", "b/2/z"):
        store.publish_if_absent(name, b"content")
    assert store.list_names("b") == ["1", "2"]
    assert store.list_names("b/2") == ["x", "z"]


def test_removed_files_and_folders_are_gone(store):
    for name in ("a/1", "a/2", "ab/1"):
        store.publish_if_absent(name, b"content")
    store.remove("a/1")
    assert store.size("a/1") is None
    assert store.list_names("a") == ["2"]
    store.remove_folder("a")
    assert store.list_names("a") == []
    assert store.size("ab/1") == 7
    assert store.publish_if_absent("a/1", b"again")


def test_absent_files_and_folders_are_empty(store):
    assert store.size("absent") is None
    assert store.size("absent/file") is None
    assert store.list_names("absent") == []
