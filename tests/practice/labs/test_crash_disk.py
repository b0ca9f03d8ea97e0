"""The states in which a crash can leave a folder, enumerated from the recorded calls."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
from meshwright_practice.labs.instruments.crash_disk import CrashDisk, write_tree

OLD, NEW = b"old" * 10, b"new" * 10


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_bytes(OLD)
    return tmp_path / "data"


def record(folder, function, **names):
    """The states of a function, as (kind, complete) -> the list of trees."""
    module = ModuleType("user")
    vars(module).update(names)
    disk = CrashDisk(folder)
    with disk.record(module):
        function(module)
    states = {}
    for state in disk.states():
        states.setdefault((state.kind, state.complete), []).append(state.files)
    return states, disk


def write(path, content, sync=False):
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def sync_folder(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def test_write_in_place_can_leave_an_empty_and_a_torn_file(folder):
    states, _ = record(folder, lambda _: write(folder / "a", NEW))
    killed = [files["a"] for files in states["kill", False]]
    assert b"" in killed
    assert NEW[:15] in killed
    assert {"a": NEW} in states["kill", True]
    assert {"a": OLD} in states["power loss", True]


def test_rename_without_fsync_can_leave_an_empty_file_under_the_new_name(folder):
    def save(_):
        write(folder / "b", NEW)
        os.replace(folder / "b", folder / "a")

    states, disk = record(folder, save)
    assert {"a": b""} in states["power loss", False]
    assert {files["a"] for files in states["kill", False]} == {OLD, NEW}
    assert disk.calls == ["open b wb", "replace b a"]


def test_fsync_before_the_rename_leaves_the_old_or_the_new_file(folder):
    def save(_):
        write(folder / "b", NEW, sync=True)
        os.replace(folder / "b", folder / "a")

    states, _ = record(folder, save)
    assert {files["a"] for files in states["power loss", False]} == {OLD, NEW}
    assert {files["a"] for files in states["power loss", True]} == {OLD, NEW}  # the new name may be lost


def test_fsync_of_the_folder_makes_the_new_name_durable(folder):
    def save(_):
        write(folder / "b", NEW, sync=True)
        os.replace(folder / "b", folder / "a")
        sync_folder(folder)

    states, _ = record(folder, save)
    assert states["power loss", True] == [{"a": NEW}]


def test_deleted_file_may_come_back_after_a_loss_of_power(folder):
    states, _ = record(folder, lambda _: os.unlink(folder / "a"))
    assert states["kill", True] == [{}]
    assert sorted(map(len, states["power loss", True])) == [0, 1]


def test_folders_are_renamed_with_what_is_in_them(folder):
    def save(_):
        (folder / "tmp").mkdir()
        write(folder / "tmp" / "b", NEW, sync=True)
        sync_folder(folder / "tmp")
        (folder / "tmp").rename(folder / "step")
        sync_folder(folder)

    states, _ = record(folder, save)
    assert states["power loss", True] == [{"a": OLD, "step/b": NEW}]
    assert {"a": OLD, "tmp/b": NEW} in states["kill", False]


def test_imported_names_are_recorded_and_put_back(folder):
    replace = os.replace
    states, disk = record(folder, lambda user: user.move(folder / "a", folder / "c"), move=os.replace)
    assert disk.calls == ["replace a c"]
    assert os.replace is replace


def test_tree_is_written_with_its_folders(tmp_path):
    write_tree(tmp_path, {"a": b"1", "x/y/b": b"2"})
    assert (tmp_path / "x" / "y" / "b").read_bytes() == b"2"
