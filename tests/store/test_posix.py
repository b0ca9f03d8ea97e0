"""Tests of meshwright.store.posix: the promises of the `Store` interface on a real file system."""

from __future__ import annotations

import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshwright.errors import CheckpointError
from meshwright.store.interface import Store
from meshwright.store.posix import PosixCalls, PosixSink, PosixStore


@pytest.fixture
def store(tmp_path) -> Store:
    return PosixStore(tmp_path)


def test_publish_if_absent_publishes_once_and_leaves_no_temporary_file(store):
    assert store.publish_if_absent("folder/manifest.json", b"first")
    assert not store.publish_if_absent("folder/manifest.json", b"second")
    assert store.read("folder/manifest.json", 0, 100) == b"first"
    assert store.list_names("folder") == ["manifest.json"]


def test_publish_if_absent_runs_before_publish_while_the_name_is_absent(store):
    sizes = []
    assert store.publish_if_absent("manifest.json", b"content", lambda: sizes.append(store.size("manifest.json")))
    assert sizes == [None]
    assert store.size("manifest.json") == 7


def test_one_of_many_concurrent_publishers_succeeds(store):
    contents = [str(number).encode() * 1000 for number in range(16)]
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


def test_file_system_without_hard_links_is_a_one_line_error(tmp_path):
    class NoHardLinks(PosixCalls):
        def link(self, path: str, name: str) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), name)

    with pytest.raises(CheckpointError, match="does not support hard links"):
        PosixStore(tmp_path, NoHardLinks()).publish_if_absent("manifest.json", b"content")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_read_rejects_a_file_that_is_not_regular(store, tmp_path, kind):
    (tmp_path / "target").write_bytes(b"secret")
    os.mkfifo(tmp_path / "name") if kind == "fifo" else (tmp_path / "name").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=r"not a regular file|symbolic links"):
        store.read("name", 0, 10)


def test_absent_files_and_folders_are_empty(store):
    assert store.size("absent") is None
    assert store.size("absent/file") is None
    assert store.list_names("absent") == []


class RefusesDirectWrites(PosixCalls):
    """A disk on which a direct write fails at the first block: its blocks have another alignment."""

    direct = False

    def set_direct(self, file: int, direct: bool) -> bool:
        self.direct = direct
        return direct

    def write(self, file, content, offset):
        if self.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().write(file, content, offset)


@pytest.mark.parametrize("calls", [PosixCalls, RefusesDirectWrites])
@pytest.mark.parametrize("size", [0, 4096, 5 * 4096, 5 * 4096 + 1, 23 * 4096 - 1])
def test_file_of_many_blocks_has_every_byte_at_its_place(tmp_path, monkeypatch, calls, size):
    monkeypatch.setattr(PosixSink, "BLOCK_BYTES", 2 * 4096)
    content = random.Random(size).randbytes(size)
    sink = PosixStore(tmp_path, calls()).create("shard")
    for start in range(0, size, 3001):
        sink.write(content[start : start + 3001])
    sink.close()
    sink.abort()
    assert (tmp_path / "shard").read_bytes() == content


def test_failed_block_fails_the_file_before_it_is_durable(tmp_path, monkeypatch):
    monkeypatch.setattr(PosixSink, "BLOCK_BYTES", 4096)
    synced = []

    class FullDisk(PosixCalls):
        def write(self, file, content, offset):
            if offset == 3 * 4096:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(file, content, offset)

        def sync(self, file: int) -> None:
            synced.append(file)

    def write_file() -> None:
        sink.write(bytes(5 * 4096))
        sink.close()

    sink = PosixStore(tmp_path, FullDisk()).create("shard")
    with pytest.raises(OSError, match="No space left"):
        write_file()
    sink.abort()
    assert synced == []
