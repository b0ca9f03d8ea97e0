"""No process of Meshwright takes a file of the current folder for a module; entry points alone are imported from it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from meshwright_practice.cards.card import Experiment
from meshwright_practice.cards.runner import ExperimentRunner, RunLimits

from meshwright.base.environment import start_python, user_folders
from meshwright.base.records.events import read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.object_calls import RequestLimits
from meshwright.base.store.object_process import ProcessCalls
from meshwright.base.user_code.entry_points import load_entry_point
from meshwright.core.data.shards import TokenShards
from meshwright.errors import ConfigError
from tests.kit.hostile_folder import fill_hostile_folder, imported

MESHWRIGHT = str(Path(sys.executable).parent / "meshwright")
MODEL = """
import numpy as np
from torch import nn
from my_loss import squared

def build():
    from my_layers import Net
    return Net()

class Numbers:
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return np.full(2, index / 32, np.float32), np.full(2, 1.0, np.float32)
"""
LAYERS = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
    def forward(self, x):
        from my_scale import scale
        return scale * self.linear(x)
"""


CHILD = """
import os, sys
from meshwright.base.user_code.entry_points import load_entry_point
before = list(sys.path)
print(load_entry_point("model", "my_project:name"), before[0], os.getcwd() in before, sys.path[len(before):], sep="\\n")
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    folder = fill_hostile_folder(tmp_path / "hostile")
    monkeypatch.chdir(folder)
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run(*command: str, **variables: str) -> None:
    done = subprocess.run(
        [MESHWRIGHT, *command], env=os.environ | variables, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_train_its_exporter_and_a_resume_import_entry_points_alone_from_the_current_folder(hostile, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (hostile / "my_model.py").write_text(MODEL)
    (hostile / "my_layers.py").write_text(LAYERS)
    (hostile / "my_loss.py").write_text("def squared(out, y):\n    return ((out - y) ** 2).sum()\n")
    (hostile / "my_scale.py").write_text("scale = 2.0\n")
    (hostile / "run.toml").write_text("[launch]\ndevice = 'cpu'\n[batch]\nglobal = 4\n[eval]\nholdout = 0.0\n")
    named = ["--model=my_model:build", "--loss=my_model:squared", "--source=my_model:Numbers"]
    options = ["run.toml", "--run=r", "--ranks=2", f"--metrics.port={free_port()}", *named]
    run("train", *options, "--steps=2")
    run("train", *options, "--steps=3")
    steps = [event["step"] for event in read_events(RunFolder(hostile / "r").events(1)) if event["kind"] == "step"]
    assert steps == [0, 1, 2]
    assert imported(hostile) == ""


def test_data_prepare_imports_nothing_from_the_current_folder(hostile, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (hostile / "text.txt").write_text("line\n" * 500_000)
    run("data", "prepare", "text.txt", "--out=shards", "--workers=2")
    assert TokenShards(hostile / "shards").index.tokens == 2_500_001
    assert imported(hostile) == ""


def test_children_import_nothing_from_empty_and_relative_entries_of_the_path(hostile, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", "../hostile", os.environ.get("PYTHONPATH", "")]))
    calls = ProcessCalls("s3://bucket/run", RequestLimits())
    calls.start()
    calls.close()
    with ExperimentRunner(RunLimits(60.0)) as runner:
        assert "nowhere" in runner.run(Experiment("nowhere:run"), {}).failure
    assert imported(hostile) == ""


def test_relative_entries_of_the_path_are_folders_of_entry_points(tmp_path, monkeypatch):
    source, absolute = tmp_path / "src", tmp_path / "absolute"
    source.mkdir()
    absolute.mkdir()
    (source / "my_project.py").write_text("from my_other import name\n")
    (absolute / "my_other.py").write_text("name = 1\n")
    (absolute / "my_child.py").write_text(CHILD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", str(absolute), ""]))
    monkeypatch.setitem(sys.modules, "my_child", ModuleType("my_child"))
    sys.modules["my_child"].__file__ = str(absolute / "my_child.py")
    child = start_python("my_child", stdout=subprocess.PIPE)
    output, _ = child.communicate(timeout=60)
    assert output.decode().splitlines() == ["1", str(absolute), "False", str([str(tmp_path), str(source)])]
    assert user_folders() == [str(tmp_path), str(source)]


def test_folder_of_the_user_is_searched_last_and_only_while_it_has_the_entry_point(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("build = None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(sys.path)
    assert load_entry_point("model", "json:dumps") is json.dumps
    with pytest.raises(ConfigError, match=rf"json has no attribute build; try another name for {tmp_path}/json\.py: "):
        load_entry_point("model", "json:build")
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        load_entry_point("model", "my_missing:build")
    assert sys.path == before
