"""Tests of meshwright.base.store.posix: what only a file system has; see also test_store_contract.py."""

from __future__ import annotations

import errno
import os
import random

import pytest

from meshwright.base.store.interface import Store
from meshwright.base.store.posix import PosixCalls, PosixSink, PosixStore
from meshwright.errors import CheckpointError


@pytest.fixture
def store(tmp_path) -> Store:
    return PosixStore(tmp_path)


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
