"""Temporary folders of launches are removed when nobody holds their lock, whatever process ids say."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from meshwright.base.scratch_folder import LOCK_FILE, PREFIX, ScratchFolder, remove_stale_folders


@pytest.fixture(autouse=True)
def temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_folder_of_a_running_launch_is_kept(tmp_path):
    first, second = ScratchFolder(), ScratchFolder()
    remove_stale_folders()
    assert sorted(tmp_path.iterdir()) == sorted([first.path, second.path])
    first.remove()
    second.remove()
    assert not list(tmp_path.iterdir())


def test_folder_of_a_launch_in_another_pid_namespace_is_kept(tmp_path):
    code = "from meshwright.base.scratch_folder import ScratchFolder as S; f = S(); print(f.path, flush=True); input()"
    unshare = ["unshare", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow new pid namespaces")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen([*unshare, sys.executable, "-c", code], stdin=pipe, stdout=pipe, env=environment) as other:
        folder = other.stdout.readline().decode().strip()
        remove_stale_folders()
        assert os.path.isdir(folder)
        other.stdin.close()
    remove_stale_folders()
    assert not os.path.exists(folder)


def test_folder_of_a_killed_launch_is_removed(tmp_path):
    launch = os.fork()
    if not launch:
        folder = ScratchFolder()  # noqa: F841  a deleted object would remove its folder
        os._exit(0)
    os.waitpid(launch, 0)
    assert list(tmp_path.iterdir())
    remove_stale_folders()
    assert not list(tmp_path.iterdir())


def test_folder_whose_lock_is_not_there_yet_is_kept(tmp_path):
    (tmp_path / f"{PREFIX}new").mkdir()
    remove_stale_folders()
    assert list(tmp_path.iterdir())


def test_fifo_and_links_in_place_of_a_folder_or_lock_are_left_alone(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / LOCK_FILE).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(outside)
    (tmp_path / f"{PREFIX}fifo").mkdir()
    os.mkfifo(tmp_path / f"{PREFIX}fifo" / LOCK_FILE)
    remove_stale_folders()
    assert (outside / LOCK_FILE).exists()
